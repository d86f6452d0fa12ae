"""In which order the stages compute, microbatch by microbatch, in one turn of the loop; and when, in an ideal run.

How far forward runs ahead of backward is the policy's (`stagewright.policy`). One turn is the M microbatches of one
batch, whatever batches the forwards belong to. The times only serve to put actions in order. In a loop they repeat:
what happens at t for batch 0 happens at t + n · period for batch n, exactly, since all of them are whole numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from stagewright.errors import ScheduleError
from stagewright.plan import Plan
from stagewright.policy import RULES, aheads, reach
from stagewright.schedule import Kind
from stagewright.scheduling.clock import Timed, Timing, unit_cost
from stagewright.scheduling.routing import Result, Routes

NEVER = -(1 << 60)
"""Before all times."""


class Step(NamedTuple):
    """What a stage does next: all of its replicas, each on its own rows; stage −1 is everyone."""

    kind: Kind
    stage: int
    batch: int
    """Relative to the turn."""
    microbatch: int = -1


def _limit(at: int, ahead: int, depth: int, num_microbatches: int) -> int:
    """The last microbatch whose forward comes before backward of `at`."""
    return min(at + ahead, (at // num_microbatches + depth) * num_microbatches - 1)


def steps(plan: Plan, agree: bool = False) -> Iterator[Step]:
    """One turn of all stages, in an order in which everything comes after what it needs.

    F0.1 F1.0  B1.0 B0.0  U1 U0        (stages 0 and 1, K = 2 and 1, one microbatch a batch: F0 is a batch ahead)
    """
    num, depths, ahead = plan.num_microbatches, reach(plan), aheads(plan)
    stages = range(len(plan.stages))
    split_backward = RULES[plan.policy].halves
    for at in range(num):
        lasts = [_limit(at, ahead[stage], depths[stage], num) for stage in stages]
        for stage in stages:
            for number in range(_limit(at - 1, ahead[stage], depths[stage], num) + 1, lasts[stage] + 1):
                yield Step(Kind.FORWARD, stage, number // num, number % num)
        for stage in reversed(stages):
            yield Step(Kind.BACKWARD_INPUT if split_backward else Kind.BACKWARD, stage, 0, at)
            if split_backward:
                yield Step(Kind.BACKWARD_WEIGHT, stage, 0, at)
        if agree and at == num - 1:
            yield Step(Kind.AGREE, -1, 0)
        for stage in reversed(stages):
            # As late as the versions allow: just before forward enters the batch that needs the update.
            entered = _limit(at + 1, ahead[stage], depths[stage], num) // num
            if entered > lasts[stage] // num:
                yield Step(Kind.UPDATE, stage, entered - plan.versions[stage])


def time_steps(plan: Plan, routes: Routes, turn: list[Step]) -> Timing:
    """The ideal times of one turn in the steady state, each replica of each stage on a machine of its own.

    Two stages on one device are so merged by time. No lock can come from that: time puts all after what it needs.
    """
    if all(step.batch == 0 for step in turn):
        loop = _Loop(plan, routes, 0)
        loop.sweep(turn)
        return loop.timing()
    loads = Counter[int]()
    for kind, stage, _, number in turn:
        for replica in routes.own[stage][number] if number >= 0 else ():
            loads[plan.workers[stage][replica]] += unit_cost(kind)
    period = max(loads.values())
    for _ in range(100):
        loop = _Loop(plan, routes, period)
        if any(not loop.sweep(turn) for _ in range(len(plan.stages) + 6)):
            return loop.timing()
        period += -(-period // 4)
    raise ScheduleError(f"versions {plan.versions} with hold {plan.hold}: the order of the stages locks itself")


class _Loop:
    """The times of one turn; each sweep moves them as late as what they wait for demands, until nothing moves."""

    def __init__(self, plan: Plan, routes: Routes, period: int) -> None:
        self.routes, self.period, self.replicas = routes, period, plan.replicas
        self.free = {(stage, replica): 0 for stage, count in enumerate(plan.replicas) for replica in range(count)}
        # The rest is for batch 0.
        self.stops: dict[Result, int] = {}
        self.last = dict.fromkeys(self.free, NEVER)
        self.agreed = NEVER
        self.timed: list[Timed] = []

    def sweep(self, turn: list[Step]) -> bool:
        """Goes through one turn; whether anything moved."""
        before, self.timed = self.timed, []
        if before:
            # Not before 0, or times would slide back without end where the period leaves slack.
            self.free = {who: max(0, time - self.period) for who, time in self.free.items()}
        for step in turn:
            if step.kind is Kind.AGREE:
                self.agreed = max(self.free.values())
                self.free = dict.fromkeys(self.free, self.agreed)
            elif step.kind is Kind.UPDATE:
                self._update(step.stage, step.batch * self.period)
            else:
                self._compute(step)
        return before != self.timed

    def _compute(self, step: Step) -> None:
        """Each replica computes as soon as it is free and what it needs is there."""
        kind, stage, batch, number = step
        shift, stops, is_forward = batch * self.period, self.stops, kind is Kind.FORWARD
        for replica in self.routes.own[stage][number]:
            who, start = (stage, replica), self.free[stage, replica]
            for result in self.routes.needs(kind, stage, number, replica):
                start = max(start, stops.get(result, NEVER) + shift)
            stop = self.free[who] = start + unit_cost(kind)
            if kind is not Kind.BACKWARD_WEIGHT:
                stops[is_forward, stage, number, replica] = stop - shift
            if not is_forward:
                # The latest so far, maybe of the sweep before: an update of an earlier batch waits for that one.
                self.last[who] = max(self.last[who], stop - shift)
            self.timed.append(Timed(start - shift, stop - shift, kind, stage, replica, number))

    def _update(self, stage: int, shift: int) -> None:
        """An update waits for the last backward of all replicas, whose gradients it sums, and for the agreement."""
        every = [(stage, replica) for replica in range(self.replicas[stage])]
        reduced = max(self.agreed, *(self.last[who] for who in every)) + shift
        for who in every:
            time = self.free[who] = max(self.free[who], reduced)
            self.timed.append(Timed(time - shift, time - shift, Kind.UPDATE, *who, -1))

    def timing(self) -> Timing:
        """What was found."""
        return Timing(self.timed, self.period, self.free, self.agreed)
