"""What the system offers: ip and tc, whether this process may use them, and shares of the CPU.

A share is a control group with a quota of every short period:

quota 5 ms of every 20 ms      ▇▇▁▁▁▁▁▁▇▇▁▁▁▁▁▁     a quarter of one core

Hosts without a share are in one group together, without a quota. Outside of all groups the kernel makes one for each
session by itself (`autogroup`), and cores are shared out among groups far less evenly than among the threads of one: of
four hosts that computed on two cores, each was now and then left with a fifth of one for a second, in every other step.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from stagewright.errors import RunError, UsageError
from stagewright.runtime.launch.process import follow_parent

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""What namespaces and limits take; root in a container may lack them."""
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def check_tools() -> None:
    """Refuses to begin where hosts cannot be emulated: not Linux, not root, no iproute2."""
    why = missing()
    if why is not None:
        raise UsageError(f"emulated hosts need root on Linux with iproute2: {why}", "run it as root, or use `train`")


def missing() -> str | None:
    """What keeps this process from emulating hosts; None where nothing does."""
    if sys.platform != "linux":
        return f"this is {sys.platform}"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool} is not here"
    if os.geteuid() != 0:
        return f"this is user {os.geteuid()}"
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    allowed = int(found[1], 16) if found else 0
    lacking = [name for name, bit in _CAPABILITIES.items() if not allowed >> bit & 1]
    return f"this root lacks {' and '.join(lacking)}" if lacking else None


def call(*command: str, text: str | None = None) -> str:
    """What a command prints; raises with its own words where it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise RunError(f"`{' '.join(command)}` ended with status {done.returncode}", f"it said: {said[-1]}")
    return done.stdout


def batch(tool: str, lines: Sequence[str], namespace: str | None = None) -> None:
    """Runs many lines of ip or tc at once, inside a namespace where one is given."""
    where = ("-n", namespace) if namespace else ()
    call(tool, *where, "-batch", "-", text="\n".join(lines) + "\n")


# ── shares of the CPU ───────────────────────────────────────────────────────────────────────────────────────────────


def _root() -> Path | None:
    """Where control groups of the CPU live: version 2, else version 1."""
    if (_V2 / "cgroup.controllers").is_file() and "cpu" in (_V2 / "cgroup.controllers").read_text().split():
        return _V2
    return _V1 if (_V1 / "cpu.cfs_quota_us").is_file() or (_V1 / "cpu.shares").is_file() else None


def limits(cores: float) -> tuple[int, int]:
    """Quota and period in µs: short, so that no worker stands still for long; the kernel's least quota is 1 ms."""
    period = max(20_000, -(-1_000 // cores).__trunc__())
    return max(1_000, round(period * cores)), period


def make_group(name: str, cores: float | None) -> Path | None:
    """A new control group whose processes get so many cores together; without a limit, None where there are none."""
    root = _root()
    if root is None:
        if cores is None:
            return None
        raise RunError("no control group for the CPU was found in /sys/fs/cgroup", "leave cpu_share out of the cluster")
    if root == _V2 and "cpu" not in (root / "cgroup.subtree_control").read_text().split():
        (root / "cgroup.subtree_control").write_text("+cpu")
    folder = root / name
    folder.mkdir()
    if cores is not None:
        quota, period = limits(cores)
        if root == _V2:
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
    folder = make_group(name, None)
    if folder is None or not (folder / "cpu.idle").is_file():
        yield
        return
    (folder / "cpu.idle").write_text("1")
    spinning = []
    for cpu in cpus:
        # It ends with this process, however that ends.
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"], preexec_fn=follow_parent)
        (folder / "cgroup.procs").write_text(str(process.pid))
        os.sched_setaffinity(process.pid, {cpu})
        spinning.append(process)
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def groups(prefix: str) -> list[Path]:
    """The control groups whose names begin like this."""
    root = _root()
    return [] if root is None else sorted(root.glob(f"{prefix}*"))


def remove_group(folder: Path, patience_s: float = 30.0) -> None:
    """Ends what still runs in a control group, and removes it; killed processes may take a while to be gone."""
    until = time.monotonic() + patience_s
    while folder.is_dir():
        end((folder / "cgroup.procs").read_text().split())
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def end(processes: Iterable[str]) -> None:
    """Kills processes, by their numbers, that may be gone already."""
    for number in processes:
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)
