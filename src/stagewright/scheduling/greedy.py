"""Orders found by running: at every moment a worker takes the best of what is ready. For one batch, with a flush.

interleaved   several stages on a worker. Forward goes in groups of as many microbatches as it takes to come round to
              the worker's next stage, then forward and backward alternate. Narayanan et al., "Efficient large-scale
              language model training on GPU clusters", 2021, section 2.2.2
zero-bubble   backward in halves: 1f1b with the half that other stages wait for (I), while the weights' half (W)
              comes later, the more so the later the stage, and fills what would be idle time. ZB-H1 of Qi, Wan,
              Huang and Lin, "Zero bubble pipeline parallelism", 2023: no worker holds more activations than
              1f1b does at its first stage
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from stagewright.plan import Plan
from stagewright.policy import RULES, aheads, lanes, outstanding
from stagewright.schedule import Kind
from stagewright.scheduling.clock import Clock, Timed, Timing, flushed, unit_cost
from stagewright.scheduling.routing import Routes

_Choice = tuple[int, int, int, Kind, int]
"""How good it is to do something, the smallest being the best; and what: its kind, and the worker's desk."""


def time_greedily(plan: Plan, routes: Routes, agree: bool = False) -> Timing:
    """The times of one batch when everyone takes the best of what is ready."""
    floor = _Floor(plan, routes)
    floor.clock.run(floor.act)
    return flushed(plan, floor.timed, agree)


def _group_size(plan: Plan) -> int:
    """How many microbatches it takes until the first one comes round to a worker's next stage."""
    rounds = max(Counter(worker for workers in plan.workers for worker in workers).values())
    return sum(lanes(plan)[: -(-len(plan.stages) // rounds)])


class _Desk:
    """One replica of a stage: its microbatches, and how far forward and the halves of backward have come."""

    def __init__(self, stage: int, replica: int, worker: int, routes: Routes) -> None:
        self.stage, self.replica, self.worker = stage, replica, worker
        self.own = [number for number, replicas in enumerate(routes.own[stage]) if replica in replicas]
        self.done = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.BACKWARD_WEIGHT: 0}

    def next(self, kind: Kind) -> int:
        """The microbatch whose forward, backward or weights' half is next."""
        return self.own[self.done[kind]]


class _Floor:
    """All desks, what each worker would do best, and what was done."""

    def __init__(self, plan: Plan, routes: Routes) -> None:
        self.plan, self.routes = plan, routes
        self.clock, self.timed = Clock(len(plan.devices)), list[Timed]()
        self.ahead, self.group, own = aheads(plan), _group_size(plan), outstanding(plan)
        # What a later stage holds less than the first while 1f1b runs, it may leave undone of the weights' half.
        self.lags = [max(own) - number for number in own]
        self.halves = RULES[plan.policy].halves
        # How many forwards of all its stages a worker runs before forward and backward alternate, as in Megatron-LM:
        # (its stages − 1) · group + 2 · lanes after its last stage.
        self.warm_ups = [(len(own) - 1) * self.group + 2 * sum(lanes(plan)[own[-1] + 1 :]) for own in plan.stages_of]
        self.on: list[list[_Desk]] = [[] for _ in plan.devices]
        for stage, workers in enumerate(plan.workers):
            for replica, worker in enumerate(workers):
                self.on[worker].append(_Desk(stage, replica, worker, routes))

    def act(self, worker: int, time: float) -> None:
        """A worker takes the best of what is ready."""
        choices = (choice for place, desk in enumerate(self.on[worker]) for choice in self.choices(place, desk, time))
        best = min(choices, default=None)
        if best is not None:
            self.do(best[3], self.on[worker][best[4]], time)

    def is_ready(self, kind: Kind, number: int, desk: _Desk, time: float) -> bool:
        """Whether all that the other stages make for it is there."""
        needs = self.routes.needs(kind, desk.stage, number, desk.replica)
        return all(self.clock.is_over(result, time) for result in needs)

    def choices(self, place: int, desk: _Desk, time: float) -> Iterator[_Choice]:
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

    def do(self, kind: Kind, desk: _Desk, start: float) -> None:
        """Carries out what was chosen; whoever needs its result has a turn when it is over."""
        stage, replica, number = desk.stage, desk.replica, desk.next(kind)
        desk.done[kind] += 1
        name = Kind.BACKWARD_INPUT if self.halves and kind is Kind.BACKWARD else kind
        stop = self.clock.occupy(desk.worker, start, unit_cost(name))
        self.timed.append(Timed(int(start), int(stop), name, stage, replica, number))
        if kind is not Kind.BACKWARD_WEIGHT:
            other, users = self.routes.users(kind, stage, number, replica)
            waiting = [self.plan.workers[other][user] for user in users]
            self.clock.end((kind is Kind.FORWARD, stage, number, replica), stop, waiting)
