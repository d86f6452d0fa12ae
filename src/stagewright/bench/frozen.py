"""Pipelines without a flush as contenders: they stay full between their turns.

To fill and drain one in every turn takes twice as many batches as it has versions, beside those that count. So each
has processes of its own in the hosts, which are stopped while others have a turn, and go on where they were.

    bench ──▶ contest, a worker a host           lets the pipeline go on, reads its moments, stops it
          └─▶ pipeline, a worker a host ──▶ pipe: the moment of every update
"""

from __future__ import annotations

import os
import select
import signal
import struct
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from stagewright.bench.rounds import stale_steps
from stagewright.profiling.pulse import Timed
from stagewright.runtime.world import World

LOOK_S = 1.0
"""How often a pipeline that says nothing is looked after."""
MOMENT = struct.Struct("d")


def tell(pipe: int) -> None:
    """Says that an update is done now."""
    os.write(pipe, MOMENT.pack(time.perf_counter()))


class Frozen:
    """Such a pipeline, seen from the workers of a contest: the first of them lets it go on and stops it."""

    def __init__(self, told: Mapping[str, Any], world: World) -> None:
        self.told = told
        self.pipe = os.open(told["pipe"], os.O_RDWR)
        self.is_full = False
        self.ahead_s = 0.0
        """How long it has gone on since its last update."""
        if world.worker == 0:
            self.heard()  # it is ready
            self.signal(signal.SIGSTOP)

    def turn(self, steps: int, world: World) -> Timed:
        """Seconds between updates, also from the last one of the turn before, without the time that it was stopped."""
        barrier(world)
        found = Timed(0.0, 0.0, 0.0)
        if world.worker == 0:
            started = time.perf_counter()
            self.signal(signal.SIGCONT)
            if not self.is_full:
                # While a pipeline fills, updates come as forwards were let in, not as later ones will.
                started, self.is_full = [self.heard() for _ in range(self.told["versions"])][-1], True
            counted = stale_steps(steps)
            last = [self.heard() for _ in range(counted)][-1]
            self.signal(signal.SIGSTOP)
            found = Timed((self.ahead_s + last - started) / counted, started, last)
            self.ahead_s = time.perf_counter() - last
        barrier(world)
        return found

    def heard(self) -> float:
        """The next moment that the pipeline tells."""
        while not select.select([self.pipe], [], [], LOOK_S)[0]:
            self.signal(0)  # raises where a process is gone
        (moment,) = MOMENT.unpack(os.read(self.pipe, MOMENT.size))
        return float(moment)

    def signal(self, number: int) -> None:
        """Sends a signal to all processes of the pipeline."""
        for process in self.told["processes"]:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                raise RuntimeError(f"a worker of {self.told['name']} ended: see {self.told['logs']}") from None


def barrier(world: World) -> None:
    """Waits for all workers."""
    if world.control is not None:
        dist.barrier(group=world.control)
