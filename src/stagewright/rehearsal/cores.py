"""Shares of the CPU: a control group for each host, with a quota of every short period.

quota 5 ms of every 20 ms      ▇▇▁▁▁▁▁▁▇▇▁▁▁▁▁▁     a quarter of one core

Hosts without a share are in one group together, without a quota. Outside of all groups the kernel makes one for each
session by itself (`autogroup`), and cores are shared out among groups far less evenly than among the threads of one: of
four hosts that computed on two cores, each was now and then left with a fifth of one for a second, in every other step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stagewright.errors import RunError
from stagewright.runtime.launch.process import follow_parent

_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def root() -> tuple[Path, bool]:
    """Where control groups of the CPU live, and whether they are of version 2."""
    if (_V2 / "cgroup.controllers").is_file() and "cpu" in (_V2 / "cgroup.controllers").read_text().split():
        return _V2, True
    if (_V1 / "cpu.cfs_quota_us").is_file() or (_V1 / "cpu.shares").is_file():
        return _V1, False
    raise RunError("no control group for the CPU was found in /sys/fs/cgroup", "leave cpu_share out of the cluster")


def limits(cores: float) -> tuple[int, int]:
    """Quota and period in µs: short, so that no worker stands still for long; the kernel's least quota is 1 ms."""
    period = max(20_000, -(-1_000 // cores).__trunc__())
    return max(1_000, round(period * cores)), period


def make_group(name: str, cores: float | None) -> Path:
    """A new control group whose processes get so many cores together; None is all there are."""
    where, is_v2 = root()
    if is_v2 and "cpu" not in (where / "cgroup.subtree_control").read_text().split():
        (where / "cgroup.subtree_control").write_text("+cpu")
    folder = where / name
    folder.mkdir()
    if cores is None:
        return folder
    quota, period = limits(cores)
    if is_v2:
        (folder / "cpu.max").write_text(f"{quota} {period}")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
    return folder


@contextmanager
def kept_awake(name: str, cpus: Iterable[int]) -> Iterator[None]:
    """Cores that do not sleep meanwhile: on each a process spins that runs when nobody else wants to.

    The limit of a wire is a timer of the kernel's, and a core of a virtual machine that sleeps wakes up late: between
    hosts that only waited for each other a link of 1 Gbit/s carried 22 to 96 % of that, with cores awake 85 to 96 %.
    Where the kernel knows no idle groups, spinning would take a share of its own, and cores may sleep.
    """
    folder = make_group(name, None) if has_groups() else None
    if folder is None or not (folder / "cpu.idle").is_file():
        yield
        return
    (folder / "cpu.idle").write_text("1")
    spinning = [_start_spinning(folder, cpu) for cpu in cpus]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def _start_spinning(group: Path, cpu: int) -> subprocess.Popen[bytes]:
    """A process of a control group that keeps a core awake; it ends with this one, however that ends."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"], preexec_fn=follow_parent)
    (group / "cgroup.procs").write_text(str(process.pid))
    os.sched_setaffinity(process.pid, {cpu})
    return process


def has_groups() -> bool:
    """Whether this machine has control groups of the CPU."""
    try:
        return root()[0].is_dir()
    except RunError:
        return False


def groups(prefix: str) -> list[Path]:
    """The control groups whose names begin like this."""
    return sorted(root()[0].glob(f"{prefix}*")) if has_groups() else []


def remove_group(folder: Path, patience_s: float = 30.0) -> None:
    """Ends what still runs in a control group, and removes it; killed processes may take a while to be gone."""
    until = time.monotonic() + patience_s
    while folder.is_dir():
        for word in (folder / "cgroup.procs").read_text().split():
            end(int(word))
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def end(process: int) -> None:
    """Kills a process that may be gone already."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return
