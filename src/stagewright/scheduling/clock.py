"""The one interpreter of orders: actions and what they wait for, with durations, give times. Transfers are free.

Whoever asks says what a worker does when it has its turn, at a moment of time: the next action of its list (checking,
drawing) or the best of what is ready (greedy orders). A worker has its turn at the beginning, when
it is through with something that takes time, and when something ends that it may wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from stagewright.plan import Plan
from stagewright.schedule import Kind


class Timed(NamedTuple):
    """An action of one replica with its time for batch 0."""

    start: int
    stop: int
    kind: Kind
    stage: int
    replica: int
    microbatch: int


class Timing(NamedTuple):
    """All of a turn with its times."""

    timed: list[Timed]
    period: int
    """0 for a schedule that flushes: a turn then ends before the next one begins."""
    ends: dict[tuple[int, int], int]
    """By (stage, replica): the end of the turn in which batch 0 goes backward."""
    agreed: int
    """When all agree on batch 0."""


def flushed(plan: Plan, timed: list[Timed], agree: bool = False) -> Timing:
    """The timing of one batch, whose compute is followed by the updates."""
    last = [max(one.stop for one in timed if one.stage == stage) for stage in range(len(plan.stages))]
    times = [max(last)] * len(last) if agree else last
    updates = (
        Timed(time, time, Kind.UPDATE, stage, replica, -1)
        for stage, (time, count) in enumerate(zip(times, plan.replicas))
        for replica in range(count)
    )
    return Timing([*timed, *updates], 0, {}, max(last))


def unit_cost(kind: Kind) -> int:
    """Forward 1, backward 2, its halves 1 each, as schedules are drawn on paper."""
    return 2 if kind is Kind.BACKWARD else 1


Event = tuple[object, ...]


class Clock:
    """Workers in time: until when each is busy, and what has ended."""

    def __init__(self, num_workers: int) -> None:
        self.free = [0.0] * num_workers
        self.ended: dict[Event, float] = {}
        self._parts: dict[Event, int] = {}
        self._turns = [(0.0, worker) for worker in range(num_workers)]

    def run(self, act: Callable[[int, float], None]) -> None:
        """Gives workers their turns, moment by moment, until nobody can do anything more."""
        while self._turns:
            time, worker = heappop(self._turns)
            if time >= self.free[worker]:
                act(worker, time)

    def occupy(self, worker: int, start: float, duration: float) -> float:
        """Keeps a worker busy; the end."""
        stop = self.free[worker] = start + duration
        heappush(self._turns, (stop, worker))
        return stop

    def end(self, event: Event, time: float, waiting: Iterable[int], num_parts: int = 1) -> None:
        """One part of an event ends at a time; with the last one, workers that may wait for it have a turn."""
        self._parts[event] = self._parts.get(event, 0) + 1
        if self._parts[event] == num_parts:
            self.ended[event] = time
            for worker in waiting:
                heappush(self._turns, (time, worker))

    def is_over(self, event: Event, time: float) -> bool:
        """Whether an event has ended by a time."""
        return event in self.ended and self.ended[event] <= time
