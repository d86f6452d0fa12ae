"""When everything happens in an ideal run: free transfers, whole-number durations, no jitter.

The times only serve to put actions in order. In a loop they repeat: what happens at t for batch 0 happens at
t + n · period for batch n, exactly, since all of them are whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from stagewright.errors import ScheduleError
from stagewright.plan import Plan
from stagewright.schedule import Kind
from stagewright.scheduling.orders import Step
from stagewright.scheduling.routing import Routes

Costs = Callable[[Kind, int, int], float]
"""Seconds of a kind of compute, in a stage, on a number of rows."""

_RESOLUTION = 1000
"""Into how many steps the longest duration is divided."""

_MAX_STRETCHES = 100
"""How many periods to try until one is long enough for a steady state."""

NEVER = -(1 << 60)
"""Before all times."""


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
    ends: list[list[int]]
    """ends[stage][replica]: the end of the turn in which batch 0 goes backward."""
    agreed: int
    """When all agree on batch 0."""


def unit_costs(kind: Kind, stage: int, rows: int) -> float:
    """Forward 1, backward 2, its halves 1 each, as schedules are drawn on paper."""
    return 2.0 if kind is Kind.BACKWARD else 1.0


def whole_costs(plan: Plan, routes: Routes, costs: Costs | None) -> Callable[[Kind, int, int], int]:
    """The costs as whole numbers from 1 on, so that times add up exactly and everything takes some time."""
    if costs is None:
        return lambda kind, stage, rows: 2 if kind is Kind.BACKWARD else 1
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    sizes = {(stage, rows) for stage, own in enumerate(routes.own) for shares in set(own) for _, rows in shares}
    seconds = {(kind, stage, rows): costs(kind, stage, rows) for stage, rows in sizes for kind in kinds}
    longest = max(seconds.values())
    if not longest > 0 or min(seconds.values()) < 0:
        raise ScheduleError(f"the costs range from {min(seconds.values())} to {longest} s: expected positive seconds")
    whole = {key: max(1, round(_RESOLUTION * value / longest)) for key, value in seconds.items()}
    return lambda kind, stage, rows: whole[kind, stage, rows]


def time_steps(plan: Plan, routes: Routes, turn: list[Step], costs: Costs | None = None) -> Timing:
    """The ideal times of one turn in the steady state, each replica of each stage on a machine of its own.

    Two stages on one device are so merged by time. No lock can come from that: time puts all after what it needs.
    """
    whole = whole_costs(plan, routes, costs)
    if all(step.batch == 0 for step in turn):
        clock = _Clock(plan, routes, whole, 0)
        clock.sweep(turn)
        return clock.timing(turn)
    period = max(1, *_loads(plan, routes, turn, whole))
    for _ in range(_MAX_STRETCHES):
        clock = _Clock(plan, routes, whole, period)
        if any(not clock.sweep(turn) for _ in range(len(plan.stages) + 6)):
            return clock.timing(turn)
        period += -(-period // 4)
    raise ScheduleError(f"versions {plan.versions} with hold {plan.hold}: the order of the stages locks itself")


def _loads(plan: Plan, routes: Routes, turn: list[Step], whole: Callable[[Kind, int, int], int]) -> Iterator[int]:
    """How long each worker computes in a turn: no period can be shorter."""
    loads = [0] * len(plan.devices)
    for step in turn:
        if step.microbatch >= 0:
            for replica, rows in routes.own[step.stage][step.microbatch]:
                loads[plan.workers[step.stage][replica]] += whole(step.kind, step.stage, rows)
    yield from loads


class _Clock:
    """The times of one turn; each sweep moves them as late as what they wait for demands, until nothing moves."""

    def __init__(self, plan: Plan, routes: Routes, whole: Callable[[Kind, int, int], int], period: int) -> None:
        self.routes, self.whole, self.period = routes, whole, period
        num, self.replicas = plan.num_microbatches, plan.replicas
        self.free = [[0] * count for count in self.replicas]
        # Stops for batch 0, by [stage][microbatch][replica].
        self.forward = [[[NEVER] * count for _ in range(num)] for count in self.replicas]
        self.backward = [[[NEVER] * count for _ in range(num)] for count in self.replicas]
        self.last = [[NEVER] * count for count in self.replicas]
        self.agreed = NEVER
        self.timed: list[Timed] = []
        self.swept = False

    def sweep(self, turn: list[Step]) -> bool:
        """Goes through one turn; whether anything moved."""
        before, self.timed = self.timed, []
        if self.swept:
            # Not before 0, or times would slide back without end where the period leaves slack.
            self.free = [[max(0, time - self.period) for time in times] for times in self.free]
        for step in turn:
            match step.kind:
                case Kind.FORWARD:
                    self.run_forward(step)
                case Kind.AGREE:
                    self.run_agreement()
                case Kind.UPDATE:
                    self.run_update(step)
                case _:
                    self.run_backward(step)
        self.swept = True
        return before != self.timed

    def run_forward(self, step: Step) -> None:
        """Forward waits for the rows of the stage before."""
        _, stage, batch, number = step
        ready = self.free[stage]
        if stage:
            ready, stops = ready.copy(), self.forward[stage - 1][number]
            shift = batch * self.period
            for source, target in self.routes.links[stage - 1][number]:
                ready[target] = max(ready[target], stops[source] + shift)
        self._compute(step, ready, self.forward)

    def run_backward(self, step: Step) -> None:
        """Backward waits for the gradients of the stage after; its second half for nothing more."""
        kind, stage, batch, number = step
        ready = self.free[stage]
        if stage + 1 < len(self.free) and kind is not Kind.BACKWARD_WEIGHT:
            ready, stops = ready.copy(), self.backward[stage + 1][number]
            shift = batch * self.period
            for source, target in self.routes.links[stage][number]:
                ready[source] = max(ready[source], stops[target] + shift)
        self._compute(step, ready, None if kind is Kind.BACKWARD_WEIGHT else self.backward)
        last, free = self.last[stage], self.free[stage]
        for replica, _ in self.routes.own[stage][number]:
            # The latest so far, which may be from the sweep before: an update of an earlier batch waits for that one.
            last[replica] = max(last[replica], free[replica] - batch * self.period)

    def _compute(self, step: Step, ready: list[int], stops: list[list[list[int]]] | None) -> None:
        kind, stage, batch, number = step
        free, shift = self.free[stage], batch * self.period
        for replica, rows in self.routes.own[stage][number]:
            start = ready[replica]
            stop = free[replica] = start + self.whole(kind, stage, rows)
            if stops is not None:
                stops[stage][number][replica] = stop - shift
            self.timed.append(Timed(start - shift, stop - shift, kind, stage, replica, number))

    def run_agreement(self) -> None:
        """All wait for all."""
        self.agreed = max(max(times) for times in self.free)
        self.free = [[self.agreed] * count for count in self.replicas]

    def run_update(self, step: Step) -> None:
        """An update waits for the last backward of all replicas, whose gradients it sums, and for the agreement."""
        _, stage, batch, _ = step
        shift, free = batch * self.period, self.free[stage]
        reduced = max(self.agreed, *self.last[stage]) + shift
        for replica, time in enumerate(free):
            free[replica] = max(time, reduced)
            self.timed.append(Timed(free[replica] - shift, free[replica] - shift, step.kind, stage, replica, -1))

    def timing(self, turn: list[Step]) -> Timing:
        """What was found."""
        return Timing(self.timed, self.period, self.free, self.agreed)
