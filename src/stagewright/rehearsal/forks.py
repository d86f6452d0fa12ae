"""One worker in every host, without a launcher.

Emulated hosts have but a part of a core, and loading torch takes 5 s of one: their workers are forked of one process
that has it, and enter their hosts then. Workers that use a card start anew.

    this process ──▶ server, torch loaded ──▶ fork, enters host 0, runs
                                          └─▶ fork, enters host 1, runs
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from stagewright.rehearsal.hosts import EmulatedHosts
from stagewright.runtime.hosts import (
    LEAVE_S,
    PORT,
    Hosts,
    host_failure,
    launch_hosts,
    log_of,
    lone_commands,
    lone_environment,
)
from stagewright.runtime.stem import follow_parent

LOADED = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch._meta_registrations")
"""What torch loads when a model is first cut into stages."""


def launch_in_hosts(
    module: str, folder: Path, hosts: Hosts, environment: Mapping[str, str], *, uses_card: bool
) -> None:
    """Runs `main(folder)` of a module as a worker in every host; when one fails, all end and the first is shown."""
    if uses_card or not isinstance(hosts, EmulatedHosts):
        commands = lone_commands(["-m", module, os.fspath(folder)], hosts, PORT)
        launch_hosts(commands, folder, {**hosts.environment(), **environment})
        return
    with workers_in_hosts(module, folder, hosts, environment) as workers:
        wait_for_all(workers, folder / "logs")


@contextmanager
def workers_in_hosts(
    module: str, folder: Path, hosts: EmulatedHosts, environment: Mapping[str, str], port: int = PORT
) -> Iterator[list[BaseProcess]]:
    """Runs `main(folder)` of a module as a worker in every host, which meet at a port; all end with the context."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([module, *LOADED])
    given = {**os.environ, **hosts.environment(), **environment, **lone_environment(hosts, port)}
    workers: list[BaseProcess] = [
        server.Process(
            target=run_in_host,
            args=(hosts, host, {**given, "RANK": str(host)}, log_of(logs, host), module, os.fspath(folder)),
        )
        for host in range(len(hosts.addresses))
    ]
    try:
        for worker in workers:
            worker.start()
        yield workers
    finally:
        end_all(workers)


def run_in_host(
    hosts: EmulatedHosts, host: int, environment: Mapping[str, str], log: Path, module: str, folder: str
) -> None:
    """A fork's part: goes into its host and runs there, with its output in a file."""
    follow_parent()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # locks then need nobody who frees them when this is killed
    hosts.enter(host)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    try:
        importlib.import_module(module).main(folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def wait_for_all(workers: Sequence[BaseProcess], logs: Path) -> None:
    """Returns when every worker ended well; raises at the first that did not."""
    left = {worker.sentinel: number for number, worker in enumerate(workers)}
    while left:
        for sentinel in wait(list(left)):
            assert isinstance(sentinel, int)
            number = left.pop(sentinel)
            workers[number].join()
            status = workers[number].exitcode
            if status:
                raise host_failure(number, len(workers), status, logs)


def end_all(workers: Sequence[BaseProcess]) -> None:
    """Ends the workers that still run."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        if worker.pid is not None:
            worker.join(LEAVE_S)
