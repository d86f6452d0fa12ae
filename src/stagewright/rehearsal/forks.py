"""One worker in every host, without a launcher.

Emulated hosts have but a part of a core, and loading torch takes 5 s of one: their workers are forked of Python's fork
server, which has it loaded, and enter their hosts then. Workers that use a card start anew.

    this process ──▶ fork server, torch loaded ──▶ fork, enters host 0, runs
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
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from stagewright.rehearsal.hosts import EmulatedHosts
from stagewright.rehearsal.slices import Slices
from stagewright.runtime.hosts import LEAVE_S, PORT, host_failure, log_of
from stagewright.runtime.stem import follow_parent

_LOADED = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch._meta_registrations")
"""What torch loads when a model is first cut into stages."""


@contextmanager
def workers_in_hosts(
    module: str, folder: Path, hosts: EmulatedHosts | Slices, *, used: Sequence[int], port: int = PORT
) -> Iterator[list[BaseProcess]]:
    """Runs `main(folder)` of a module as one worker in each of the used hosts; all end with the context."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn") if hosts.uses_card else _fork_server(module)
    common = {
        **os.environ, **hosts.environment(), "WORLD_SIZE": str(len(used)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": hosts.addresses[used[0]], "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    workers: list[BaseProcess] = [
        context.Process(
            target=_run_in_host,
            args=(hosts, host, {**common, "RANK": str(rank)}, log_of(logs, host), module, os.fspath(folder)),
        )
        for rank, host in enumerate(used)
    ]
    try:
        for worker in workers:
            worker.start()
        yield workers
    finally:
        _end_all(workers)


def _fork_server(module: str) -> ForkServerContext:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([module, *_LOADED])
    return server


def _run_in_host(
    hosts: EmulatedHosts | Slices, host: int, environment: Mapping[str, str], log: Path, module: str, folder: str
) -> None:
    """A worker's part: goes into its host and runs there, with its output in a file."""
    follow_parent()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # locks then need nobody who frees them when this is killed
    hosts.enter(host)
    torch.set_num_threads(1)
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


def _end_all(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        if worker.pid is not None:
            worker.join(LEAVE_S)
