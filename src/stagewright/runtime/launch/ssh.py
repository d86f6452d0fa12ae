"""Hosts that are reached over ssh: one command for each, which runs torchrun there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from stagewright.errors import UsageError
from stagewright.plan import Plan

PORT = 29_400
"""Where the workers of several hosts meet."""
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_\[][A-Za-z0-9_.:\]-]*", re.ASCII)


def torchrun(
    python: str, num_hosts: int, number: int | str, workers: int | str, meeting: str, port: int = PORT
) -> list[str]:
    """What stands before a command so that it runs in every worker of one of the hosts, which meet at the first."""
    return [
        python, "-m", "torch.distributed.run", f"--nnodes={num_hosts}", f"--node-rank={number}",
        f"--nproc-per-node={workers}", f"--master-addr={meeting}", f"--master-port={port}",
    ]  # fmt: skip


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
        """For each host how many workers a plan has there."""
        return plan.host_workers(len(self.names))

    def reach(self, host: int, command: Sequence[str]) -> list[str]:
        """The ssh command that runs a command in this folder on a host; every word arrives as it is."""
        alive = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"]
        return ["ssh", *alive, "--", self.names[host], f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"]

    def commands(
        self, command: Sequence[str], workers: Sequence[int], *, before: Sequence[str] = (), port: int = PORT
    ) -> list[list[str]]:
        """For each host in use the command that starts its workers under torchrun, meeting at the first of them.

        `before` are words that stand before torchrun.
        """
        used = [(host, local) for host, local in enumerate(workers) if local]
        meeting, made = self.addresses[used[0][0]], []
        for number, (host, local) in enumerate(used):
            run = torchrun(self.python, len(used), number, local, meeting, port)
            made.append(self.reach(host, [*before, *run, *command]))
        return made

    def lost(self) -> list[int]:
        """The hosts that cannot be reached any more, asked side by side."""

        def answers(host: int) -> bool:
            try:
                asked = subprocess.run(self.reach(host, ["true"]), input=b"", capture_output=True, timeout=15.0)
            except subprocess.TimeoutExpired:
                return False
            return asked.returncode == 0

        every = range(len(self.names))
        with ThreadPoolExecutor(len(every)) as pool:
            return [host for host, is_there in zip(every, pool.map(answers, every)) if not is_there]

    def without(self, lost: Collection[int]) -> OverSsh:
        """The hosts that are left."""
        return replace(self, names=tuple(name for number, name in enumerate(self.names) if number not in lost))
