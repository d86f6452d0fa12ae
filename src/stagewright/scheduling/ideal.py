"""A schedule carried out in one's head: free transfers, given durations; where it stops if it cannot go on.

Only the actions themselves are followed here, not the plan behind them: a forward waits for the receipts of its rows
that its worker has issued, a receipt for its send, an update for the reductions of its stage, an agreement for all.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from stagewright.plan import Plan
from stagewright.policy import lanes
from stagewright.schedule import COMPUTE, TRANSFERS, Action, Kind, Schedule
from stagewright.scheduling.timing import Costs, unit_costs


class TimedAction(NamedTuple):
    """When a worker computed."""

    start: float
    stop: float
    action: Action


class IdealRun(NamedTuple):
    """What came of it: spans of compute and updates by worker, and where those wait that never came to their end."""

    spans: list[list[TimedAction]]
    stuck: dict[int, Action]

    @property
    def length(self) -> float:
        """The time at which the last worker is done."""
        return max((span.stop for spans in self.spans for span in spans), default=0.0)

    @property
    def idle_share(self) -> float:
        """The share of all workers' time in which they do not compute: the bubble."""
        busy = sum(span.stop - span.start for spans in self.spans for span in spans)
        return 1 - busy / (self.length * len(self.spans)) if self.length else 0.0


def balanced_costs(plan: Plan) -> Costs:
    """Unit costs, longer where replicas take turns: every replica is then busy for the same part of a batch."""
    widths = lanes(plan)
    return lambda kind, stage, rows: unit_costs(kind, stage, rows) * widths[stage]


def run_ideally(schedule: Schedule, num_batches: int = 1, costs: Costs | None = None) -> IdealRun:
    """Carries out the schedule over a run of batches."""
    bench = _Bench(schedule, num_batches, costs)
    ready = deque(range(len(schedule.orders)))
    while ready:
        ready.extend(bench.advance(ready.popleft()))
    return IdealRun(bench.spans, {worker: bench.lists[worker][bench.at[worker]] for worker in sorted(bench.waiting)})


_Event = tuple[int, ...]
"""A transfer, a stage's reductions of a batch, or an agreement."""


class _Bench:
    """Workers with their lists, the place each has reached, and what they wait for."""

    def __init__(self, schedule: Schedule, num_batches: int, costs: Costs | None) -> None:
        self.plan, self.costs = schedule.plan, costs
        self.lists = [tuple(schedule.unroll(worker, num_batches)) for worker in range(len(schedule.orders))]
        self.at = [0] * len(self.lists)
        self.clock = [0.0] * len(self.lists)
        self.spans: list[list[TimedAction]] = [[] for _ in self.lists]
        self.parts: dict[_Event, tuple[int, float]] = {}
        """How many parts of an event were issued, and when the latest was."""
        self.done: dict[_Event, float] = {}
        self.waiting: dict[int, _Event] = {}
        self.waiters: dict[_Event, list[int]] = {}
        self.receipts: dict[tuple[int, ...], list[_Event]] = {}

    def advance(self, worker: int) -> list[int]:
        """Runs a worker until it must wait or is done; the workers that can go on because of it."""
        actions, woken = self.lists[worker], list[int]()
        waited_for = self.waiting.pop(worker, None)
        for place in range(self.at[worker], len(actions)):
            waits_for = self.do(worker, actions[place], waited_for, woken)
            if waits_for is not None:
                self.at[worker], self.waiting[worker] = place, waits_for
                self.waiters.setdefault(waits_for, []).append(worker)
                return woken
        self.at[worker] = len(actions)
        return woken

    def do(self, worker: int, action: Action, waited_for: _Event | None, woken: list[int]) -> _Event | None:
        """Carries out an action, unless it must wait: for the event that comes back then."""
        kind, stage, batch, _, _ = action
        if kind in COMPUTE:
            return self.compute(worker, action)
        if kind in TRANSFERS:
            self.transfer(worker, action, woken)
        elif kind is Kind.REDUCE:
            num_parts = self.plan.replicas[stage] * self.plan.stages[stage].num_buckets
            self.issue((_REDUCTION, stage, batch), num_parts, self.clock[worker], woken)
        elif kind is Kind.UPDATE:
            if self.plan.replicas[stage] > 1 and (_REDUCTION, stage, batch) not in self.done:
                return (_REDUCTION, stage, batch)
            self.span(worker, self.done.get((_REDUCTION, stage, batch), 0.0), 0.0, action)
        elif kind is Kind.AGREE:
            event = (_AGREEMENT, batch)
            if waited_for != event:
                self.issue(event, len(self.lists), self.clock[worker], woken)
            if event not in self.done:
                return event
            self.span(worker, self.done[event], 0.0, action)
        return None

    def compute(self, worker: int, action: Action) -> _Event | None:
        """Forward and backward, once the receipts of their rows are there."""
        kind, stage, batch, number, _ = action
        start = 0.0
        if kind is not Kind.BACKWARD_WEIGHT:
            is_forward = kind is Kind.FORWARD
            before = stage - 1 if is_forward else stage + 1
            for event in self.receipts.get((worker, is_forward, before, batch, number), ()):
                if event not in self.done:
                    return event
                start = max(start, self.done[event])
        self.span(worker, start, self.duration(worker, action), action)
        return None

    def duration(self, worker: int, action: Action) -> float:
        """What an action takes, by the given costs or by unit ones."""
        if self.costs is None:
            return unit_costs(action.kind, action.stage, 0)
        mine, shares = self.plan.workers[action.stage].index(worker), self.plan.shares(action.stage, action.microbatch)
        start, stop = next(((low, high) for replica, low, high in shares if replica == mine), (0, 0))
        return self.costs(action.kind, action.stage, stop - start)

    def span(self, worker: int, start: float, duration: float, action: Action) -> None:
        """Moves the worker's clock over an action."""
        start = max(start, self.clock[worker])
        self.clock[worker] = start + duration
        self.spans[worker].append(TimedAction(start, start + duration, action))

    def transfer(self, worker: int, action: Action, woken: list[int]) -> None:
        """Issues one end of a transfer; a receipt is noted for the compute that needs it."""
        kind, stage, batch, number, peer = action
        is_forward = kind is Kind.SEND_FORWARD or kind is Kind.RECEIVE_FORWARD
        if kind is Kind.SEND_FORWARD or kind is Kind.SEND_BACKWARD:
            event = (is_forward, stage, batch, number, worker, peer)
        else:
            event = (is_forward, stage, batch, number, peer, worker)
            self.receipts.setdefault((worker, is_forward, stage, batch, number), []).append(event)
        self.issue(event, 2, self.clock[worker], woken)

    def issue(self, event: _Event, num_parts: int, time: float, woken: list[int]) -> None:
        """Notes one part of an event; the last part completes it."""
        count, latest = self.parts.get(event, (0, 0.0))
        latest = max(latest, time)
        if count + 1 < num_parts:
            self.parts[event] = count + 1, latest
        else:
            self.done[event] = latest
            woken += self.waiters.pop(event, ())


_REDUCTION, _AGREEMENT = -1, -2
