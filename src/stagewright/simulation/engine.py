"""The event simulation: workers run their lists, transfers and reductions run beside them, one heap of events.

Each worker goes through its ops and stops where one has to wait; when the wait is over, it tries that op again.
Everything that can end a wait is an event; all events of one moment are handled before the network shares out its links
anew:

    worker 0   F0 ──▶ SF issued ─────────────┐            F, B, U take time
    channel    ........................ flow ─────▶ arrival   receipts, sendings and reductions never hold a list up
    worker 1   RF issued, F waits ···························▶ F0
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple, cast

from stagewright.errors import SimulationError
from stagewright.schedule import Action
from stagewright.simulation.loading import Loader
from stagewright.simulation.network import Flow, Network
from stagewright.simulation.program import AGREE, COMPUTES, GATHER, NOTHING, RECEIVE, SEND, UPDATE, Channel, Op, Program

SAME_MOMENT = 1e-12
"""Events this close to one another, relative to the time, are one moment: rounding must not split it."""


class Done(NamedTuple):
    """An op that ran, and what it waited for last: a transfer, a reduction … or None for the op before it."""

    op: Op
    batch: int
    start_s: float
    stop_s: float
    cause: Cause | None
    order: int
    """Grows from one action to the next, over all workers: nothing waits for what has a larger one."""


class Cause(NamedTuple):
    """What ended a wait: `transfer` or `reduction` by its place in the log, `worker` by number, `data` by host."""

    kind: str
    number: int


class Moved(NamedTuple):
    """A transfer that arrived."""

    channel: int
    sent: Action
    batch: int
    num_bytes: float
    issued_s: float
    start_s: float
    stop_s: float


class Reduced(NamedTuple):
    """A bucket that was reduced."""

    stage: int
    batch: int
    bucket: int
    start_s: float
    stop_s: float
    last: int
    """The worker whose gradients came last."""


class Log(NamedTuple):
    """All that happened."""

    done: list[list[Done]]
    """Worker by worker, in order: what took time on the device."""
    moved: list[Moved]
    reduced: list[Reduced]
    posted: list[list[tuple[float, Op, int]]]
    """Worker by worker: when each receipt was issued, and of which batch."""


class Parcel(NamedTuple):
    """A transfer that both ends have issued."""

    channel: int
    slot: int
    sent: Op
    batch: int
    issued_s: float
    start_s: float


class Bucket(NamedTuple):
    """A reduction under way."""

    stage: int
    batch: int
    bucket: int
    start_s: float
    last: int


class Lane:
    """A channel's state: what its two ends have issued, and whether a transfer is under way."""

    __slots__ = ("busy", "ends", "posted", "sent")

    def __init__(self, ends: Channel) -> None:
        self.ends = ends
        self.sent: deque[tuple[Op, int, float]] = deque()
        self.posted: deque[tuple[Op, int]] = deque()
        self.busy = False


class Engine:
    """One run of a program over a number of batches."""

    def __init__(self, program: Program, num_batches: int, loader: Loader | None = None) -> None:
        workers, stages = len(program.ops), len(program.reductions)
        self.program, self.num_batches, self.loader = program, num_batches, loader
        self.now_s = 0.0
        self.heap: list[tuple[float, int, int, int, object]] = []
        self.num_events = 0
        self.network = Network(program.costs.wires.rates, self.foresee)
        self.log = Log([[] for _ in range(workers)], [], [], [[] for _ in range(workers)])
        # Workers: the turn and the op they have reached, what they wait for, and what ended their last wait.
        self.turns = [-program.offsets[1]] * workers
        self.places = [0] * workers
        self.waits: list[object] = [None] * workers
        self.causes: list[Cause | None] = [None] * workers
        # Transfers: receipts that forwards and backwards still miss, and both ends' issues by channel.
        self.missing: dict[int, int] = {}
        self.lanes = [Lane(channel) for channel in program.channels]
        self.under_way: dict[Flow, Parcel | Bucket] = {}
        # Reductions: replicas that are ready, buckets that wait for the one before, buckets still to come.
        self.ready: dict[tuple[int, int, int], int] = {}
        self.queues: list[deque[tuple[int, int, int]]] = [deque() for _ in range(stages)]
        self.reducing = [False] * stages
        self.unreduced: dict[tuple[int, int], int] = {}
        self.arrived: dict[int, set[int]] = {}
        self.agreed: set[int] = set()

    def run(self) -> Log:
        """Everything, from the first forward to the last update."""
        for worker in range(len(self.places)):
            self.step(worker, None)
        self.network.settle(self.now_s)
        heap, pop, settle = self.heap, heapq.heappop, self.network.settle
        while heap:
            moment = heap[0][0] * (1 + SAME_MOMENT)
            while heap and heap[0][0] <= moment:
                self.now_s, _, kind, number, what = pop(heap)
                HANDLERS[kind](self, number, what)
            settle(self.now_s)
        stop = self.num_batches - self.program.offsets[0]
        if any(turn < stop for turn in self.turns):
            raise SimulationError(*self.stuck(next(n for n, turn in enumerate(self.turns) if turn < stop)))
        return self.log

    # events

    def at(self, time_s: float, kind: int, number: int, what: object = None) -> None:
        """Puts an event on the heap."""
        self.num_events += 1
        heapq.heappush(self.heap, (time_s, self.num_events, kind, number, what))

    def foresee(self, flow: Flow) -> None:
        """The network has changed a flow's rate: this is when it will be over."""
        self.at(flow.stop_s, ARRIVES, flow.turn, flow)

    def wake(self, worker: int, waited: object, cause: Cause) -> None:
        """Goes on with a worker if this is what it waits for."""
        if self.waits[worker] == waited:
            self.waits[worker] = None
            self.causes[worker] = cause
            self.step(worker, None)

    def arrive(self, turn: int, what: object) -> None:
        """A flow is over, unless its rate has changed since this was foreseen; the latency follows."""
        flow = cast(Flow, what)
        if flow.turn != turn:
            return
        self.network.stop(flow)
        load = self.under_way.pop(flow)
        if isinstance(load, Parcel):
            lane = self.lanes[load.channel]
            latency_s, kind = lane.ends.latency_s, LANDS
            lane.busy = False
            if lane.sent and lane.posted:
                self.pair_up(load.channel, lane)
        else:
            way = self.program.reductions[load.stage].way
            latency_s, kind = (way.latency_s if way is not None else 0.0), REDUCES
        if latency_s:
            self.at(self.now_s + latency_s, kind, 0, load)
        else:
            HANDLERS[kind](self, 0, load)

    # workers

    def step(self, worker: int, _: object) -> None:
        """Runs a worker until something takes time or has to be waited for."""
        ops, place, turn = self.program.ops[worker], self.places[worker], self.turns[worker]
        batches, count, last = self.num_batches, len(ops), self.num_batches - self.program.offsets[0]
        goes_on = True
        while goes_on:
            if place == count:
                place, turn = 0, turn + 1
                self.turns[worker] = turn
            if turn >= last or not count:
                self.turns[worker] = last
                break
            op = ops[place]
            place += 1
            batch = turn + op.offset
            if not 0 <= batch < batches:
                continue
            code = op.code
            if code == SEND:
                lane = self.lanes[op.channel]
                lane.sent.append((op, batch, self.now_s))
                if lane.posted and not lane.busy:
                    self.pair_up(op.channel, lane)
            elif code == RECEIVE:
                self.receive(worker, op, batch)
            elif code == GATHER:
                self.bucket_ready(worker, (op.channel, batch, op.action.peer))
            elif code != NOTHING:
                if (code != COMPUTES or op.slot >= 0 or op.loads >= 0) and not self.may_start(worker, op, batch):
                    place -= 1
                    break
                goes_on = code == AGREE or self.occupy(worker, op, batch)
        self.places[worker] = place

    def may_start(self, worker: int, op: Op, batch: int) -> bool:
        """Whether an op can run now; if not, the worker waits for what it lacks."""
        if op.code == COMPUTES:
            key = op.slot + batch * self.program.num_slots
            if op.slot >= 0 and key in self.missing:
                self.waits[worker] = key
                return False
            return self.loader is None or op.loads < 0 or self.loaded(worker, op, batch)
        if op.code == UPDATE:
            return self.reduced_whole(worker, op.channel, batch)
        return self.agree(worker, batch)

    def occupy(self, worker: int, op: Op, batch: int) -> bool:
        """Starts an op that takes time; buckets become ready while a batch's last backward runs."""
        now_s = self.now_s
        stop_s = now_s + op.seconds
        self.log.done[worker].append(Done(op, batch, now_s, stop_s, self.causes[worker], self.num_events))
        self.causes[worker] = None
        if op.ready:
            for bucket, share in enumerate(op.ready):
                self.at(now_s + share * op.seconds, GATHERS, worker, (op.action.stage, batch, bucket))
        self.at(stop_s, STEPS, worker)
        return False

    def loaded(self, worker: int, op: Op, batch: int) -> bool:
        """Whether the host has decoded the rows; if not, the worker comes back when it has."""
        loader, host = cast(Loader, self.loader), self.program.plan.devices[worker].host
        ready_s = loader.ready_s(host, batch, op.loads)
        if ready_s > self.now_s:
            self.causes[worker] = Cause("data", host)
            self.at(ready_s, STEPS, worker)
            return False
        loader.began(host, batch, self.now_s)
        return True

    def reduced_whole(self, worker: int, stage: int, batch: int) -> bool:
        """Whether every bucket of a stage is reduced."""
        reduction = self.program.reductions[stage]
        if reduction.num_replicas > 1 and self.unreduced.get((stage, batch), reduction.num_buckets):
            self.waits[worker] = (stage, batch)
            return False
        return True

    def agree(self, worker: int, batch: int) -> bool:
        """Whether all workers have met: each comes when its own stages' gradients are reduced."""
        if batch in self.agreed:
            return True
        for stage, workers in enumerate(self.program.plan.workers):
            if worker in workers and not self.reduced_whole(worker, stage, batch):
                return False
        here = self.arrived.setdefault(batch, set())
        here.add(worker)
        if len(here) == len(self.places):
            self.at(self.now_s + self.program.agree_s, AGREES, worker, batch)
        self.waits[worker] = batch
        return False

    def agree_over(self, last: int, what: object) -> None:
        """All workers have met: they go on together."""
        batch = cast(int, what)
        self.agreed.add(batch)
        for worker in sorted(self.arrived.pop(batch)):
            self.wake(worker, batch, Cause("worker", last))

    # transfers

    def receive(self, worker: int, op: Op, batch: int) -> None:
        """Issues a receipt."""
        key = op.slot + batch * self.program.num_slots
        self.missing[key] = self.missing.get(key, 0) + 1
        self.log.posted[worker].append((self.now_s, op, batch))
        lane = self.lanes[op.channel]
        lane.posted.append((op, batch))
        if lane.sent and not lane.busy:
            self.pair_up(op.channel, lane)

    def pair_up(self, channel: int, lane: Lane) -> None:
        """Starts the next transfer of a channel that is free and whose ends have both issued it."""
        sent, batch, issued_s = lane.sent.popleft()
        received, other = lane.posted.popleft()
        if batch != other or sent.action.microbatch != received.action.microbatch:
            raise SimulationError(*self.mismatch(channel, sent, batch, received, other))
        parcel = Parcel(channel, received.slot, sent, batch, issued_s, self.now_s)
        ends = lane.ends
        if sent.num_bytes and ends.loads:
            lane.busy = True
            self.under_way[self.network.start(ends.loads, sent.num_bytes, self.now_s, ends.bytes_per_s)] = parcel
        else:
            self.at(self.now_s + ends.latency_s, LANDS, 0, parcel)

    def mismatch(self, channel: int, sent: Op, batch: int, received: Op, other: int) -> tuple[str, str]:
        """What is wrong with a channel whose ends disagree."""
        ends = self.program.channels[channel]
        return (
            f"worker {ends.source} sends {sent.action} of batch {batch} while worker {ends.target} receives "
            f"{received.action} of batch {other}",
            "both ends of a pair must issue their transfers in the same order: check the schedule",
        )

    def land(self, _: int, what: object) -> None:
        """A transfer has arrived: whoever waits for it may go on."""
        channel, slot, sent, batch, issued_s, start_s = cast(Parcel, what)
        moved = self.log.moved
        moved.append(Moved(channel, sent.action, batch, sent.num_bytes, issued_s, start_s, self.now_s))
        key = slot + batch * self.program.num_slots
        left = self.missing[key] - 1
        if left:
            self.missing[key] = left
        else:
            del self.missing[key]
            self.wake(self.program.channels[channel].target, key, Cause("transfer", len(moved) - 1))

    # reductions

    def bucket_ready(self, worker: int, what: object) -> None:
        """One replica has its gradients of a bucket; the last one queues the reduction."""
        stage, batch, bucket = key = cast(tuple[int, int, int], what)
        count = self.ready.get(key, 0) + 1
        self.ready[key] = count
        if count == self.program.reductions[stage].num_replicas:
            del self.ready[key]
            self.queues[stage].append((batch, bucket, worker))
            self.next_bucket(stage)

    def next_bucket(self, stage: int) -> None:
        """Starts the stage's next reduction if none is under way."""
        if self.reducing[stage] or not self.queues[stage]:
            return
        batch, bucket, worker = self.queues[stage].popleft()
        _, _, bucket_bytes, way = self.program.reductions[stage]
        self.reducing[stage] = True
        load = Bucket(stage, batch, bucket, self.now_s, worker)
        if way is not None and bucket_bytes:
            flow = self.network.start(way.loads, way.passes * bucket_bytes, self.now_s, way.bytes_per_s)
            self.under_way[flow] = load
        else:
            self.at(self.now_s, REDUCES, 0, load)

    def reduced(self, _: int, what: object) -> None:
        """A bucket is reduced: the next one starts, and the update may go on after the last."""
        stage, batch, bucket, start_s, last = cast(Bucket, what)
        self.log.reduced.append(Reduced(stage, batch, bucket, start_s, self.now_s, last))
        self.reducing[stage] = False
        self.next_bucket(stage)
        key = (stage, batch)
        left = self.unreduced.get(key, self.program.reductions[stage].num_buckets) - 1
        self.unreduced[key] = left
        if not left:
            for worker in self.program.plan.workers[stage]:
                self.wake(worker, key, Cause("reduction", len(self.log.reduced) - 1))

    def stuck(self, worker: int) -> tuple[str, str]:
        """Which worker waits for what, when nothing can happen any more."""
        op = self.program.ops[worker][min(self.places[worker], len(self.program.ops[worker]) - 1)]
        return (
            f"worker {worker} waits for ever before {op.action._replace(batch=0)} of batch "
            f"{self.turns[worker] + op.offset}, at {self.now_s:.6f} s: what it needs is never sent or reduced",
            "check the schedule: stagewright schedule --check FILE",
        )


STEPS, ARRIVES, LANDS, REDUCES, GATHERS, AGREES = range(6)
HANDLERS = (Engine.step, Engine.arrive, Engine.land, Engine.reduced, Engine.bucket_ready, Engine.agree_over)
