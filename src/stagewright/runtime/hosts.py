"""Starting workers in several hosts, real or emulated: one command for each, which runs torchrun there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from stagewright.cluster import count
from stagewright.errors import RunError, UsageError
from stagewright.plan import Plan
from stagewright.runtime.launch import clear_words, explain
from stagewright.runtime.stem import follow_parent

PORT = 29_400
"""Where the workers of several hosts meet."""
LEAVE_S = 10.0
"""How long hosts' commands may take to end when they are asked to."""
NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_\[][A-Za-z0-9_.:\]-]*", re.ASCII)


class HostError(RunError):
    """A host whose command failed."""

    def __init__(self, host: int, status: int, what: str, todo: str | None = None) -> None:
        super().__init__(what, todo)
        self.host, self.status = host, status


class Hosts(Protocol):
    """Several hosts, real or emulated: where they are, and how a command is run in one of them."""

    @property
    def addresses(self) -> Sequence[str]:
        """For each host the address at which the others find it."""

    @property
    def launcher(self) -> Sequence[str]:
        """torchrun, as it is called there."""

    def workers(self, plan: Plan) -> Sequence[int]:
        """For each host how many of the plan's workers run there."""

    def reach(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs another one in a host."""

    def environment(self) -> Mapping[str, str]:
        """What this process must pass on to what it starts there."""


@dataclass(frozen=True)
class OverSsh:
    """Hosts that are reached over ssh, with the same working folder as here."""

    names: tuple[str, ...]
    """As ssh takes them: host1, or user@host1."""
    launcher: tuple[str, ...] = ("torchrun",)

    def __post_init__(self) -> None:
        for name in self.names:
            # ssh would take what begins with a dash for an option.
            if NAME.fullmatch(name) is None:
                raise UsageError(f"{name!r} is no name of a host", "write --nodes host1,host2 or user@host1,user@host2")

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(name.rpartition("@")[2] for name in self.names)

    def workers(self, plan: Plan) -> tuple[int, ...]:
        return plan.host_workers(len(self.names))

    def reach(self, host: int, command: Sequence[str]) -> list[str]:
        """The ssh command that runs a command in this folder on a host; every word arrives as it is."""
        alive = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"]
        return ["ssh", *alive, "--", self.names[host], f"cd {shlex.quote(os.getcwd())} && {shlex.join(command)}"]

    def answers(self, host: int) -> bool:
        """Whether a host can still be reached."""
        try:
            asked = subprocess.run(
                self.reach(host, ["true"]), stdin=subprocess.DEVNULL, capture_output=True, timeout=30
            )
        except subprocess.TimeoutExpired:
            return False
        return asked.returncode == 0

    def without(self, gone: Sequence[int]) -> OverSsh:
        """The hosts that are left."""
        return OverSsh(tuple(name for number, name in enumerate(self.names) if number not in gone), self.launcher)

    def environment(self) -> dict[str, str]:
        return {}


def host_commands(
    command: Sequence[str], hosts: Hosts, workers: Sequence[int], port: int,
    environment: Mapping[str, str] | None = None,
) -> list[list[str]]:  # fmt: skip
    """For each host in use the command that starts its workers under torchrun, meeting at the first of them."""
    given = ["env", *(f"{key}={value}" for key, value in environment.items())] if environment else []
    used = [(host, local) for host, local in enumerate(workers) if local]
    meeting = hosts.addresses[used[0][0]]
    made = []
    for number, (host, local) in enumerate(used):
        run = [
            *given, *hosts.launcher, f"--nnodes={len(used)}", f"--node-rank={number}", f"--nproc-per-node={local}",
            f"--master-addr={meeting}", f"--master-port={port}", *command,
        ]  # fmt: skip
        made.append(hosts.reach(host, run))
    return made


def lone_commands(command: Sequence[str], hosts: Hosts, port: int) -> list[list[str]]:
    """For each host the command that starts its one worker without a launcher, which takes twice as long."""
    given = [f"{key}={value}" for key, value in lone_environment(hosts, port).items()]
    every = range(len(hosts.addresses))
    return [hosts.reach(host, ["env", f"RANK={host}", *given, sys.executable, *command]) for host in every]


def lone_environment(hosts: Hosts, port: int) -> dict[str, str]:
    """What the one worker of each host is told of the others; its own RANK is the host's number."""
    return {
        "WORLD_SIZE": str(len(hosts.addresses)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(port),
    }  # fmt: skip


def launch_hosts(commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str] | None = None) -> None:
    """Runs one command for each host side by side; when one fails, all are ended and the first cause is shown."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with log_of(logs, number).open("wb") as log:
                running.append(start_host(command, log, environment or {}))
        wait_for_all(running, logs)
    finally:
        end_all(running)


def launch_in(hosts: Hosts, command: Sequence[str], plan: Plan, folder: Path, environment: Mapping[str, str]) -> None:
    """Starts the plan's workers in hosts that see this machine's files; raises with the first cause."""
    clear_words(folder)
    commands = host_commands(command, hosts, hosts.workers(plan), PORT)
    try:
        launch_hosts(commands, folder, {**environment, **hosts.environment()})
    except HostError as failure:
        raise explain(plan, folder, {failure.host: failure.status}) from None


def start_host(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts one host's command; it ends with this process, however that ends."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment},
        preexec_fn=follow_parent,
    )  # fmt: skip


def end_all(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the processes that still run: kindly first, so that they can end their own."""
    for process in running:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + LEAVE_S
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_all(running: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    """Returns when every process ended well; raises at the first that did not."""
    left = dict(enumerate(running))
    while left:
        for number, process in list(left.items()):
            try:
                status = process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            if status != 0:
                raise host_failure(number, len(running), status, logs)
            del left[number]


def host_failure(host: int, num_hosts: int, status: int, logs: Path) -> HostError:
    """That a host's command failed, with the last lines of what it said."""
    tail = log_of(logs, host).read_text(errors="replace").strip().splitlines()[-3:]
    what = f"{count(1, 'host')} of {num_hosts} failed: host {host} ended with status {status}"
    return HostError(host, status, what, "\n".join(tail) or f"its output is in {logs}")


def log_of(logs: Path, host: int) -> Path:
    """Where a host's output is."""
    return logs / f"host-{host}.log"
