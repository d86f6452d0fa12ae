"""Starting real workers for tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from stagewright.runtime.launch.local import _seats_here, wait_for_workers, workers
from stagewright.runtime.launch.process import server_pid

ROOT = Path(__file__).parents[2]


def run_workers(
    size: int, module: str, *arguments: str, timeout_s: float = 150, extra: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Runs a module with so many workers; fails with what they said."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1", **(extra or {})}
    with TemporaryDirectory() as folder, chdir(ROOT):
        failed = run_here(command, size, Path(folder), environment, timeout_s)
        said = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("worker-*.log")))
    assert not failed, f"{failed}\n{said[-3000:]}"
    return CompletedProcess(command, 0, said, "")


def run_here(
    command: list[str], size: int, logs: Path, environment: Mapping[str, str], timeout_s: float
) -> dict[int, int]:
    """Runs a command as so many workers; the exit status of those that failed."""
    with workers(_seats_here(command, size, str(logs / "store")), logs, environment) as started:
        return wait_for_workers(started, timeout_s)


def forked() -> list[int]:
    """The workers that are there."""
    stats = (entry / "stat" for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [int(path.parent.name) for path in stats if parent_in(path) == server_pid()]


def parent_in(stat: Path) -> int | None:
    """The parent that Linux writes down for a process, while it is there."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
