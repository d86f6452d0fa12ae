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

from stagewright.bench.agreeing import wait
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
        self.updates = -1
        """How many were told of, after the word that it is ready."""
        self.last_s = self.stopped_s = 0.0
        if world.worker == 0:
            self.heard()
            self.stop()

    def turn(self, steps: int, world: World) -> Timed:
        """Seconds between updates, also from the last one before it was stopped, without the time that it was."""
        wait(world)
        found = Timed(0.0, 0.0, 0.0)
        if world.worker == 0:
            while self.has_told(0.0):  # before it was stopped
                self.heard()
            started, ahead_s = time.perf_counter(), self.stopped_s - self.last_s
            self.signal(signal.SIGCONT)
            while self.updates < self.told["versions"]:
                # While a pipeline fills, updates come as forwards were let in, not as later ones will.
                started, ahead_s = self.heard(), 0.0
            counted = stale_steps(steps)
            last = [self.heard() for _ in range(counted)][-1]
            self.stop()
            found = Timed((ahead_s + last - started) / counted, started, last)
        wait(world)
        return found

    def stop(self) -> None:
        """Stops the pipeline until its next turn."""
        self.signal(signal.SIGSTOP)
        self.stopped_s = time.perf_counter()

    def has_told(self, within_s: float) -> bool:
        """Whether there is a moment to hear of, or will be soon."""
        return bool(select.select([self.pipe], [], [], within_s)[0])

    def heard(self) -> float:
        """The next moment that the pipeline tells."""
        while not self.has_told(LOOK_S):
            self.signal(0)  # raises where a process is gone
        (self.last_s,) = MOMENT.unpack(os.read(self.pipe, MOMENT.size))
        self.updates += 1
        return self.last_s

    def signal(self, number: int) -> None:
        """Sends a signal to all processes of the pipeline."""
        for process in self.told["processes"]:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                raise RuntimeError(f"a worker of {self.told['name']} ended: see {self.told['logs']}") from None
