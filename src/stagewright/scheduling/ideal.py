"""A schedule carried out in one's head: free transfers, given durations; where it stops if it cannot go on.

Only the actions themselves are followed here, not the plan behind them: a forward waits for the receipts of its rows
that its worker has issued, and for all replicas' updates where they share these out, a receipt for its send, an update
for the reductions of its stage, an agreement for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stagewright.policy import lanes
from stagewright.schedule import COMPUTE, SENDS, TRANSFERS, Action, Kind, Schedule
from stagewright.scheduling.orders import unit_cost

_Event = tuple[object, ...]


class TimedAction(NamedTuple):
    """When a worker computed."""

    start: float
    stop: float
    action: Action


class _IdealRun(NamedTuple):
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


def run_ideally(schedule: Schedule, num_batches: int = 1, *, is_balanced: bool = False) -> _IdealRun:
    """Carries out the schedule over a run of batches, forward taking 1, backward 2.

    Balanced stages take longer where replicas take turns: every replica is then busy for the same part of a batch.
    """
    plan = schedule.plan
    run = _Run(schedule, num_batches, lanes(plan) if is_balanced else (1,) * len(plan.stages))
    while run.awake:
        run.go_on(run.awake.pop())
    ends = ((worker, run.lists[worker], at) for worker, at in enumerate(run.at))
    return _IdealRun(run.spans, {worker: actions[at] for worker, actions, at in ends if at < len(actions)})


class _Run:
    """Workers with their lists, and the place and the time that each has reached."""

    def __init__(self, schedule: Schedule, num_batches: int, times: Sequence[int]) -> None:
        self.plan, self.times = schedule.plan, times
        self.lists = [tuple(schedule.unroll(worker, num_batches)) for worker in range(len(schedule.orders))]
        self.at, self.now = [0] * len(self.lists), [0.0] * len(self.lists)
        self.spans: list[list[TimedAction]] = [[] for _ in self.lists]
        self.awake = list(range(len(self.lists)))
        self.asleep: dict[_Event, list[int]] = {}
        """The workers that wait for an event."""
        self.parts: dict[_Event, dict[int, float]] = {}
        self.ended: dict[_Event, float] = {}
        self.receipts: dict[tuple[int, ...], list[_Event]] = {}
        """By (worker, whether forward, stage that sends, batch, microbatch): the transfers that compute waits for."""

    def go_on(self, worker: int) -> None:
        """Goes on with a worker's list until it has to wait."""
        actions = self.lists[worker]
        while self.at[worker] < len(actions):
            action = actions[self.at[worker]]
            events = self.issue(worker, action)
            missing = next((event for event in events if event not in self.ended), None)
            if missing is not None:
                self.asleep.setdefault(missing, []).append(worker)
                return
            if action.kind not in TRANSFERS and action.kind is not Kind.REDUCE:
                start = max([self.now[worker], *(self.ended[event] for event in events)])
                duration = unit_cost(action.kind) * self.times[action.stage] if action.kind in COMPUTE else 0
                self.now[worker] = start + duration
                self.spans[worker].append(TimedAction(start, start + duration, action))
                if action.kind is Kind.UPDATE:
                    self.end(("weights", action.stage, action.batch), worker, self.plan.replicas[action.stage])
            self.at[worker] += 1

    def issue(self, worker: int, action: Action) -> Sequence[_Event]:
        """Does a worker's part in what others do with it; the events that its action waits for."""
        kind, stage, batch, number, peer = action
        if kind in TRANSFERS:
            is_forward = kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
            source, target = (worker, peer) if kind in SENDS else (peer, worker)
            event = (is_forward, stage, batch, number, source, target)
            if kind not in SENDS:
                self.receipts.setdefault((worker, is_forward, stage, batch, number), []).append(event)
            self.end(event, worker, 2)
        elif kind is Kind.REDUCE:
            self.end((kind, stage, batch), worker, self.plan.replicas[stage])
        elif kind is Kind.UPDATE:
            return [(Kind.REDUCE, stage, batch)] if self.plan.replicas[stage] > 1 else []
        elif kind is Kind.AGREE:
            self.end((kind, batch), worker, len(self.lists))
            return [(kind, batch)]
        elif kind is not Kind.BACKWARD_WEIGHT:
            is_forward, before = kind is Kind.FORWARD, batch - self.plan.versions[stage]
            waits = self.receipts.get((worker, is_forward, stage + (-1 if is_forward else 1), batch, number), [])
            given = is_forward and self.plan.shard_optimizer[stage] and before >= 0
            return [*waits, ("weights", stage, before)] if given else waits
        return []

    def end(self, event: _Event, worker: int, num_parts: int) -> None:
        """One part of an event is over; with the last one, all who wait for it go on."""
        parts = self.parts.setdefault(event, {})
        parts[worker] = self.now[worker]
        if len(parts) == num_parts and event not in self.ended:
            self.ended[event] = max(parts.values())
            self.awake += self.asleep.pop(event, ())
