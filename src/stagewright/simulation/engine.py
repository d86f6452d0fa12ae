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
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

from stagewright.errors import SimulationError
from stagewright.simulation.dynamic import Chooser
from stagewright.simulation.loading import Loader
from stagewright.simulation.log import BUFFERS, Cause, Change, Done, Log, Moved, Reduced
from stagewright.simulation.network import Flow, Network
from stagewright.simulation.program import (
    ACTION,
    AGREE,
    CHANNEL,
    CODE,
    COMPUTES,
    DATA,
    GATHER,
    MICROBATCH,
    NUM_BYTES,
    OFFSET,
    READY,
    RECEIVE,
    SECONDS,
    SEND,
    SLOT,
    UPDATE,
    Channel,
    PlainOp,
    Program,
)
from stagewright.simulation.shared import Shared

SAME_MOMENT = 1e-12
"""Events this close to one another, relative to the time, are one moment: rounding must not split it."""
named: Any = tuple.__new__
"""Makes a named tuple of a plain one, in a third of the time that its own call takes."""


class Worker:
    """A worker's list, how far it is, what it waits for, and what ended its last wait."""

    __slots__ = ("buffers", "cause", "chooser", "done", "number", "ops", "place", "shared", "turn", "wait")

    def __init__(self, number: int, ops: tuple[PlainOp, ...], turn: int) -> None:
        self.number, self.ops, self.turn, self.place = number, ops, turn, 0
        self.wait: object = None
        self.cause: Cause | None = None
        self.chooser: Chooser | None = None
        self.shared: Shared | None = None
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


Event = Worker | tuple[Flow, int] | Callable[[], None]
"""A worker goes on; a flow is over, unless its rate has changed since the turn; something is called."""

Load = tuple[Lane, PlainOp, int, float, float, int]
"""A transfer under way: its lane, what is sent, of which batch, when issued and started, the slot it fills."""


class Moves(Sequence[Moved]):
    """The transfers of a run: most are only counted, so each gets its names when it is looked at."""

    def __init__(self, loads: list[tuple[Load, float]]) -> None:
        self.loads = loads

    def __len__(self) -> int:
        return len(self.loads)

    def __getitem__(self, number: Any) -> Any:
        (lane, op, batch, issued_s, start_s, _), stop_s = self.loads[number]
        return Moved(lane.number, op[ACTION], batch, op[NUM_BYTES], issued_s, start_s, stop_s)


class Engine:
    """One run of a program over a number of batches."""

    def __init__(self, program: Program, num_batches: int, loader: Loader | None = None) -> None:
        self.program, self.num_batches, self.loader = program, num_batches, loader
        self.now_s, self.num_done = 0.0, 0
        self.moments: list[float] = []
        self.events: dict[float, list[Any]] = {}
        self.last_turn, self.num_slots = num_batches - program.offsets[0], max(len(program.slot_bytes), 1)
        self.workers = [Worker(number, ops, -program.offsets[1]) for number, ops in enumerate(program.lists)]
        if program.plan.policy == "dynamic":
            for worker in self.workers:
                worker.chooser = Chooser(self, worker)
        self.moved: list[tuple[Load, float]] = []
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
        for worker, share in zip(self.workers, program.shares):
            flow = network.make_flow(share.loads, share.work_per_s, share.shared)
            worker.shared = Shared(self, worker, flow)
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
        moments, events, settle, step = self.moments, self.events, self.network.settle, self.step
        for worker in self.workers:
            step(worker)
        settle(self.now_s)
        while moments:
            moment = moments[0] * (1 + SAME_MOMENT)
            while moments and moments[0] <= moment:
                self.now_s = heappop(moments)
                # What happens may add to the list that is gone through.
                for what in events[self.now_s]:
                    if type(what) is Worker:
                        step(what)
                    elif type(what) is tuple:
                        flow, turn = what
                        if flow.turn == turn:
                            self.arrive(flow)
                    else:
                        what()
                del events[self.now_s]
            settle(self.now_s)
        for worker in self.workers:
            if worker.turn < self.last_turn:
                raise SimulationError(*self.stuck(worker))
        self.let_go()
        workers = self.workers
        return Log([one.done for one in workers], Moves(self.moved), self.reductions, [one.buffers for one in workers])

    def let_go(self) -> None:
        """Cuts the circles of references, so that all is freed at once when it is used no more."""
        self.network.on_change = lambda flow: None
        for flow in self.network.flows:
            flow.load = None
        for worker in self.workers:
            worker.chooser = worker.shared = None

    # events

    def at(self, time_s: float, what: Event) -> None:
        """Notes an event; those of one time share an entry, for replicas do the same at the same time."""
        together = self.events.get(time_s)
        if together is None:
            self.events[time_s] = [what]
            heappush(self.moments, time_s)
        else:
            together.append(what)

    def foresee(self, flow: Flow) -> None:
        """The network has changed a flow's rate: this is when it will be over, unless the rate changes again."""
        self.at(flow.stop_s, (flow, flow.turn))

    def wake(self, worker: Worker, waited: object, cause: Cause, time_s: float) -> None:
        """Goes on with a worker at a time if this is what it waits for."""
        if worker.wait == waited:
            worker.wait = None
            worker.cause = cause
            self.at(time_s, worker)

    # workers

    def step(self, worker: Worker) -> None:
        """Runs a worker until something takes time or has to be waited for.

        Nearly all of the time is spent here: what is frequent is written out, what is rare is called.
        """
        if worker.chooser is not None:
            worker.chooser.step()
            return
        ops, place, turn, now_s = worker.ops, worker.place, worker.turn, self.now_s
        count, batches, num_slots = len(ops), self.num_batches, self.num_slots
        lanes, missing, landing, buffers = self.lanes, self.missing, self.landing, worker.buffers
        while True:
            if place == count:
                place, turn = 0, turn + 1
                worker.turn = turn
            if turn >= self.last_turn or not count:
                worker.turn = self.last_turn
                break
            op = ops[place]
            code, offset, seconds, slot, channel, num_bytes, _, _, ready, _ = op
            batch = turn + offset
            place += 1
            if not 0 <= batch < batches:
                continue
            key = slot + batch * num_slots
            if code == SEND:
                lane = lanes[channel]
                lane.sent.append((op, batch, now_s))
                buffers.append((now_s, num_bytes, BUFFERS))
                if lane.posted and not lane.busy:
                    self.pair_up(lane)
            elif code == RECEIVE:
                lane = lanes[channel]
                missing[key] = missing.get(key, 0) + 1
                lane.posted.append((op, batch, key))
                buffers.append((now_s, num_bytes, BUFFERS))
                if lane.sent and not lane.busy:
                    self.pair_up(lane)
            elif code == COMPUTES:
                if slot >= 0 and (key in missing or key in landing) and not self.has_rows(worker, key):
                    place -= 1
                    break
                if channel == DATA and self.loader is not None and not self.loaded(worker, op, batch):
                    place -= 1
                    break
                if worker.shared is not None:
                    self.occupy(worker, op, batch)
                    break
                self.num_done += 1
                stop_s = now_s + seconds
                worker.done.append(named(Done, (op, batch, now_s, stop_s, worker.cause, self.num_done)))
                worker.cause = None
                self.at(stop_s, worker)
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
                self.at(time_s, worker)
                return False
        return True

    def passes(self, worker: Worker, op: PlainOp, batch: int) -> bool:
        """Whether a worker gets past a reduction, an update or an agreement; if not, it waits for what that lacks."""
        code, stage = op[CODE], op[CHANNEL]
        if code == GATHER:
            self.bucket_ready(worker.number, stage, batch, op[ACTION].peer)
        if code == UPDATE:
            return self.reduced_whole(worker, stage, batch)
        return code != AGREE or self.agree(worker, batch)

    def occupy(self, worker: Worker, op: PlainOp, batch: int) -> None:
        """Starts an op that takes time; buckets become ready while a batch's last backward runs."""
        if worker.shared is not None:
            worker.shared.start(op, batch)
            return
        stop_s = self.now_s + op[SECONDS]
        self.num_done += 1
        self.at(stop_s, worker)
        worker.done.append(Done(op, batch, self.now_s, stop_s, worker.cause, self.num_done))
        worker.cause = None
        if op[READY]:
            self.foresee_buckets(worker, op, batch)

    def foresee_buckets(self, worker: Worker, op: PlainOp, batch: int) -> None:
        """Buckets become ready while a batch's last backward runs."""
        for bucket, share in enumerate(op[READY]):
            ready = partial(self.bucket_ready, worker.number, op[ACTION].stage, batch, bucket)
            self.at(self.now_s + share * op[SECONDS], ready)

    def loaded(self, worker: Worker, op: PlainOp, batch: int) -> bool:
        """Whether the host has decoded the rows; if not, the worker comes back when it has."""
        loader, host = self.loader, self.program.plan.devices[worker.number].host
        if loader is None:
            return True
        ready_s = loader.ready_s(host, batch, op[MICROBATCH])
        if ready_s > self.now_s:
            worker.cause = ("data", host)
            self.at(ready_s, worker)
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
            self.at(self.now_s + self.program.agree_s, partial(self.agree_over, worker.number, batch))
        worker.wait = ("agreement", batch)
        return False

    def agree_over(self, last: int, batch: int) -> None:
        """All workers have met: they go on together."""
        self.agreed.add(batch)
        for number in sorted(self.arrived.pop(batch)):
            self.wake(self.workers[number], ("agreement", batch), ("worker", last), self.now_s)

    # transfers

    def issue(self, worker: Worker, op: PlainOp, batch: int) -> None:
        """Issues a sending or a receipt outside of a worker's list."""
        lane, key = self.lanes[op[CHANNEL]], op[SLOT] + batch * self.num_slots
        worker.buffers.append((self.now_s, op[NUM_BYTES], BUFFERS))
        if op[CODE] == SEND:
            lane.sent.append((op, batch, self.now_s))
        else:
            self.missing[key] = self.missing.get(key, 0) + 1
            lane.posted.append((op, batch, key))
        if lane.sent and lane.posted and not lane.busy:
            self.pair_up(lane)

    def pair_up(self, lane: Lane) -> None:
        """Starts the next transfer of a channel that is free and whose ends have both issued it."""
        sent, batch, issued_s = lane.sent.popleft()
        received, other, key = lane.posted.popleft()
        if batch != other or sent[MICROBATCH] != received[MICROBATCH]:
            raise SimulationError(*self.mismatch(lane, sent, batch, received, other))
        flow, num_bytes = lane.flow, sent[NUM_BYTES]
        flow.load = (lane, sent, batch, issued_s, self.now_s, key)
        if num_bytes and flow.loads:
            lane.busy = True
            self.network.start(flow, num_bytes, self.now_s)
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
        if type(load) is Shared:
            load.go_on()
            return
        lane = load[0]
        if lane is None:
            stage = load[1]
            way = self.program.reductions[stage].way
            self.at(self.now_s + (way.latency_s if way else 0.0), partial(self.reduced, *load[1:]))
            return
        self.land(load)
        lane.busy = False
        if lane.sent and lane.posted:
            self.pair_up(lane)

    def land(self, load: Load) -> None:
        """A transfer arrives after its latency: whoever waits for it, or will, may go on then."""
        lane, sent, _, _, _, key = load
        target, number, stop_s = lane.target, len(self.moved), self.now_s + lane.latency_s
        self.moved.append((load, stop_s))
        lane.source.buffers.append((stop_s, -sent[NUM_BYTES], BUFFERS))
        left = self.missing.pop(key) - 1
        if left or key in self.landing:
            stop_s, number = self.landing[key] = max(self.landing.get(key, (0.0, 0)), (stop_s, number))
        if left:
            self.missing[key] = left
        elif target.wait == key:
            target.wait, target.cause = None, ("transfer", number)
            self.at(stop_s, target)
        else:
            self.landing[key] = (stop_s, number)
            if target.chooser is not None:
                self.at(stop_s, target)

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
            self.at(self.now_s, partial(self.reduced, *load))

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
        action, batch = op[ACTION], worker.turn + op[OFFSET]
        if worker.chooser is not None:
            action, batch = worker.chooser.head()
        return (
            f"worker {worker.number} waits for ever before {action._replace(batch=0)} of batch "
            f"{batch}, at {self.now_s:.6f} s: what it needs is never sent or reduced",
            "check the schedule: stagewright schedule --check FILE",
        )
