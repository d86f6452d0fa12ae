"""The machine on which suites run: what it is, and what its devices do while a run runs, seen from outside.

Memory and utilisation are what `watch nvidia-smi` shows by hand. A card's figures are those of everyone on it; a CPU
worker's are those of its process.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from stagewright.cluster import count
from stagewright.profiling.detect import ask, memory_bytes, num_cores, without_colours

_Asker = Callable[[Sequence[str]], str | None]
_PACKAGES = ("stagewright", "torch", "numpy")
_VARIABLES = ("CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "STAGEWRIGHT_")
"""How the names of variables begin that change how a run computes; others may hold what is nobody's business."""
_Figures = Iterator[tuple[int, int, float | None]]
_Look = Callable[[], _Figures]
"""Looks at every device once: its number, bytes, and busy share."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """What this machine offers."""

    num_cards: int
    is_root: bool


def look_here() -> Here:
    """What this machine offers, as far as suites need to know."""
    listing = ask(("nvidia-smi", "-L")) or ""
    cards = len([line for line in listing.splitlines() if line.startswith("GPU ")])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        cards = min(cards, len([part for part in visible.split(",") if part.strip() not in ("", "-1")]))
    return Here(num_cards=cards, is_root=os.geteuid() == 0)


def capture(ask: _Asker = ask, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The facts, by name; those that cannot be known are left out."""
    listing = ask(("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")) or ""
    cards = [line.strip() for line in listing.splitlines() if line.strip()]
    facts = {
        "host": platform.node(), "system": f"{platform.system()} {platform.release()}",
        "cpu": f"{_cpu_name()}, {count(num_cores(), 'core')} to use, {memory_bytes() / 2**30:.1f} GiB",
        "gpu": "; ".join(f"{cards.count(card)} × {card}" for card in dict.fromkeys(cards)),
        "driver": _first_line(ask(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))),
        "topology": without_colours(ask(("nvidia-smi", "topo", "-m")) or "").strip(),
        "python": sys.version.split()[0], **{name: _installed(name) for name in _PACKAGES}, "commit": _commit(ask),
        "variables": " ".join(f"{key}={value}" for key, value in sorted(environ.items()) if key.startswith(_VARIABLES)),
    }  # fmt: skip
    return {key: value for key, value in facts.items() if value}


def _cpu_name() -> str:
    text = _read(Path("/proc/cpuinfo"))
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit(ask: _Asker) -> str:
    """The commit of the source that runs, with a word on changes that are in none; nothing outside a checkout."""
    root = str(Path(__file__).parents[3])
    found = _first_line(ask(("git", "-C", root, "rev-parse", "--short=12", "HEAD")))
    changed = ask(("git", "-C", root, "status", "--porcelain", "--untracked-files=no", "--", "src"))
    return f"{found} with changes" if found and changed and changed.strip() else found


def _first_line(text: str | None) -> str:
    return next(iter((text or "").strip().splitlines()), "").strip()


# ── seen from outside ───────────────────────────────────────────────────────────────────────────────────


class _Sample(NamedTuple):
    """One look at one device."""

    time_s: float
    """Since the watch began."""
    device: int
    """A card's number, or a CPU worker's."""
    memory_bytes: int
    busy_share: float | None


class Watch:
    """Samples devices in a thread of its own, from `with` to its end."""

    def __init__(self, look: _Look, interval_s: float = 0.2) -> None:
        self.samples: list[_Sample] = []
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
            self.samples += [_Sample(now, *found) for found in self._look()]
            self._is_over.wait(self._interval_s)

    def seen(self) -> dict[int, tuple[int, float | None]]:
        """Each device's peak in bytes, and its mean utilisation while it was in use."""
        groups: dict[int, list[_Sample]] = defaultdict(list)
        for sample in self.samples:
            groups[sample.device].append(sample)
        used = {device: [one.busy_share for one in group if one.busy_share] for device, group in groups.items()}
        return {
            device: (max(one.memory_bytes for one in group), mean(used[device]) if used[device] else None)
            for device, group in groups.items()
        }

    def table(self) -> str:
        """Every sample as a line of CSV."""
        lines = ["time_s,device,memory_bytes,busy_share"]
        lines += [
            f"{one.time_s:.3f},{one.device},{one.memory_bytes},{'' if one.busy_share is None else one.busy_share:.3}"
            for one in self.samples
        ]
        return "\n".join(lines) + "\n"


def look_at_cards() -> _Look:
    """Asks the driver: by its library where that is installed, else by nvidia-smi."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: all the same here
        return _by_nvidia_smi
    cards = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]

    def look() -> _Figures:
        for number, card in enumerate(cards):
            try:
                used = int(pynvml.nvmlDeviceGetMemoryInfo(card).used)
                yield number, used, pynvml.nvmlDeviceGetUtilizationRates(card).gpu / 100
            except pynvml.NVMLError:  # the driver does not say
                yield number, 0, None

    return look


def _by_nvidia_smi() -> _Figures:
    """The same figures from nvidia-smi's own words; none where it is missing."""
    listing = ask(("nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits")) or ""
    for number, line in enumerate(listing.strip().splitlines()):
        used, _, busy = (part.strip() for part in line.partition(","))
        if used.isdecimal():
            yield number, int(used) << 20, int(busy) / 100 if busy.isdecimal() else None


def look_at_workers(parent: int, *, alone: bool, clock: Callable[[], float] = time.monotonic) -> _Look:
    """Looks at the worker processes that descend from a process: resident memory, and processor time since last time.

    A worker is known by its name, or by RANK in its environment; a run of one worker is that worker itself.
    """
    before: dict[int, tuple[float, float]] = {}

    def look() -> _Figures:
        now = clock()
        ranked = ((0, parent),) if alone else ((_rank_of(process), process) for process in _descendants(parent))
        for worker, process in {rank: process for rank, process in ranked if rank is not None}.items():
            found = _process_figures(process)
            if found is None:
                continue
            memory, used_s = found
            then_s, then_used_s = before.get(process, (now, used_s))
            before[process] = (now, used_s)
            share = min((used_s - then_used_s) / (now - then_s), 1.0) if now > then_s else None
            yield worker, memory, share

    return look


def _descendants(parent: int) -> list[int]:
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
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE"), (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")


def _read(path: Path) -> str:
    """What a file of /proc holds; nothing where its process is gone."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
