"""The event simulation: workers run their lists, transfers and reductions run beside them, one heap of events.

Each worker goes through its ops and stops where one has to wait; when the wait is over, it tries that op again.
Everything that can end a wait is an event; all events of one moment are handled before the network shares out its links
anew:

    worker 0   F0 ──▶ SF issued ─────────────┐            F, B, U take time
    channel    ........................ flow ─────▶ arrival   receipts, sendings and reductions never hold a list up
    worker 1   RF issued, F waits ···························▶ F0
"""

from __future__ import annotations

from collections import deque
from functools import partial
from heapq import heappop, heappush
from typing import Any

from stagewright.errors import SimulationError
from stagewright.schedule import Action
from stagewright.simulation.dynamic import Chooser
from stagewright.simulation.loading import Loader
from stagewright.simulation.log import BUFFERS, Cause, Change, Done, Log, Moved, Reduced
from stagewright.simulation.network import Flow, Network
from stagewright.simulation.program import (
    ACTION,
    AGREE,
    COMPUTES,
    DATA,
    GATHER,
    RECEIVE,
    SEND,
    UPDATE,
    Channel,
    PlainOp,
    Program,
)

SAME_MOMENT = 1e-12
"""Events this close to one another, relative to the time, are one moment: rounding must not split it."""
WORKER, CALL = -1, 0
"""What an event is for: a worker goes on, or something is called; other numbers are the turn of a flow that is over."""
named: Any = tuple.__new__
"""Makes a named tuple of a plain one, in a third of the time that its own call takes."""


class Worker:
    """A worker's list, how far it is, what it waits for, and what ended its last wait."""

    __slots__ = ("buffers", "cause", "chooser", "done", "number", "ops", "place", "turn", "wait")

    def __init__(self, number: int, ops: tuple[PlainOp, ...], turn: int) -> None:
        self.number, self.ops, self.turn, self.place = number, ops, turn, 0
        self.wait: object = None
        self.cause: Cause | None = None
        self.chooser: Chooser | None = None
        self.done: list[Done] = []
        self.buffers: list[Change] = []


class Lane:
    """A channel's state: what its two ends have issued, and whether a transfer is under way."""

    __slots__ = ("busy", "flow", "latency_s", "number", "posted", "sent", "source", "target")

    def __init__(self, number: int, latency_s: float, flow: Flow, source: Worker, target: Worker) -> None:
        self.number, self.latency_s, self.flow, self.source, self.target = number, latency_s, flow, source, target
        self.sent: deque[tuple[PlainOp, int, float]] = deque()
        self.posted: deque[tuple[PlainOp, int, int]] = deque()
        self.busy = False


Load = tuple[Lane, int, Action, int, float, float, float]
"""A transfer under way: its lane, the slot it fills, what is sent, of which batch, bytes, when issued and started."""


class Engine:
    """One run of a program over a number of batches."""

    def __init__(self, program: Program, num_batches: int, loader: Loader | None = None) -> None:
        self.program, self.num_batches, self.loader = program, num_batches, loader
        self.now_s, self.num_events = 0.0, 0
        self.heap: list[tuple[float, int, int, Any]] = []
        self.last_turn, self.num_slots = num_batches - program.offsets[0], max(len(program.slot_bytes), 1)
        self.workers = [Worker(number, ops, -program.offsets[1]) for number, ops in enumerate(program.lists)]
        if program.plan.policy == "dynamic":
            for worker in self.workers:
                worker.chooser = Chooser(self, worker)
        self.moved: list[Moved] = []
        self.reductions: list[Reduced] = []
        self.network = network = Network(program.costs.wires.rates, self.foresee)
        # Transfers: receipts that forwards and backwards still miss, those still in flight, both ends' issues.
        self.missing: dict[int, int] = {}
        self.landing: dict[int, tuple[float, int]] = {}
        self.lanes = [
            Lane(n, c.latency_s, network.make_flow(c.loads, c.bytes_per_s, c.shared), *self.ends(c))
            for n, c in enumerate(program.channels)
        ]
        # Reductions: replicas that are ready, buckets that wait for the one before, buckets still to come.
        self.flows = [
            network.make_flow(one.way.loads, one.way.bytes_per_s, one.shared) if one.way else None
            for one in program.reductions
        ]
        self.ready: dict[tuple[int, int, int], int] = {}
        self.queues: list[deque[tuple[int, int, int]]] = [deque() for _ in program.reductions]
        self.reducing = [False] * len(program.reductions)
        self.unreduced: dict[tuple[int, int], int] = {}
        self.arrived: dict[int, set[int]] = {}
        self.agreed: set[int] = set()

    def ends(self, channel: Channel) -> tuple[Worker, Worker]:
        """The two workers of a channel."""
        return self.workers[channel.source], self.workers[channel.target]

    def run(self) -> Log:
        """Everything, from the first forward to the last update."""
        heap, settle, step = self.heap, self.network.settle, self.step
        for worker in self.workers:
            step(worker)
        settle(self.now_s)
        while heap:
            moment = heap[0][0] * (1 + SAME_MOMENT)
            while heap and heap[0][0] <= moment:
                self.now_s, _, turn, who = heappop(heap)
                if turn < 0:
                    step(who)
                elif turn == CALL:
                    who()
                elif who.turn == turn:
                    self.arrive(who)
            settle(self.now_s)
        for worker in self.workers:
            if worker.turn < self.last_turn:
                raise SimulationError(*self.stuck(worker))
        self.let_go()
        workers = self.workers
        return Log([one.done for one in workers], self.moved, self.reductions, [one.buffers for one in workers])

    def let_go(self) -> None:
        """Cuts the circles of references, so that all is freed at once when it is used no more."""
        self.network.on_change = lambda flow: None
        for flow in self.network.flows:
            flow.load = None
        for worker in self.workers:
            worker.chooser = None

    # events

    def at(self, time_s: float, turn: int, who: object) -> None:
        """Puts an event on the heap."""
        self.num_events += 1
        heappush(self.heap, (time_s, self.num_events, turn, who))

    def foresee(self, flow: Flow) -> None:
        """The network has changed a flow's rate: this is when it will be over, unless the rate changes again."""
        self.num_events += 1
        heappush(self.heap, (flow.stop_s, self.num_events, flow.turn, flow))

    def wake(self, worker: Worker, waited: object, cause: Cause, time_s: float) -> None:
        """Goes on with a worker at a time if this is what it waits for."""
        if worker.wait == waited:
            worker.wait = None
            worker.cause = cause
            self.at(time_s, WORKER, worker)

    # workers

    def step(self, worker: Worker) -> None:
        """Runs a worker until something takes time or has to be waited for.

        Nearly all of the time is spent here: what is frequent is written out, what is rare is called.
        """
        if worker.chooser is not None:
            worker.chooser.step()
            return
        ops, place, turn, now_s = worker.ops, worker.place, worker.turn, self.now_s
        count, batches = len(ops), self.num_batches
        while True:
            if place == count:
                place, turn = 0, turn + 1
                worker.turn = turn
            if turn >= self.last_turn or not count:
                worker.turn = self.last_turn
                break
            op = ops[place]
            code, offset, seconds, slot, channel, _, _, _, ready, _ = op
            batch = turn + offset
            place += 1
            if not 0 <= batch < batches:
                continue
            if code == SEND:
                self.send(worker, op, batch)
            elif code == RECEIVE:
                self.receive(worker, op, batch)
            elif code == COMPUTES:
                if slot >= 0 and not self.has_rows(worker, slot + batch * self.num_slots):
                    place -= 1
                    break
                if channel == DATA and self.loader is not None and not self.loaded(worker, op, batch):
                    place -= 1
                    break
                self.num_events += 1
                worker.done.append(named(Done, (op, batch, now_s, now_s + seconds, worker.cause, self.num_events)))
                worker.cause = None
                heappush(self.heap, (now_s + seconds, self.num_events, WORKER, worker))
                if ready:
                    self.foresee_buckets(worker, op, batch)
                break
            elif not self.passes(worker, op, batch):
                place -= 1
                break
            elif code == UPDATE:
                self.occupy(worker, op, batch)
                break
        worker.place = place

    def has_rows(self, worker: Worker, key: int) -> bool:
        """Whether all receipts of a slot have landed; if not, the worker waits for them."""
        if key in self.missing:
            worker.wait = key
            return False
        if key in self.landing:
            time_s, number = self.landing.pop(key)
            if time_s > self.now_s:
                worker.cause = ("transfer", number)
                self.at(time_s, WORKER, worker)
                return False
        return True

    def passes(self, worker: Worker, op: PlainOp, batch: int) -> bool:
        """Whether a worker gets past a reduction, an update or an agreement; if not, it waits for what that lacks."""
        code, stage = op[0], op[4]
        if code == GATHER:
            self.bucket_ready(worker.number, stage, batch, op[ACTION].peer)
        if code == UPDATE:
            return self.reduced_whole(worker, stage, batch)
        return code != AGREE or self.agree(worker, batch)

    def occupy(self, worker: Worker, op: PlainOp, batch: int) -> None:
        """Starts an op that takes time; buckets become ready while a batch's last backward runs."""
        stop_s = self.now_s + op[2]
        self.at(stop_s, WORKER, worker)
        worker.done.append(Done(op, batch, self.now_s, stop_s, worker.cause, self.num_events))
        worker.cause = None
        if op[8]:
            self.foresee_buckets(worker, op, batch)

    def foresee_buckets(self, worker: Worker, op: PlainOp, batch: int) -> None:
        """Buckets become ready while a batch's last backward runs."""
        for bucket, share in enumerate(op[8]):
            ready = partial(self.bucket_ready, worker.number, op[ACTION].stage, batch, bucket)
            self.at(self.now_s + share * op[2], CALL, ready)

    def loaded(self, worker: Worker, op: PlainOp, batch: int) -> bool:
        """Whether the host has decoded the rows; if not, the worker comes back when it has."""
        loader, host = self.loader, self.program.plan.devices[worker.number].host
        if loader is None:
            return True
        ready_s = loader.ready_s(host, batch, op[9])
        if ready_s > self.now_s:
            worker.cause = ("data", host)
            self.at(ready_s, WORKER, worker)
            return False
        loader.began(host, batch, self.now_s)
        return True

    def reduced_whole(self, worker: Worker, stage: int, batch: int) -> bool:
        """Whether every bucket of a stage is reduced."""
        reduction = self.program.reductions[stage]
        if reduction.num_replicas > 1 and self.unreduced.get((stage, batch), reduction.num_buckets):
            worker.wait = (stage, batch)
            return False
        return True

    def agree(self, worker: Worker, batch: int) -> bool:
        """Whether all workers have met: each comes when its own stages' gradients are reduced."""
        if batch in self.agreed:
            return True
        for stage, workers in enumerate(self.program.plan.workers):
            if worker.number in workers and not self.reduced_whole(worker, stage, batch):
                return False
        here = self.arrived.setdefault(batch, set())
        here.add(worker.number)
        if len(here) == len(self.workers):
            self.at(self.now_s + self.program.agree_s, CALL, partial(self.agree_over, worker.number, batch))
        worker.wait = ("agreement", batch)
        return False

    def agree_over(self, last: int, batch: int) -> None:
        """All workers have met: they go on together."""
        self.agreed.add(batch)
        for number in sorted(self.arrived.pop(batch)):
            self.wake(self.workers[number], ("agreement", batch), ("worker", last), self.now_s)

    # transfers

    def send(self, worker: Worker, op: PlainOp, batch: int) -> None:
        """Issues a sending."""
        lane = self.lanes[op[4]]
        lane.sent.append((op, batch, self.now_s))
        worker.buffers.append((self.now_s, op[5], BUFFERS))
        if lane.posted and not lane.busy:
            self.pair_up(lane)

    def receive(self, worker: Worker, op: PlainOp, batch: int) -> None:
        """Issues a receipt."""
        lane, key, missing = self.lanes[op[4]], op[3] + batch * self.num_slots, self.missing
        missing[key] = missing.get(key, 0) + 1
        lane.posted.append((op, batch, key))
        worker.buffers.append((self.now_s, op[5], BUFFERS))
        if lane.sent and not lane.busy:
            self.pair_up(lane)

    def pair_up(self, lane: Lane) -> None:
        """Starts the next transfer of a channel that is free and whose ends have both issued it."""
        sent, batch, issued_s = lane.sent.popleft()
        received, other, key = lane.posted.popleft()
        if batch != other or sent[9] != received[9]:
            raise SimulationError(*self.mismatch(lane, sent, batch, received, other))
        flow, num_bytes, now_s = lane.flow, sent[5], self.now_s
        flow.load = (lane, key, sent[7], batch, num_bytes, issued_s, now_s)
        if num_bytes and flow.loads:
            lane.busy = True
            self.network.start(flow, num_bytes, now_s)
        else:
            self.land(flow.load)

    def mismatch(self, lane: Lane, sent: PlainOp, batch: int, received: PlainOp, other: int) -> tuple[str, str]:
        """What is wrong with a channel whose ends disagree."""
        return (
            f"worker {lane.source.number} sends {sent[ACTION]} of batch {batch} while worker {lane.target.number} "
            f"receives {received[ACTION]} of batch {other}",
            "both ends of a pair must issue their transfers in the same order: check the schedule",
        )

    def arrive(self, flow: Flow) -> None:
        """A flow is over; the latency follows."""
        self.network.stop(flow)
        load = flow.load
        lane = load[0]
        if lane is None:
            stage = load[1]
            way = self.program.reductions[stage].way
            self.at(self.now_s + (way.latency_s if way else 0.0), CALL, partial(self.reduced, *load[1:]))
            return
        self.land(load)
        lane.busy = False
        if lane.sent and lane.posted:
            self.pair_up(lane)

    def land(self, load: Load) -> None:
        """A transfer arrives after its latency: whoever waits for it, or will, may go on then."""
        lane, key, action, batch, num_bytes, issued_s, start_s = load
        target, moved, landing = lane.target, self.moved, self.landing
        stop_s = self.now_s + lane.latency_s
        moved.append(named(Moved, (lane.number, action, batch, num_bytes, issued_s, start_s, stop_s)))
        lane.source.buffers.append((stop_s, -num_bytes, BUFFERS))
        left = self.missing.pop(key) - 1
        latest = landing.get(key)
        if latest is None or stop_s >= latest[0]:
            latest = landing[key] = (stop_s, len(moved) - 1)
        if left:
            self.missing[key] = left
        elif target.wait == key:
            target.wait, target.cause = None, ("transfer", latest[1])
            self.num_events += 1
            heappush(self.heap, (latest[0], self.num_events, WORKER, target))
        elif target.chooser is not None:
            self.at(latest[0], WORKER, target)

    # reductions

    def bucket_ready(self, worker: int, stage: int, batch: int, bucket: int) -> None:
        """One replica has its gradients of a bucket; the last one queues the reduction."""
        key = stage, batch, bucket
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
        reduction, flow = self.program.reductions[stage], self.flows[stage]
        self.reducing[stage] = True
        load = (stage, batch, bucket, self.now_s, worker)
        if flow is not None and reduction.way is not None and reduction.bucket_bytes:
            flow.load = (None, *load)
            self.network.start(flow, reduction.way.passes * reduction.bucket_bytes, self.now_s)
        else:
            self.at(self.now_s, CALL, partial(self.reduced, *load))

    def reduced(self, stage: int, batch: int, bucket: int, start_s: float, last: int) -> None:
        """A bucket is reduced: the next one starts, and the update may go on after the last."""
        self.reductions.append(Reduced(stage, batch, bucket, start_s, self.now_s, last))
        self.reducing[stage] = False
        self.next_bucket(stage)
        key = (stage, batch)
        left = self.unreduced.get(key, self.program.reductions[stage].num_buckets) - 1
        self.unreduced[key] = left
        if not left:
            for number in self.program.plan.workers[stage]:
                self.wake(self.workers[number], key, ("reduction", len(self.reductions) - 1), self.now_s)

    def stuck(self, worker: Worker) -> tuple[str, str]:
        """Which worker waits for what, when nothing can happen any more."""
        op = worker.ops[min(worker.place, len(worker.ops) - 1)]
        action, batch = op[ACTION], worker.turn + op[1]
        if worker.chooser is not None:
            action, batch = worker.chooser.head()
        return (
            f"worker {worker.number} waits for ever before {action._replace(batch=0)} of batch "
            f"{batch}, at {self.now_s:.6f} s: what it needs is never sent or reduced",
            "check the schedule: stagewright schedule --check FILE",
        )
