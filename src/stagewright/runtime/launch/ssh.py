"""Starting workers on several hosts over ssh: one command for each, which runs torchrun there."""

from __future__ import annotations

import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from stagewright.cluster import count
from stagewright.errors import RunError, UsageError
from stagewright.plan import Plan
from stagewright.runtime.launch.local import LEAVE_S, PORT, clear_words, explain
from stagewright.runtime.launch.process import follow_parent
from stagewright.runtime.run_folder import LOGS, PRIVATE

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_\[][A-Za-z0-9_.:\]-]*", re.ASCII)


@dataclass(frozen=True)
class OverSsh:
    """Hosts that are reached over ssh, with the same working folder as here."""

    names: tuple[str, ...]
    """As ssh takes them: host1, or user@host1."""
    python: str = sys.executable
    """The interpreter there: ssh's own PATH seldom has the one that is needed."""

    def __post_init__(self) -> None:
        for name in self.names:
            # ssh would take what begins with a dash for an option.
            if _NAME.fullmatch(name) is None:
                raise UsageError(f"{name!r} is no name of a host", "write --nodes host1,host2 or user@host1,user@host2")

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(name.rpartition("@")[2] for name in self.names)

    def workers(self, plan: Plan) -> tuple[int, ...]:
        return plan.host_workers(len(self.names))

    def reach(self, host: int, command: Sequence[str]) -> list[str]:
        """The ssh command that runs a command in this folder on a host; every word arrives as it is."""
        alive = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"]
        return ["ssh", *alive, "--", self.names[host], f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"]

    def lost(self) -> list[int]:
        """The hosts that cannot be reached any more, asked side by side."""
        quiet = subprocess.DEVNULL
        asked = [
            subprocess.Popen(self.reach(host, ["true"]), stdin=quiet, stdout=quiet, stderr=quiet)
            for host in range(len(self.names))
        ]
        until, lost = time.monotonic() + 15.0, []
        for host, process in enumerate(asked):
            try:
                is_there = process.wait(max(0.0, until - time.monotonic())) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                is_there = process.wait() == 0
            if not is_there:
                lost.append(host)
        return lost

    def without(self, lost: Collection[int]) -> OverSsh:
        """The hosts that are left."""
        return replace(self, names=tuple(name for number, name in enumerate(self.names) if number not in lost))


def host_commands(
    command: Sequence[str], hosts: OverSsh, workers: Sequence[int], port: int, before: Sequence[str] = ()
) -> list[list[str]]:
    """For each host in use the command that starts its workers under torchrun, meeting at the first of them.

    `before` are words that stand before torchrun.
    """
    used = [(host, local) for host, local in enumerate(workers) if local]
    meeting = hosts.addresses[used[0][0]]
    made = []
    for number, (host, local) in enumerate(used):
        run = [
            *before, hosts.python, "-m", "torch.distributed.run", f"--nnodes={len(used)}", f"--node-rank={number}",
            f"--nproc-per-node={local}", f"--master-addr={meeting}", f"--master-port={port}", *command,
        ]  # fmt: skip
        made.append(hosts.reach(host, run))
    return made


def launch_over_ssh(
    hosts: OverSsh, command: Sequence[str], plan: Plan, folder: Path, environment: Mapping[str, str], timeout_s: float
) -> None:
    """Starts the plan's workers on hosts that see the run's folder; raises with the first cause."""
    clear_words(folder)
    # What ssh starts has its own environment, and outlives ssh unless it is on a leash.
    given = [f"{key}={value}" for key, value in environment.items() if key.startswith("STAGEWRIGHT_")]
    before = [hosts.python, "-m", "stagewright.runtime.launch.leash", str(timeout_s), "env", *given]
    logs = folder / LOGS
    logs.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, each in enumerate(host_commands(command, hosts, hosts.workers(plan), PORT, before)):
            with _log_of(logs, number).open("ab") as log:
                # Apart from this terminal's Ctrl-C; it ends with this process, however that ends.
                running.append(subprocess.Popen(
                    each, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, preexec_fn=follow_parent,
                    start_new_session=True,
                ))  # fmt: skip
        _wait_for_all(running, logs)
    except RunError as failure:
        raise explain(plan, folder, {}, failure, {host: hosts.addresses[host] for host in hosts.lost()}) from None
    finally:
        _end_all(running)


def _end_all(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the processes that still run: kindly first, so that they can end their own."""
    for process in running:
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()  # who is on a leash ends by this
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + LEAVE_S
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_all(running: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    """Returns when every process ended well; raises at the first that did not. Meanwhile they hear that we are here."""
    left, said = dict(enumerate(running)), 0.0
    while left:
        if time.monotonic() - said > 1.0:  # the leash on each host listens for it
            said = time.monotonic()
            pipes = [process.stdin for process in left.values() if process.stdin is not None]
            for pipe in select.select([], pipes, [], 0.0)[1]:
                with suppress(OSError):
                    os.write(pipe.fileno(), b"\n")
        for number, process in list(left.items()):
            try:
                status = process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            if status != 0:
                tail = _log_of(logs, number).read_text(errors="replace").strip().splitlines()[-3:]
                what = f"{count(1, 'host')} of {len(running)} failed: host {number} ended with status {status}"
                raise RunError(what, "\n".join(tail) or f"its output is in {logs}")
            del left[number]


def _log_of(logs: Path, host: int) -> Path:
    """Where a host's output is."""
    return logs / f"host-{host}.log"
