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

import heapq
from collections import Counter
from collections.abc import Iterator

from stagewright.plan import Plan
from stagewright.policy import RULES, aheads, lanes, outstanding
from stagewright.schedule import Kind
from stagewright.scheduling.routing import Routes
from stagewright.scheduling.timing import Costs, Timed, Timing, whole_costs

_Choice = tuple[int, int, int, Kind, int, int]
"""How good it is to do something, the smallest being the best; and what: kind, stage, replica."""

_Part = tuple[int, int, int]
"""Stage, microbatch, replica."""

_DELIVERY, _TURN = 0, 1
"""What happens at one moment: first everything arrives, then workers choose."""


def time_greedily(plan: Plan, routes: Routes, agree: bool = False, costs: Costs | None = None) -> Timing:
    """The times of one batch when everyone takes the best of what is ready."""
    floor = _Floor(plan, routes, costs)
    floor.run()
    timed = floor.timed
    last = [max(one.stop for one in timed if one.stage == stage) for stage in range(len(plan.stages))]
    for stage, count in enumerate(plan.replicas):
        time = max(last) if agree else last[stage]
        timed += (Timed(time, time, Kind.UPDATE, stage, replica, -1) for replica in range(count))
    return Timing(timed, 0, [], max(last))


def _group_size(plan: Plan) -> int:
    """How many microbatches it takes until the first one comes round to a worker's next stage."""
    rounds = max(Counter(worker for workers in plan.workers for worker in workers).values())
    return sum(lanes(plan)[: -(-len(plan.stages) // rounds)])


def _worker_warm_ups(plan: Plan) -> list[int]:
    """How many forwards of all its stages a worker runs before forward and backward alternate.

    (stages on the worker − 1) · group + 2 · lanes after its last stage, as in Megatron-LM's interleaved schedule.
    """
    return [(len(own) - 1) * _group_size(plan) + 2 * sum(lanes(plan)[own[-1] + 1 :]) for own in plan.stages_of]


class _Desk:
    """One replica of a stage: its microbatches, and how far forward and the halves of backward have come."""

    def __init__(self, stage: int, replica: int, worker: int, routes: Routes) -> None:
        self.stage, self.replica, self.worker = stage, replica, worker
        shares = enumerate(dict(own).get(replica) for own in routes.own[stage])
        self.own = [(number, rows) for number, rows in shares if rows is not None]
        self.done = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.BACKWARD_WEIGHT: 0}

    def next(self, kind: Kind) -> int:
        """The microbatch whose forward, backward or weights' half is next."""
        return self.own[self.done[kind]][0]


class _Floor:
    """All desks, what they still lack, and what is going to happen."""

    def __init__(self, plan: Plan, routes: Routes, costs: Costs | None) -> None:
        self.routes, self.whole = routes, whole_costs(plan, routes, costs)
        self.ahead, self.group, self.warm_ups = aheads(plan), _group_size(plan), _worker_warm_ups(plan)
        own = outstanding(plan)
        # What a later stage holds less than the first while 1f1b runs, it may leave undone of the weights' half.
        self.lags = [max(own) - number for number in own]
        self.halves = RULES[plan.policy].halves
        self.desks = [
            [_Desk(stage, replica, worker, routes) for replica, worker in enumerate(workers)]
            for stage, workers in enumerate(plan.workers)
        ]
        self.on: list[list[_Desk]] = [[] for _ in plan.devices]
        for desk in (desk for desks in self.desks for desk in desks):
            self.on[desk.worker].append(desk)
        # How many pieces of its input, or of its output's gradient, each part still waits for.
        self.inputs: Counter[_Part] = Counter()
        self.gradients: Counter[_Part] = Counter()
        for stage, numbers in enumerate(routes.links):
            for number, links in enumerate(numbers):
                self.inputs.update((stage + 1, number, target) for _, target in links)
                self.gradients.update((stage, number, source) for source, _ in links)
        self.free = [0] * len(plan.devices)
        self.events: list[tuple[int, int, int, bool, _Part]] = []
        self.timed: list[Timed] = []

    def run(self) -> None:
        """Lets everything happen, moment by moment."""
        for worker in range(len(self.free)):
            self.happen(0, _TURN, worker)
        while self.events:
            time, what, worker, is_forward, part = heapq.heappop(self.events)
            if what == _TURN:
                self.act(worker, time)
                continue
            lacking = self.inputs if is_forward else self.gradients
            lacking[part] -= 1
            if not lacking[part]:
                self.happen(time, _TURN, worker)

    def happen(self, time: int, what: int, worker: int, is_forward: bool = False, part: _Part = (0, 0, 0)) -> None:
        """Notes what is going to happen."""
        heapq.heappush(self.events, (time, what, worker, is_forward, part))

    def act(self, worker: int, time: int) -> None:
        """A worker that is free takes the best of what is ready."""
        if time < self.free[worker]:
            return
        best = min((choice for desk in self.on[worker] for choice in self.choices(desk)), default=None)
        if best is not None:
            _, _, _, kind, stage, replica = best
            self.do(kind, self.desks[stage][replica], time)

    def choices(self, desk: _Desk) -> Iterator[_Choice]:
        """What a desk could do now, and how good that is."""
        stage, replica, done = desk.stage, desk.replica, desk.done
        may_forward, forward_first = self.may_forward(desk), self.forward_first(desk)
        if may_forward:
            number = desk.next(Kind.FORWARD)
            if not self.inputs[stage, number, replica]:
                yield 1 if forward_first else 2, number // self.group, stage, Kind.FORWARD, stage, replica
        if done[Kind.BACKWARD] < done[Kind.FORWARD] and not (may_forward and self.halves):
            number = desk.next(Kind.BACKWARD)
            if not self.gradients[stage, number, replica]:
                yield 2 if forward_first else 1, number // self.group, -stage, Kind.BACKWARD, stage, replica
        if self.halves and done[Kind.BACKWARD_WEIGHT] < done[Kind.BACKWARD]:
            due = done[Kind.BACKWARD] - done[Kind.BACKWARD_WEIGHT] > self.lags[stage]
            number = desk.next(Kind.BACKWARD_WEIGHT)
            yield 0 if due else 3, number // self.group, -stage, Kind.BACKWARD_WEIGHT, stage, replica

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
        """Carries out what was chosen; its result arrives when it is over."""
        stage, replica = desk.stage, desk.replica
        number, rows = desk.own[desk.done[kind]]
        desk.done[kind] += 1
        name = Kind.BACKWARD_INPUT if self.halves and kind is Kind.BACKWARD else kind
        stop = self.free[desk.worker] = start + self.whole(name, stage, rows)
        self.timed.append(Timed(start, stop, name, stage, replica, number))
        self.happen(stop, _TURN, desk.worker)
        if kind is Kind.FORWARD and stage + 1 < len(self.desks):
            self.deliver(stop, True, stage + 1, number, self.routes.targets[stage][number][replica])
        elif kind is Kind.BACKWARD and stage:
            self.deliver(stop, False, stage - 1, number, self.routes.sources[stage - 1][number][replica])

    def deliver(self, time: int, is_forward: bool, stage: int, number: int, replicas: tuple[int, ...]) -> None:
        """A result reaches the replicas of a neighbouring stage that need it."""
        for replica in replicas:
            self.happen(time, _DELIVERY, self.desks[stage][replica].worker, is_forward, (stage, number, replica))
