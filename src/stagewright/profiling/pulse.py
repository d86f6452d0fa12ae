"""The pulse of a machine: how long one small piece of work takes on each of its cores, thirty times a second.

    python pulse.py FILE CORE        adds the beats of a core to a file until it is ended

Cores of a virtual machine are a fifth slower or faster for seconds, whatever runs on them. A pulse beats beside what is
measured and takes 2 % of each core; what was measured while it was slow was slow itself:

    work     ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇        a pass over AlexNet, over the pulse meanwhile: within 3 % in every
    pulse    │  │  │   │   │   │  │  │         two seconds, where passes alone scatter by 6 to 13 %

It runs as a script and stands on nothing but numpy.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

REST_S = 0.03
SIDE, PRODUCTS = 192, 3
"""A beat: so many products of square matrices of that many rows. They fit into a core's own cache, but come cold."""
BEAT = struct.Struct("<ddI")
"""When it was, by the clock that all processes of a machine share, the processor's seconds it took, and its core."""
FEWEST = 10
"""So many beats tell the speed of a time; where fewer fell into it, those around it count too."""
CUT_SHARE = 0.25
"""Of a core's beats the longest and the shortest do not count, so many of each: some take ten times as long."""


class Timed(NamedTuple):
    """What something took, and from when to when."""

    seconds: float
    start_s: float
    stop_s: float


class Pulse:
    """The beats of all cores, in the order of time."""

    def __init__(self, moments_s: Sequence[float], beats_s: Sequence[float], cores: Sequence[int]) -> None:
        order = np.argsort(moments_s)
        self.moments_s, self.beats_s = np.asarray(moments_s)[order], np.asarray(beats_s)[order]
        self.cores = np.asarray(cores)[order]

    @classmethod
    def load(cls, path: Path) -> Pulse:
        """The beats in a file so far."""
        data = path.read_bytes()
        beats = list(BEAT.iter_unpack(data[: len(data) // BEAT.size * BEAT.size]))
        moments, seconds, cores = zip(*beats) if beats else ((), (), ())
        return cls(moments, seconds, cores)

    def between(self, start_s: float, stop_s: float) -> float:
        """Seconds of a beat at that time on a core of the middle speed: work moves from core to core, so speeds add."""
        first, last = np.searchsorted(self.moments_s, (start_s, stop_s))
        while last - first < FEWEST and (first > 0 or last < len(self.beats_s)):
            first, last = max(first - 1, 0), min(last + 1, len(self.beats_s))
        beats, cores = self.beats_s[first:last], self.cores[first:last]
        return 1 / float(np.mean([1 / usual(beats[cores == core]) for core in np.unique(cores)]))

    def evened(self, samples: Iterable[Timed], usual_s: float) -> list[float]:
        """Seconds of each sample, had a beat meanwhile taken what it usually does."""
        return [each.seconds * usual_s / self.between(each.start_s, each.stop_s) for each in samples]


def usual(beats_s: np.ndarray) -> float:
    """The mean of a core's beats, without the longest and the shortest."""
    cut = int(len(beats_s) * CUT_SHARE)
    return float(np.sort(beats_s)[cut : len(beats_s) - cut].mean())


def evened_median(samples: Sequence[Timed], pulse: Pulse | None) -> float:
    """The median of samples of one thing, at the speed that the machine had on the whole while they were taken."""
    if pulse is None:
        return median(each.seconds for each in samples)
    return median(pulse.evened(samples, pulse.between(samples[0].start_s, samples[-1].stop_s)))


def beat(path: str, core: int) -> None:
    """Beats on a core for as long as this process lives."""
    os.sched_setaffinity(0, {core})
    left, right = np.random.default_rng(0).random((2, SIDE, SIDE), dtype=np.float32)
    made = left @ right
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    while True:
        time.sleep(REST_S)
        moment, before = time.perf_counter(), time.thread_time()
        for _ in range(PRODUCTS):
            np.matmul(left, right, out=made)
        os.write(file, BEAT.pack(moment, time.thread_time() - before, core))


if __name__ == "__main__":
    beat(sys.argv[1], int(sys.argv[2]))
