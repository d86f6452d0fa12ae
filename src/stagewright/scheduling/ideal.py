"""A schedule carried out in one's head: free transfers, given durations; where it stops if it cannot go on.

Only the actions themselves are followed here, not the plan behind them: a forward waits for the receipts of its rows
that its worker has issued, a receipt for its send, an update for the reductions of its stage, an agreement for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stagewright.policy import lanes
from stagewright.schedule import COMPUTE, SENDS, TRANSFERS, Action, Kind, Schedule
from stagewright.scheduling.clock import Clock, Event, unit_cost


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


def run_ideally(schedule: Schedule, num_batches: int = 1, *, is_balanced: bool = False) -> IdealRun:
    """Carries out the schedule over a run of batches, forward taking 1, backward 2.

    Balanced stages take longer where replicas take turns: every replica is then busy for the same part of a batch.
    """
    plan = schedule.plan
    run = _Run(schedule, num_batches, lanes(plan) if is_balanced else (1,) * len(plan.stages))
    run.clock.run(run.act)
    ends = ((worker, run.lists[worker], at) for worker, at in enumerate(run.at))
    return IdealRun(run.spans, {worker: actions[at] for worker, actions, at in ends if at < len(actions)})


class _Run:
    """Workers with their lists, and the place each has reached."""

    def __init__(self, schedule: Schedule, num_batches: int, times: Sequence[int]) -> None:
        self.plan, self.times = schedule.plan, times
        self.lists = [tuple(schedule.unroll(worker, num_batches)) for worker in range(len(schedule.orders))]
        self.at = [0] * len(self.lists)
        self.clock = Clock(len(self.lists))
        self.spans: list[list[TimedAction]] = [[] for _ in self.lists]
        self.receipts: dict[tuple[int, ...], list[Event]] = {}
        """By (worker, whether forward, stage that sends, batch, microbatch): the transfers that compute waits for."""
        self.agreeing: set[tuple[int, int]] = set()

    def act(self, worker: int, time: float) -> None:
        """Goes on with a worker's list until something takes time or has to wait."""
        actions = self.lists[worker]
        while self.at[worker] < len(actions) and self.clock.free[worker] <= time:
            if not self.does(worker, time, actions[self.at[worker]]):
                return
            self.at[worker] += 1

    def does(self, worker: int, time: float, action: Action) -> bool:
        """Carries out an action; False if it must wait."""
        kind, stage, batch, _, _ = action
        if kind in TRANSFERS:
            self.transfer(worker, time, action)
        elif kind is Kind.REDUCE:
            num_parts = self.plan.replicas[stage] * self.plan.stages[stage].num_buckets
            self.clock.end((Kind.REDUCE, stage, batch), time, self.plan.workers[stage], num_parts)
        elif not self.may_start(worker, time, action):
            return False
        else:
            duration = unit_cost(kind) * self.times[stage] if kind in COMPUTE else 0
            self.spans[worker].append(TimedAction(time, time + duration, action))
            if duration:
                self.clock.occupy(worker, time, duration)
        return True

    def may_start(self, worker: int, time: float, action: Action) -> bool:
        """Whether what compute, an update or an agreement waits for has come."""
        kind, stage, batch, number, _ = action
        waits_for: list[Event] = []
        if kind is Kind.UPDATE and self.plan.replicas[stage] > 1:
            waits_for = [(Kind.REDUCE, stage, batch)]
        elif kind is Kind.AGREE:
            waits_for = [(Kind.AGREE, batch)]
            if (worker, batch) not in self.agreeing:
                self.agreeing.add((worker, batch))
                self.clock.end((Kind.AGREE, batch), time, range(len(self.lists)), len(self.lists))
        elif kind in _WAITING:
            is_forward = kind is Kind.FORWARD
            user = (worker, is_forward, stage - 1 if is_forward else stage + 1, batch, number)
            waits_for = self.receipts.get(user, [])
        return all(self.clock.is_over(event, time) for event in waits_for)

    def transfer(self, worker: int, time: float, action: Action) -> None:
        """Issues one end of a transfer; a receipt is noted for the compute that needs it."""
        kind, stage, batch, number, peer = action
        is_forward = kind is Kind.SEND_FORWARD or kind is Kind.RECEIVE_FORWARD
        source, target = (worker, peer) if kind in SENDS else (peer, worker)
        event = (is_forward, stage, batch, number, source, target)
        if kind not in SENDS:
            self.receipts.setdefault((worker, is_forward, stage, batch, number), []).append(event)
        self.clock.end(event, time, [target], 2)


_WAITING = COMPUTE - {Kind.BACKWARD_WEIGHT}
