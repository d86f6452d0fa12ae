"""In which order everyone computes, microbatch by microbatch; and when, in an ideal run where transfers are free.

Times are whole numbers, forward taking 1 and backward 2, and only serve to put actions in order. There are two ways:

by rule     one turn of the loop is the M microbatches of one batch, whatever batches the forwards belong to. How far
            forward runs ahead of backward is the policy's (`stagewright.policy`). Without a flush times repeat: what
            happens at t for batch 0 happens at t + n · period for batch n, exactly
by trying   for one batch, with a flush: at every moment a worker takes the best of what is ready. So idle time is
            filled where a worker has several stages, or backward runs in halves:

interleaved   several stages on a worker. Forward goes in groups of as many microbatches as it takes to come round to
              the worker's next stage, then forward and backward alternate. Narayanan et al., "Efficient large-scale
              language model training on GPU clusters", 2021, section 2.2.2
zero-bubble   backward in halves: 1f1b with the half that other stages wait for (I), while the weights' half (W)
              comes later, the more so the later the stage, and fills what would be idle time. ZB-H1 of Qi, Wan,
              Huang and Lin, "Zero bubble pipeline parallelism", 2023: no worker holds more activations than
              1f1b does at its first stage
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from stagewright.errors import ScheduleError
from stagewright.plan import Plan
from stagewright.policy import RULES, aheads, lanes, outstanding, reach
from stagewright.schedule import Kind

_NEVER = -(1 << 60)
"""Before all times."""

_Result = tuple[bool, int, int, int]
"""What a replica makes of a microbatch: (whether forward, stage, microbatch, replica)."""


class _Timed(NamedTuple):
    """An action of one replica with its time for batch 0."""

    start: int
    stop: int
    kind: Kind
    stage: int
    replica: int
    microbatch: int


class Timing(NamedTuple):
    """All of a turn with its times."""

    timed: list[_Timed]
    period: int
    """0 for a schedule that flushes: a turn then ends before the next one begins."""
    ends: dict[tuple[int, int], int]
    """By (stage, replica): the end of the turn in which batch 0 goes backward."""
    agreed: int
    """When all agree on batch 0."""


def make_timing(plan: Plan, agree: bool = False) -> Timing:
    """The order of compute, as times: by rule, or by trying where idle time is to be filled.

    Where batches follow each other without a flush there is no idle time to fill, and the rule serves all policies.
    """
    several_stages, rule = len(plan.devices) < sum(plan.replicas), RULES[plan.policy]
    to_fill = rule.halves or (several_stages and not rule.all_forwards_first)
    if not (to_fill and plan.is_synchronous):
        return _time_steps(plan, list(_steps(plan, agree)))
    floor = _Floor(plan)
    floor.run()
    return _flushed(plan, floor.timed, agree)


def _flushed(plan: Plan, timed: list[_Timed], agree: bool = False) -> Timing:
    """The timing of one batch, whose compute is followed by the updates."""
    last = [max(one.stop for one in timed if one.stage == stage) for stage in range(len(plan.stages))]
    times = [max(last)] * len(last) if agree else last
    updates = (
        _Timed(time, time, Kind.UPDATE, stage, replica, -1)
        for stage, (time, count) in enumerate(zip(times, plan.replicas))
        for replica in range(count)
    )
    return Timing([*timed, *updates], 0, {}, max(last))


def unit_cost(kind: Kind) -> int:
    """Forward 1, backward 2, its halves 1 each, as schedules are drawn on paper."""
    return 2 if kind is Kind.BACKWARD else 1


def _needs(plan: Plan, kind: Kind, stage: int, microbatch: int, replica: int) -> list[_Result]:
    """What compute waits for; the weights' half of backward waits for nothing that others make."""
    if kind is Kind.BACKWARD_WEIGHT:
        return []
    sources, targets = plan.peers(stage, microbatch)[replica]
    if kind is Kind.FORWARD:
        return [(True, stage - 1, microbatch, peer) for peer in sources]
    return [(False, stage + 1, microbatch, peer) for peer in targets]


def users(plan: Plan, kind: Kind, stage: int, microbatch: int, replica: int) -> list[int]:
    """The workers that wait for what an action makes, one for each replica that needs it."""
    if kind not in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
        return []
    sources, targets = plan.peers(stage, microbatch)[replica]
    other, peers = (stage + 1, targets) if kind is Kind.FORWARD else (stage - 1, sources)
    return [plan.workers[other][peer] for peer in peers]


# ── by rule ───────────────────────────────────────────────────────────────────────────────────────────────────────


class _Step(NamedTuple):
    """What a stage does next: all of its replicas, each on its own rows; stage −1 is everyone."""

    kind: Kind
    stage: int
    batch: int
    """Relative to the turn."""
    microbatch: int = -1


def _limit(at: int, ahead: int, depth: int, num_microbatches: int) -> int:
    """The last microbatch whose forward comes before backward of `at`."""
    return min(at + ahead, (at // num_microbatches + depth) * num_microbatches - 1)


def _steps(plan: Plan, agree: bool = False) -> Iterator[_Step]:
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
                yield _Step(Kind.FORWARD, stage, number // num, number % num)
        for stage in reversed(stages):
            yield _Step(Kind.BACKWARD_INPUT if split_backward else Kind.BACKWARD, stage, 0, at)
            if split_backward:
                yield _Step(Kind.BACKWARD_WEIGHT, stage, 0, at)
        if agree and at == num - 1:
            yield _Step(Kind.AGREE, -1, 0)
        for stage in reversed(stages):
            # As late as the versions allow: just before forward enters the batch that needs the update.
            entered = _limit(at + 1, ahead[stage], depths[stage], num) // num
            if entered > lasts[stage] // num:
                yield _Step(Kind.UPDATE, stage, entered - plan.versions[stage])


def _time_steps(plan: Plan, turn: list[_Step]) -> Timing:
    """The ideal times of one turn in the steady state, each replica of each stage on a machine of its own.

    Two stages on one device are so merged by time. No lock can come from that: time puts all after what it needs.
    """
    if all(step.batch == 0 for step in turn):
        loop = _Loop(plan, 0)
        loop.sweep(turn)
        return loop.timing()
    loads = Counter[int]()
    for kind, stage, _, number in turn:
        for replica in plan.peers(stage, number) if number >= 0 else ():
            loads[plan.workers[stage][replica]] += unit_cost(kind)
    period = max(loads.values())
    for _ in range(100):
        loop = _Loop(plan, period)
        if any(not loop.sweep(turn) for _ in range(len(plan.stages) + 6)):
            return loop.timing()
        period += -(-period // 4)
    raise ScheduleError(f"versions {plan.versions} with hold {plan.hold}: the order of the stages locks itself")


class _Loop:
    """The times of one turn; each sweep moves them as late as what they wait for demands, until nothing moves."""

    def __init__(self, plan: Plan, period: int) -> None:
        self.plan, self.period = plan, period
        self.free = {(stage, replica): 0 for stage, count in enumerate(plan.replicas) for replica in range(count)}
        # The rest is for batch 0.
        self.stops: dict[_Result, int] = {}
        self.last = dict.fromkeys(self.free, _NEVER)
        self.agreed = _NEVER
        self.timed: list[_Timed] = []

    def sweep(self, turn: list[_Step]) -> bool:
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

    def _compute(self, step: _Step) -> None:
        """Each replica computes as soon as it is free and what it needs is there."""
        kind, stage, batch, number = step
        shift, stops, is_forward = batch * self.period, self.stops, kind is Kind.FORWARD
        for replica in self.plan.peers(stage, number):
            who, start = (stage, replica), self.free[stage, replica]
            for result in _needs(self.plan, kind, stage, number, replica):
                start = max(start, stops.get(result, _NEVER) + shift)
            stop = self.free[who] = start + unit_cost(kind)
            if kind is not Kind.BACKWARD_WEIGHT:
                stops[is_forward, stage, number, replica] = stop - shift
            if not is_forward:
                # The latest so far, maybe of the sweep before: an update of an earlier batch waits for that one.
                self.last[who] = max(self.last[who], stop - shift)
            self.timed.append(_Timed(start - shift, stop - shift, kind, stage, replica, number))

    def _update(self, stage: int, shift: int) -> None:
        """An update waits for the last backward of all replicas, whose gradients it sums, and for the agreement."""
        every = [(stage, replica) for replica in range(self.plan.replicas[stage])]
        reduced = max(self.agreed, *(self.last[who] for who in every)) + shift
        for who in every:
            time = self.free[who] = max(self.free[who], reduced)
            self.timed.append(_Timed(time - shift, time - shift, Kind.UPDATE, *who, -1))

    def timing(self) -> Timing:
        return Timing(self.timed, self.period, self.free, self.agreed)


# ── by trying ─────────────────────────────────────────────────────────────────────────────────────────────────────

_Choice = tuple[int, int, int, Kind, int]
"""How good it is to do something, the smallest being the best; and what: its kind, and the worker's desk."""


class _Desk:
    """One replica of a stage: its microbatches, and how far forward and the halves of backward have come."""

    def __init__(self, plan: Plan, stage: int, replica: int, worker: int) -> None:
        self.stage, self.replica, self.worker = stage, replica, worker
        self.own = [number for number in range(plan.num_microbatches) if replica in plan.peers(stage, number)]
        self.done = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.BACKWARD_WEIGHT: 0}

    def next(self, kind: Kind) -> int:
        return self.own[self.done[kind]]


class _Floor:
    """All desks, what each worker would do best, and what was done."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.timed = plan, list[_Timed]()
        self.free = [0] * len(plan.devices)
        """Until when each worker is busy."""
        self.ended: dict[_Result, int] = {}
        self.turns = [(0, worker) for worker in range(len(plan.devices))]
        """When workers look round: at first, when they are through with something, when what they may wait for ends."""
        rounds, own = max(map(len, plan.stages_of)), outstanding(plan)
        self.group = sum(lanes(plan)[: -(-len(plan.stages) // rounds)])
        """How many microbatches it takes until the first one comes round to a worker's next stage."""
        self.ahead, self.halves = aheads(plan), RULES[plan.policy].halves
        # What a later stage holds less than the first while 1f1b runs, it may leave undone of the weights' half.
        self.lags = [max(own) - number for number in own]
        # How many forwards of all its stages a worker runs before forward and backward alternate, as in Megatron-LM:
        # (its stages − 1) · group + 2 · lanes after its last stage.
        self.warm_ups = [(len(own) - 1) * self.group + 2 * sum(lanes(plan)[own[-1] + 1 :]) for own in plan.stages_of]
        self.on: list[list[_Desk]] = [[] for _ in plan.devices]
        for stage, workers in enumerate(plan.workers):
            for replica, worker in enumerate(workers):
                self.on[worker].append(_Desk(plan, stage, replica, worker))

    def run(self) -> None:
        """Gives workers their turns, moment by moment, until nobody can do anything more."""
        while self.turns:
            time, worker = heappop(self.turns)
            if time >= self.free[worker]:
                desks = self.on[worker]
                best = min(
                    (each for at, desk in enumerate(desks) for each in self.choices(at, desk, time)), default=None
                )
                if best is not None:
                    self.do(best[3], desks[best[4]], time)

    def is_ready(self, kind: Kind, number: int, desk: _Desk, time: int) -> bool:
        needs = _needs(self.plan, kind, desk.stage, number, desk.replica)
        return all(self.ended.get(result, math.inf) <= time for result in needs)

    def choices(self, place: int, desk: _Desk, time: int) -> Iterator[_Choice]:
        """What a desk could do now, and how good that is."""
        stage, done = desk.stage, desk.done
        may_forward, forward_first = self.may_forward(desk), self.forward_first(desk)
        if may_forward:
            number = desk.next(Kind.FORWARD)
            if self.is_ready(Kind.FORWARD, number, desk, time):
                yield 1 if forward_first else 2, number // self.group, stage, Kind.FORWARD, place
        if done[Kind.BACKWARD] < done[Kind.FORWARD] and not (may_forward and self.halves):
            number = desk.next(Kind.BACKWARD)
            if self.is_ready(Kind.BACKWARD, number, desk, time):
                yield 2 if forward_first else 1, number // self.group, -stage, Kind.BACKWARD, place
        if self.halves and done[Kind.BACKWARD_WEIGHT] < done[Kind.BACKWARD]:
            due = done[Kind.BACKWARD] - done[Kind.BACKWARD_WEIGHT] > self.lags[stage]
            number = desk.next(Kind.BACKWARD_WEIGHT)
            yield 0 if due else 3, number // self.group, -stage, Kind.BACKWARD_WEIGHT, place

    def may_forward(self, desk: _Desk) -> bool:
        """Whether a forward is left that does not run too far ahead of backward."""
        if desk.done[Kind.FORWARD] == len(desk.own):
            return False
        return desk.next(Kind.FORWARD) <= desk.next(Kind.BACKWARD) + self.ahead[desk.stage]

    def forward_first(self, desk: _Desk) -> bool:
        """Whether the desk's worker has still to warm up, or is to alternate after a backward."""
        held = (one.done[Kind.FORWARD] - one.done[Kind.BACKWARD] for one in self.on[desk.worker])
        return sum(held) <= self.warm_ups[desk.worker]

    def do(self, kind: Kind, desk: _Desk, start: int) -> None:
        """Carries out what was chosen; whoever needs its result has a turn when it is over."""
        stage, replica, number = desk.stage, desk.replica, desk.next(kind)
        desk.done[kind] += 1
        name = Kind.BACKWARD_INPUT if self.halves and kind is Kind.BACKWARD else kind
        stop = self.free[desk.worker] = start + unit_cost(name)
        self.timed.append(_Timed(start, stop, name, stage, replica, number))
        if kind is not Kind.BACKWARD_WEIGHT:
            self.ended[kind is Kind.FORWARD, stage, number, replica] = stop
        for waiting in (desk.worker, *users(self.plan, kind, stage, number, replica)):
            heappush(self.turns, (stop, waiting))
