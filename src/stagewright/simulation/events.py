"""What happens when: everything that can end a wait is an event, and those of one moment are handled together."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from stagewright.schedule import Action, Order
from stagewright.simulation.program import Op
from stagewright.simulation.traffic import Flow, Traffic

SAME_MOMENT = 1e-12
"""Events this close to one another, relative to the time, are one moment: rounding must not split it."""

_Event = Flow | Callable[[], object]
"""A flow is over, unless its rate has changed since; something is called: mostly, a worker goes on."""


def _nothing() -> None:
    """What a worker does before its run begins and after it."""


class Worker:
    """A worker's list, what it did, what it waits for, and what ended its last wait."""

    __slots__ = ("cause", "done", "free_s", "go_on", "head", "is_over", "number", "ops", "order", "wait")

    def __init__(self, number: int, order: Order, ops: list[Op]) -> None:
        self.number, self.order, self.ops = number, order, ops
        self.go_on: Callable[[], object] = _nothing
        self.is_over = False
        self.wait: object = None
        self.head: tuple[Action, int]
        """The action, and its batch, that the last wait was before."""
        self.cause: tuple[str, int] | None = None
        self.free_s = 0.0
        """When its device is free again, as far as that is known."""
        self.done: list[Any] = []

    def stop(self) -> None:
        """Cuts the circle of references through what it would do next."""
        self.go_on = _nothing


class Events:
    """One heap of moments, and what happens at each of them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.moments: list[float] = []
        self.events: dict[float, list[_Event]] = {}

    def at(self, time_s: float, what: _Event) -> None:
        """Notes an event; those of one time share an entry, for replicas do the same at the same time."""
        together = self.events.get(time_s)
        if together is None:
            self.events[time_s] = [what]
            heappush(self.moments, time_s)
        else:
            together.append(what)

    def wake(self, worker: Worker, waited: object, cause: tuple[str, int]) -> None:
        """Goes on with a worker if this is what it waits for."""
        if worker.wait == waited:
            worker.wait, worker.cause = None, cause
            self.at(self.now_s, worker.go_on)

    def run(self, traffic: Traffic) -> None:
        """Moment by moment, until nothing can happen any more; after each, traffic shares the links out anew."""
        moments, events, settle = self.moments, self.events, traffic.settle
        settle(self.now_s)
        while moments:
            moment = moments[0] * (1 + SAME_MOMENT)
            while moments and moments[0] <= moment:
                self.now_s = now_s = heappop(moments)
                # What happens may add to the list that is gone through.
                for what in events[now_s]:
                    if not isinstance(what, Flow):
                        what()
                    elif what.stop_s == now_s and what.rate:
                        traffic.end(what)
                del events[now_s]
            settle(self.now_s)
