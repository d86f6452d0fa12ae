"""Memory and utilisation of devices while a run runs, seen from outside: by the driver, or by the kernel.

What `watch nvidia-smi` shows by hand. A card's figures are those of everyone on it; a CPU worker's are those of its
process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, Protocol

from stagewright.profiling.detect import ask

_INTERVAL_S = 0.2
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Sample(NamedTuple):
    """One look at one device."""

    time_s: float
    """Since the watch began."""
    device: int
    """A card's number, or a CPU worker's."""
    memory_bytes: int
    busy_share: float | None


class Seen(NamedTuple):
    """What one device came to."""

    peak_bytes: int
    busy_share: float | None
    """The mean while it was in use."""


class Look(Protocol):
    """Looks at every device once."""

    def __call__(self) -> Iterator[tuple[int, int, float | None]]:
        """(device, bytes, busy share) of each device."""


class Watch:
    """Samples devices in a thread of its own, from `with` to its end."""

    def __init__(self, look: Look, interval_s: float = _INTERVAL_S) -> None:
        self.samples: list[Sample] = []
        self._look, self._interval_s, self._is_over = look, interval_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._start_s = time.monotonic()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._is_over.is_set():
            now = time.monotonic() - self._start_s
            self.samples += [Sample(now, *found) for found in self._look()]
            self._is_over.wait(self._interval_s)

    def seen(self) -> dict[int, Seen]:
        """Each device's peak and its mean utilisation; moments without any use, at start and end, do not count."""
        groups: dict[int, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            groups[sample.device].append(sample)
        return {device: _summary(samples) for device, samples in groups.items()}

    def table(self) -> str:
        """Every sample as a line of CSV."""
        lines = ["time_s,device,memory_bytes,busy_share"]
        lines += [
            f"{one.time_s:.3f},{one.device},{one.memory_bytes},{'' if one.busy_share is None else one.busy_share:.3}"
            for one in self.samples
        ]
        return "\n".join(lines) + "\n"


def _summary(samples: list[Sample]) -> Seen:
    """A device's samples in two figures."""
    shares = [sample.busy_share for sample in samples if sample.busy_share]
    return Seen(max(sample.memory_bytes for sample in samples), mean(shares) if shares else None)


def look_at_cards() -> Look:
    """Asks the driver: by its library where that is installed, else by nvidia-smi."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: all the same here
        return _by_nvidia_smi
    cards = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]

    def look() -> Iterator[tuple[int, int, float | None]]:
        for number, card in enumerate(cards):
            yield number, *_card_figures(pynvml, card)

    return look


def _card_figures(library: Any, card: Any) -> tuple[int, float | None]:
    """Bytes in use and the share of time with a kernel running; 0 and None where the driver does not say."""
    try:
        used = int(library.nvmlDeviceGetMemoryInfo(card).used)
        return used, library.nvmlDeviceGetUtilizationRates(card).gpu / 100
    except library.NVMLError:
        return 0, None


def _by_nvidia_smi() -> Iterator[tuple[int, int, float | None]]:
    """The same figures from nvidia-smi's own words; none where it is missing."""
    listing = ask(("nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits")) or ""
    for number, line in enumerate(listing.strip().splitlines()):
        used, _, busy = (part.strip() for part in line.partition(","))
        if used.isdecimal():
            yield number, int(used) << 20, int(busy) / 100 if busy.isdecimal() else None


def look_at_workers(parent: int, *, alone: bool, clock: Callable[[], float] = time.monotonic) -> Look:
    """Looks at the worker processes that descend from a process: resident memory, and processor time since last time.

    A worker is known by its name, or by RANK in its environment; a run of one worker is that worker itself.
    """
    before: dict[int, tuple[float, float]] = {}

    def look() -> Iterator[tuple[int, int, float | None]]:
        now = clock()
        for worker, process in ({0: parent} if alone else _workers_of(parent)).items():
            found = _process_figures(process)
            if found is None:
                continue
            memory, used_s = found
            then_s, then_used_s = before.get(process, (now, used_s))
            before[process] = (now, used_s)
            share = min((used_s - then_used_s) / (now - then_s), 1.0) if now > then_s else None
            yield worker, memory, share

    return look


def _workers_of(parent: int) -> dict[int, int]:
    """The process of each worker, by its rank."""
    return {rank: process for process in descendants(parent) if (rank := _rank_of(process)) is not None}


def descendants(parent: int) -> list[int]:
    """The processes that a process started, and those that they did."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        text = _read(path)
        # The name in brackets may hold anything, brackets too.
        after = text.rpartition(")")[2].split()
        if len(after) > 1:
            children[int(after[1])].append(int(path.parent.name))
    found, left = [], [parent]
    while left:
        left += (own := children[left.pop()])
        found += own
    return found


def _rank_of(process: int) -> int | None:
    """The rank that a launcher gave a process; forks have it in their names."""
    name, _, rank = _read(Path(f"/proc/{process}/comm")).strip().partition("-")
    if name == "worker":
        return int(rank) if rank.isdecimal() else None
    variables = _read(Path(f"/proc/{process}/environ")).split("\0")
    ranks = [text.removeprefix("RANK=") for text in variables if text.startswith("RANK=")]
    return int(ranks[0]) if ranks and ranks[0].isdecimal() else None


def _process_figures(process: int) -> tuple[int, float] | None:
    """Resident bytes and processor seconds of a process; None where it is gone."""
    pages = _read(Path(f"/proc/{process}/statm")).split()
    ticks = _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    if len(pages) < 2 or len(ticks) < 13:
        return None
    return int(pages[1]) * _PAGE_BYTES, (int(ticks[11]) + int(ticks[12])) / _TICKS_PER_S


def _read(path: Path) -> str:
    """What a file of /proc holds; nothing where its process is gone."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
