"""The event simulation: workers run their lists, transfers and reductions run beside them, one heap of events.

Each worker is a generator that goes through its ops and yields where one takes time or has to wait; when that is over,
it goes on from there. Receipts, sendings and reductions never hold a list up; what computes takes time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from math import inf

from stagewright.errors import SimulationError
from stagewright.policy import RULES
from stagewright.schedule import Action
from stagewright.scheduling.windows import Chooser, Key, Task, windows
from stagewright.simulation.collectives import Collectives
from stagewright.simulation.events import Events, Worker
from stagewright.simulation.loading import Loader
from stagewright.simulation.log import Log
from stagewright.simulation.program import Code, Op, Program
from stagewright.simulation.traffic import Traffic
from stagewright.simulation.transfers import Transfers

# Looked up once: an enumeration's member takes Python 3.11 as long as a call.
_COMPUTES, _RECEIVE, _SEND, _GATHER, _AGREE, _UPDATE, _ = Code
_Placed = tuple[Op, Action, int]
"""An op, its action and its batch."""


class Engine:
    """One run of a program over a number of batches."""

    def __init__(self, program: Program, num_batches: int, loader: Loader | None = None) -> None:
        self.program, self.plan, self.num_batches, self.loader = program, program.plan, num_batches, loader
        self.events, self.next_order = Events(), count(1).__next__
        self.turns = range(-program.offsets[1], num_batches - program.offsets[0])
        self.workers = [Worker(number, *lists) for number, lists in enumerate(zip(program.orders, program.ops))]
        self.traffic = Traffic(program.costs.network.rates, self.events.at)
        self.transfers = Transfers(program, self.workers, self.events, self.traffic)
        self.collectives = Collectives(program, self.workers, self.events, self.traffic, num_batches)
        self.shared = [
            self.traffic.make_flow(*share, over=partial(self.end_piece, worker))
            for worker, share in zip(self.workers, program.shares)
        ]
        """What each worker computes, where it is a flow of work over cores that others want too."""
        self.traffic.leave_out()

    def run(self) -> Log:
        """Everything, from the first forward to the last update."""
        by_arrival = RULES[self.plan.policy].by_arrival
        for worker in self.workers:
            worker.go_on = (self.life_by_arrival(worker) if by_arrival else self.life(worker)).__next__
        for worker in self.workers:
            worker.go_on()
        self.events.run(self.traffic)
        for worker in self.workers:
            if not worker.is_over:
                action, batch = worker.head
                raise SimulationError(
                    f"worker {worker.number} waits for ever before {action._replace(batch=0)} of batch "
                    f"{batch}, at {self.events.now_s:.6f} s: what it needs is never sent or reduced",
                    "check the schedule: stagewright schedule --check FILE",
                )
            worker.stop()
        self.traffic.let_go()
        return Log([worker.done for worker in self.workers], self.transfers.moved, self.collectives.log)

    def life(self, worker: Worker) -> Iterator[None]:
        """A worker's ops one after the other; yields where one takes time or has to wait.

        Nearly all of the time is spent here: what is frequent is written out, what is rare is called.
        """
        events, transfers, shared, loader = self.events, self.transfers, self.shared, self.loader
        batches, num_slots = self.num_batches, transfers.num_slots
        issue, missing, landing, has_rows = transfers.issue, transfers.missing, transfers.landing, transfers.has_rows
        at, did, next_order = events.at, worker.done.append, self.next_order
        for turn in self.turns:
            for op, action in zip(worker.ops, worker.order):
                code, batch = op.code, turn + action.batch
                if not 0 <= batch < batches:
                    continue
                if code is _SEND or code is _RECEIVE:
                    issue(op, action, batch)
                    if op.seconds:
                        yield from self.spend(worker, op.seconds)
                    continue
                if code is _COMPUTES:
                    if op.slot >= 0:
                        key = op.slot + action.microbatch + batch * num_slots
                        while (key in missing or key in landing) and not has_rows(worker, action, batch, key):
                            yield
                    if op.needs_data and loader is not None:
                        while not self.loaded(worker, action, batch):
                            yield
                    if op.needs:
                        yield from self.run_as_weights_come(worker, op, action, batch)
                        continue
                else:
                    while not self.passes(worker, op, action, batch):
                        yield
                    while op.waits and not self.collectives.all_reduced(worker, op.waits, batch):
                        yield
                    if code is not _UPDATE:
                        continue
                if shared:
                    yield from self.occupy(worker, op, action, batch)
                    if code is _UPDATE:
                        self.collectives.update_over(worker.number, action.stage, batch)
                    continue
                now_s = events.now_s
                stop_s = now_s + op.seconds
                did((op, action, batch, now_s, stop_s, worker.cause, next_order()))
                worker.cause = None
                at(stop_s, worker.go_on)
                if op.ready:
                    self.foresee_buckets(worker.number, op, action.stage, batch)
                yield
                if code is _UPDATE:
                    self.collectives.update_over(worker.number, action.stage, batch)
        worker.is_over = True
        yield  # and is never asked to go on: an end would raise StopIteration among the events

    def life_by_arrival(self, worker: Worker) -> Iterator[None]:
        """A worker's ops as they become ready, backward first, window by window, as the runtime's workers run them.

        Whatever lands or ends asks it to go on: it yields again while its device is busy.
        """
        chooser: Chooser[_Placed] = Chooser(self.plan)
        issue, finished = self.transfers.issue, set[Key]()
        for window in windows(self.unrolled(worker), lambda placed: placed[1:]):
            for placed in window.late:
                issue(*placed)
            chooser.open(window.units.values())
            while heads := chooser.heads():
                for placed in chooser.receives():
                    issue(*placed)
                unit = chooser.choose(lambda unit: self.can_run(worker, unit, finished))
                if unit is None:
                    worker.head = heads[0].compute[1:]
                    yield
                    continue
                for bucket in range(len(unit.compute[0].needs)):
                    while not self.collectives.has_weights(worker, unit.key[0], unit.key[1], bucket):
                        while worker.wait is not None:
                            yield
                self.take_rows(worker, unit)
                yield from self.occupy(worker, *unit.compute)
                finished.add(unit.key)
                chooser.finish(unit)
                for placed in unit.sends:
                    issue(*placed)
            for op, action, batch in window.rest:
                while not self.passes(worker, op, action, batch):
                    while worker.wait is not None:
                        yield
                while op.waits and not self.collectives.all_reduced(worker, op.waits, batch):
                    while worker.wait is not None:
                        yield
                if op.code is _UPDATE:
                    yield from self.occupy(worker, op, action, batch)
                    self.collectives.update_over(worker.number, action.stage, batch)
        worker.is_over = True
        while True:
            yield

    def unrolled(self, worker: Worker) -> Iterator[_Placed]:
        """The worker's ops over all batches."""
        for turn in self.turns:
            for op, action in zip(worker.ops, worker.order):
                if 0 <= turn + action.batch < self.num_batches:
                    yield op, action, turn + action.batch

    def can_run(self, worker: Worker, unit: Task[_Placed], finished: set[Key]) -> bool:
        """Whether a unit's rows are there."""
        stage, batch, microbatch, is_forward = unit.key
        near = (stage + (-1 if is_forward else 1), batch, microbatch, is_forward)
        if near not in finished and self.is_near(worker.number, stage, near[0], microbatch):
            return False
        op, action, _ = unit.compute
        if op.needs_data:
            return self.loaded(worker, action, batch)
        slot = self.slot_of(unit)
        landing_s, _ = self.transfers.landing.get(slot, (0.0, 0))
        return op.slot < 0 or (slot not in self.transfers.missing and landing_s <= self.events.now_s)

    def is_near(self, me: int, stage: int, other: int, microbatch: int) -> bool:
        """Whether a worker itself makes rows in the other stage that it needs in this one."""
        first, workers = min(stage, other), self.plan.workers
        if not 0 <= other < len(workers) or me not in workers[other]:
            return False
        parts = self.plan.transfers(first, microbatch)
        return any(workers[first][left] == workers[first + 1][right] == me for left, right, _, _ in parts)

    def slot_of(self, unit: Task[_Placed]) -> int:
        """What a unit waits for; −1: nothing."""
        op, action, batch = unit.compute
        return -1 if op.slot < 0 else op.slot + action.microbatch + batch * self.transfers.num_slots

    def take_rows(self, worker: Worker, unit: Task[_Placed]) -> None:
        """A unit begins: it waited for its rows only if they came after the device was free."""
        landed = self.transfers.landing.pop(self.slot_of(unit), None)
        if not unit.compute[0].needs_data:
            worker.cause = ("transfer", landed[1]) if landed and landed[0] > worker.free_s else None

    def passes(self, worker: Worker, op: Op, action: Action, batch: int) -> bool:
        """Whether a worker gets past a reduction, an update or an agreement; if not, it waits for what that lacks."""
        worker.head = action, batch
        if op.code is _GATHER:
            for bucket in range(self.plan.stages[action.stage].num_buckets):
                self.collectives.bucket_ready(worker.number, action.stage, batch, bucket)
        if op.code is _UPDATE:
            return self.collectives.reduced_whole(worker, action.stage, batch)
        return op.code is not _AGREE or self.collectives.agree(worker, batch)

    def occupy(self, worker: Worker, op: Op, action: Action, batch: int) -> Iterator[None]:
        """An op that takes time; yields until it is over."""
        events, start_s, cause, order = self.events, self.events.now_s, worker.cause, self.next_order()
        worker.cause = None
        if self.shared:
            yield from self.share_cores(worker, op, action.stage, batch)
        else:
            worker.free_s = start_s + op.seconds
            events.at(worker.free_s, worker.go_on)
            self.foresee_buckets(worker.number, op, action.stage, batch)
            yield
            while events.now_s < worker.free_s:
                yield
        worker.done.append((op, action, batch, start_s, worker.free_s, cause, order))

    def run_as_weights_come(self, worker: Worker, op: Op, action: Action, batch: int) -> Iterator[None]:
        """A forward whose layers wait for the weights that other replicas have made, bucket by bucket.

        bucket    ▇▇ 2 ▇▇▇▇ 1 ▇▇▇▇ 0
        forward      ▇▇▇▇▇▇ ▇▇▇▇▇▇ ▇▇▇▇▇▇
        """
        events, has, spent_s, done = self.events, self.collectives.has_weights, 0.0, 0.0
        waits = [(share, bucket) for bucket, share in enumerate(op.needs)]
        late = [each for each in waits if not has(worker, action.stage, batch, each[1])]
        worker.wait = None
        for share, bucket in (*sorted(late), (1.0, -1)):
            if share > done:
                begun_s = events.now_s
                yield from self.spend(worker, (share - done) * op.seconds)
                spent_s, done = spent_s + events.now_s - begun_s, share
            while bucket >= 0 and not has(worker, action.stage, batch, bucket):
                yield
        cause, worker.cause = worker.cause, None
        # All that it waited for comes first: what it computed in between is not told apart.
        worker.done.append((op, action, batch, events.now_s - spent_s, events.now_s, cause, self.next_order()))

    def spend(self, worker: Worker, seconds: float) -> Iterator[None]:
        """Time that a worker computes for, which on shared cores takes longer."""
        if not self.shared or not seconds:
            self.events.at(self.events.now_s + seconds, worker.go_on)
            yield
            return
        flow, worker.free_s = self.shared[worker.number], inf
        self.traffic.start(flow, seconds * flow.alone, self.events.now_s)
        while worker.free_s == inf:
            yield

    def foresee_buckets(self, worker: int, op: Op, stage: int, batch: int) -> None:
        """Buckets become ready while an op runs that begins now."""
        for bucket, share in enumerate(op.ready):
            ready = partial(self.collectives.bucket_ready, worker, stage, batch, bucket)
            self.events.at(self.events.now_s + share * op.seconds, ready)

    def share_cores(self, worker: Worker, op: Op, stage: int, batch: int) -> Iterator[None]:
        """An op on cores that others want too: a flow of work, which slows down while they do.

        It is cut into pieces that end where a bucket of gradients becomes ready.

        worker 0   F ▇▇▇▇▇▇▇▇▇▇▇▇           two workers on one core: each gets half of it while both compute,
        worker 1       F ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇      and the whole of it when the other is done
        """
        events, flow = self.events, self.shared[worker.number]
        for share, bucket in pieces(op.ready):
            work, worker.free_s = share * op.seconds * flow.alone, inf
            if work > 0:
                self.traffic.start(flow, work, events.now_s)
            else:
                events.at(events.now_s, partial(self.end_piece, worker))
            while worker.free_s == inf:
                yield
            if bucket >= 0:
                self.collectives.bucket_ready(worker.number, stage, batch, bucket)
        events.at(events.now_s, worker.go_on)
        yield

    def end_piece(self, worker: Worker, load: None = None) -> None:
        """A piece of what a worker computes is over: its bucket is ready, and the next piece or the next op follows."""
        worker.free_s = self.events.now_s
        worker.go_on()

    def loaded(self, worker: Worker, action: Action, batch: int) -> bool:
        """Whether the host has decoded the rows; if not, the worker comes back when it has."""
        loader, host = self.loader, self.plan.devices[worker.number].host
        if loader is None:
            return True
        ready_s = loader.ready_s(host, batch, action.microbatch)
        if ready_s > self.events.now_s:
            worker.cause = ("data", host)
            self.events.at(ready_s, worker.go_on)
            return False
        loader.began(host, batch, self.events.now_s)
        return True


def pieces(ready: tuple[float, ...]) -> list[tuple[float, int]]:
    """An op cut at the shares of it after which buckets are ready: (share of the op, the bucket, −1 for none)."""
    cut = sorted((share, bucket) for bucket, share in enumerate(ready))
    if not cut or cut[-1][0] < 1.0:
        cut.append((1.0, -1))
    edges = [0.0, *(share for share, _ in cut)]
    return [(max(share - before, 0.0), bucket) for before, (share, bucket) in zip(edges, cut)]
