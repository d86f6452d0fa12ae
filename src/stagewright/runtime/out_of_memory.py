"""Whether the kernel ended a worker because memory was full, and how full it was a moment before."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_GIB = 1 << 30


class MemoryWatch:
    """Looks at what the workers of this host occupy while they run."""

    def __init__(self) -> None:
        self._kills_before, self._most_bytes = _kills(), 0

    def look(self, processes: Iterable[int]) -> None:
        """Takes note of what the workers occupy now."""
        self._most_bytes = max(self._most_bytes, sum(map(_resident_bytes, processes)))

    def says(self) -> str | None:
        """A sentence where the kernel has ended a process for lack of memory since this began."""
        if _kills() <= self._kills_before:
            return None
        held = f"workers held up to {self._most_bytes / _GIB:.1f} of " if self._most_bytes else "this host has "
        return (
            f"the kernel ended it, since memory was full: {held}{_total_bytes() / _GIB:.1f} GiB; "
            "use a smaller batch, more microbatches or fewer devices"
        )


def _kills() -> int:
    """How many processes the kernel has ended for lack of memory since it started."""
    return _number_after("/proc/vmstat", "oom_kill")


def _total_bytes() -> int:
    """What this host has, or what the control group of this process may have of it."""
    limits = [_number_after("/proc/meminfo", "MemTotal:") * 1024]
    with suppress(OSError):
        for _, kinds, path in (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()):
            if kinds in ("", "memory"):
                for file in (f"{path}/memory.max", f"memory{path}/memory.limit_in_bytes"):
                    with suppress(OSError, ValueError):
                        limits.append(int(Path("/sys/fs/cgroup", file.lstrip("/")).read_text()))
    return min(limits)


def _resident_bytes(process: int) -> int:
    # Pages of a forked worker that it shares with the others count once for each, as they do for the kernel's choice.
    return _number_after(f"/proc/{process}/status", "VmRSS:") * 1024


def _number_after(file: str, word: str) -> int:
    with suppress(OSError, ValueError):
        for line in Path(file).read_text().splitlines():
            if line.split()[:1] == [word]:
                return int(line.split()[1])
    return 0
