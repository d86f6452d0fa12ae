"""The event simulation: workers run their lists, transfers and reductions run beside them, one heap of events.

Each worker is a generator that goes through its ops and yields where one takes time or has to wait; when that is over,
it goes on from there. Everything that can end a wait is an event; all events of one moment are handled before the
network shares out its links anew:

    worker 0   F0 ──▶ SF issued ─────────────┐            F, B, U take time
    channel    ........................ flow ─────▶ arrival   receipts, sendings and reductions never hold a list up
    worker 1   RF issued, F waits ···························▶ F0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import count

from stagewright.errors import SimulationError
from stagewright.policy import RULES
from stagewright.schedule import Action, Order
from stagewright.simulation.collectives import Collectives
from stagewright.simulation.dynamic import DynamicWorker
from stagewright.simulation.loading import Loader
from stagewright.simulation.log import Cause, Log, PlainDone, PlainMoved
from stagewright.simulation.program import (
    AGREE,
    CHANNEL,
    CODE,
    COMPUTES,
    DATA,
    FIRST_SLOT,
    GATHER,
    NUM_BYTES,
    READY,
    RECEIVE,
    SECONDS,
    SEND,
    UPDATE,
    PlainOp,
    Program,
)
from stagewright.simulation.shared import SharedCores
from stagewright.simulation.traffic import Flow, Traffic

SAME_MOMENT = 1e-12
"""Events this close to one another, relative to the time, are one moment: rounding must not split it."""


class Worker:
    """A worker's list, what it did, what it waits for, and what ended its last wait."""

    __slots__ = ("cause", "done", "dynamic", "go_on", "head", "is_over", "number", "ops", "order", "shared", "wait")

    def __init__(self, number: int, order: Order, ops: list[PlainOp]) -> None:
        self.number, self.order, self.ops = number, order, ops
        self.go_on: Callable[[], object] = _nothing
        self.is_over = False
        self.wait: object = None
        self.head: tuple[Action, int]
        """The action, and its batch, that the last wait was before."""
        self.cause: Cause | None = None
        self.dynamic: DynamicWorker | None = None
        self.shared: SharedCores | None = None
        self.done: list[PlainDone] = []


class _Lane:
    """A channel's state: what its two ends have issued, and whether a transfer is under way."""

    __slots__ = ("busy", "flow", "latency_s", "number", "posted", "sent", "target")

    def __init__(self, number: int, latency_s: float, flow: Flow, target: Worker) -> None:
        self.number, self.latency_s, self.flow, self.target = number, latency_s, flow, target
        # Mostly empty or of one entry: lists, for a deque keeps room for 64, and thousands of those leave the caches.
        self.sent: list[tuple[PlainOp, Action, int, float]] = []
        self.posted: list[tuple[Action, int, float, int]] = []
        self.busy = False


_Event = Flow | Callable[[], object]
"""A flow is over, unless its rate has changed since; something is called: mostly, a worker goes on."""

_Load = tuple[_Lane, PlainOp, Action, int, float, float, float, int]
"""A transfer under way: its lane, what is sent, of which batch, when sent, posted and started, the slot it fills."""


def _nothing() -> None:
    """What a worker does before its run begins and after it."""


class Engine:
    """One run of a program over a number of batches."""

    def __init__(self, program: Program, num_batches: int, loader: Loader | None = None) -> None:
        self.program, self.num_batches, self.loader = program, num_batches, loader
        self.now_s, self.next_order = 0.0, count(1).__next__
        self.moments: list[float] = []
        self.events: dict[float, list[_Event]] = {}
        self.turns = range(-program.offsets[1], num_batches - program.offsets[0])
        self.num_slots = max(len(program.slot_bytes), 1)
        self.workers = [Worker(number, *lists) for number, lists in enumerate(zip(program.orders, program.ops))]
        self.moved: list[PlainMoved] = []
        self.traffic = traffic = Traffic(program.costs.network.rates, self.at)
        # Transfers: receipts that forwards and backwards still miss, those still in flight, both ends' issues.
        self.missing: dict[int, int] = {}
        self.landing: dict[int, tuple[float, int]] = {}
        self.lanes = [
            _Lane(n, c.latency_s, traffic.make_flow(c.loads, c.bytes_per_s, c.shared), self.workers[c.target])
            for n, c in enumerate(program.channels)
        ]
        self.collectives = Collectives(self)
        for worker, share in zip(self.workers, program.shares):
            flow = traffic.make_flow(share.loads, share.work_per_s, share.shared)
            worker.shared = SharedCores(self, worker, flow)

    def run(self) -> Log:
        """Everything, from the first forward to the last update."""
        for worker in self.workers:
            self.bring_to_life(worker)
        for worker in self.workers:
            worker.go_on()
        self.traffic.settle(self.now_s)
        self.go_through_events()
        for worker in self.workers:
            if not worker.is_over:
                raise SimulationError(*self.stuck(worker))
        self.let_go()
        return Log([worker.done for worker in self.workers], self.moved, self.collectives.log)

    def bring_to_life(self, worker: Worker) -> None:
        """Decides what it means that a worker goes on."""
        if RULES[self.program.plan.policy].by_arrival:
            worker.dynamic = DynamicWorker(self, worker)
            worker.go_on = worker.dynamic.step
        else:
            worker.go_on = self.life(worker).__next__

    def go_through_events(self) -> None:
        """Moment by moment, until nothing can happen any more."""
        moments, events, settle = self.moments, self.events, self.traffic.settle
        while moments:
            moment = moments[0] * (1 + SAME_MOMENT)
            while moments and moments[0] <= moment:
                self.now_s = now_s = heappop(moments)
                # What happens may add to the list that is gone through.
                for what in events[now_s]:
                    if not isinstance(what, Flow):
                        what()
                    elif what.stop_s == now_s and what.rate:
                        self.arrive(what)
                del events[now_s]
            settle(self.now_s)

    def let_go(self) -> None:
        """Cuts the circles of references, so that all is freed at once when it is used no more."""
        self.traffic.at = lambda time_s, flow: None
        for flow in self.traffic.flows:
            flow.load = None
        del self.collectives.engine
        for worker in self.workers:
            worker.go_on, worker.dynamic, worker.shared = _nothing, None, None

    # events

    def at(self, time_s: float, what: _Event) -> None:
        """Notes an event; those of one time share an entry, for replicas do the same at the same time."""
        together = self.events.get(time_s)
        if together is None:
            self.events[time_s] = [what]
            heappush(self.moments, time_s)
        else:
            together.append(what)

    def wake(self, worker: Worker, waited: object, cause: Cause, time_s: float) -> None:
        """Goes on with a worker at a time if this is what it waits for."""
        if worker.wait == waited:
            worker.wait = None
            worker.cause = cause
            self.at(time_s, worker.go_on)

    # workers

    def life(self, worker: Worker) -> Iterator[None]:
        """A worker's ops one after the other; yields where one takes time or has to wait.

        Nearly all of the time is spent here: what is frequent is written out, what is rare is called.
        """
        batches, num_slots, loader, next_order = self.num_batches, self.num_slots, self.loader, self.next_order
        lanes, missing, landing, at, pair_up = self.lanes, self.missing, self.landing, self.at, self.pair_up
        did, is_shared = worker.done.append, worker.shared is not None
        for turn in self.turns:
            for op, action in zip(worker.ops, worker.order):
                code, seconds, slot, channel, _, _, ready = op
                _, _, offset, microbatch, _ = action
                batch = turn + offset
                if not 0 <= batch < batches:
                    continue
                if code == SEND:
                    lane = lanes[channel]
                    lane.sent.append((op, action, batch, self.now_s))
                    if lane.posted and not lane.busy:
                        pair_up(lane)
                elif code == RECEIVE:
                    lane, key = lanes[channel], slot + microbatch + batch * num_slots
                    missing[key] = missing.get(key, 0) + 1
                    lane.posted.append((action, batch, self.now_s, key))
                    if lane.sent and not lane.busy:
                        pair_up(lane)
                elif code == COMPUTES:
                    if slot >= 0:
                        key = slot + microbatch + batch * num_slots
                        while (key in missing or key in landing) and not self.has_rows(worker, action, batch, key):
                            yield
                    if channel == DATA and loader is not None:
                        while not self.loaded(worker, action, batch):
                            yield
                    if is_shared or ready:
                        self.occupy(worker, op, action, batch)
                    else:
                        now_s = self.now_s
                        stop_s = now_s + seconds
                        did((op, action, batch, now_s, stop_s, worker.cause, next_order()))
                        worker.cause = None
                        at(stop_s, worker.go_on)
                    yield
                else:
                    while not self.passes(worker, op, action, batch):
                        yield
                    if code == UPDATE:
                        self.occupy(worker, op, action, batch)
                        yield
        worker.is_over = True
        yield  # and is never asked to go on: an end would raise StopIteration among the events

    def has_rows(self, worker: Worker, action: Action, batch: int, key: int) -> bool:
        """Whether all receipts of a slot have landed; if not, the worker waits for them."""
        if key in self.missing:
            worker.wait, worker.head = key, (action, batch)
            return False
        time_s, number = self.landing.pop(key)
        if time_s > self.now_s:
            worker.cause = ("transfer", number)
            self.at(time_s, worker.go_on)
            return False
        return True

    def passes(self, worker: Worker, op: PlainOp, action: Action, batch: int) -> bool:
        """Whether a worker gets past a reduction, an update or an agreement; if not, it waits for what that lacks."""
        code, stage = op[CODE], op[CHANNEL]
        worker.head = action, batch
        if code == GATHER:
            self.collectives.bucket_ready(worker.number, stage, batch, action.peer)
        if code == UPDATE:
            return self.collectives.reduced_whole(worker, stage, batch)
        return code != AGREE or self.collectives.agree(worker, batch)

    def occupy(self, worker: Worker, op: PlainOp, action: Action, batch: int) -> None:
        """Starts an op that takes time; buckets become ready while a batch's last backward runs."""
        if worker.shared is not None:
            worker.shared.start(op, action, batch)
            return
        stop_s = self.now_s + op[SECONDS]
        self.at(stop_s, worker.go_on)
        worker.done.append((op, action, batch, self.now_s, stop_s, worker.cause, self.next_order()))
        worker.cause = None
        if op[READY]:
            self.collectives.foresee_buckets(worker, op, action.stage, batch)

    def loaded(self, worker: Worker, action: Action, batch: int) -> bool:
        """Whether the host has decoded the rows; if not, the worker comes back when it has."""
        loader, host = self.loader, self.program.plan.devices[worker.number].host
        if loader is None:
            return True
        ready_s = loader.ready_s(host, batch, action.microbatch)
        if ready_s > self.now_s:
            worker.cause = ("data", host)
            self.at(ready_s, worker.go_on)
            return False
        loader.began(host, batch, self.now_s)
        return True

    # transfers

    def issue(self, op: PlainOp, action: Action, batch: int) -> None:
        """Issues a sending or a receipt outside of a worker's list."""
        lane = self.lanes[op[CHANNEL]]
        if op[CODE] == SEND:
            lane.sent.append((op, action, batch, self.now_s))
        else:
            key = op[FIRST_SLOT] + action.microbatch + batch * self.num_slots
            self.missing[key] = self.missing.get(key, 0) + 1
            lane.posted.append((action, batch, self.now_s, key))
        if lane.sent and lane.posted and not lane.busy:
            self.pair_up(lane)

    def pair_up(self, lane: _Lane) -> None:
        """Starts the next transfer of a channel that is free and whose ends have both issued it."""
        op, sent, batch, sent_s = lane.sent.pop(0)
        received, other, posted_s, key = lane.posted.pop(0)
        if batch != other or sent.microbatch != received.microbatch:
            raise SimulationError(*self.mismatch(lane, sent, batch, received, other))
        flow, num_bytes, now_s = lane.flow, op[NUM_BYTES], self.now_s
        flow.load = load = (lane, op, sent, batch, sent_s, posted_s, now_s, key)
        if num_bytes and flow.loads:
            lane.busy = True
            self.traffic.start(flow, num_bytes, now_s)
        else:
            self.land(load)

    def mismatch(self, lane: _Lane, sent: Action, batch: int, received: Action, other: int) -> tuple[str, str]:
        """What is wrong with a channel whose ends disagree."""
        return (
            f"worker {self.program.channels[lane.number].source} sends {sent} of batch {batch} while worker "
            f"{lane.target.number} receives {received} of batch {other}",
            "both ends of a pair must issue their transfers in the same order: check the schedule",
        )

    def arrive(self, flow: Flow) -> None:
        """A flow is over; the latency follows."""
        self.traffic.stop(flow)
        load = flow.load
        if type(load) is SharedCores:
            load.go_on()
            return
        lane = load[0]
        if lane is None:
            stage = load[1]
            way = self.program.reductions[stage].way
            self.at(self.now_s + (way.latency_s if way else 0.0), partial(self.collectives.reduced, *load[1:]))
            return
        self.land(load)
        lane.busy = False
        if lane.sent and lane.posted:
            self.pair_up(lane)

    def land(self, load: _Load) -> None:
        """A transfer arrives after its latency: whoever waits for it, or will, may go on then."""
        lane, op, sent, batch, sent_s, posted_s, start_s, key = load
        target, missing, number, stop_s = lane.target, self.missing, len(self.moved), self.now_s + lane.latency_s
        self.moved.append((lane.number, op, sent, batch, sent_s, posted_s, start_s, stop_s))
        left = missing.pop(key) - 1
        if left or key in self.landing:
            stop_s, number = self.landing[key] = max(self.landing.get(key, (0.0, 0)), (stop_s, number))
        if left:
            missing[key] = left
        elif target.wait == key:
            target.wait, target.cause = None, ("transfer", number)
            self.at(stop_s, target.go_on)
        else:
            self.landing[key] = (stop_s, number)
            if target.dynamic is not None:
                self.at(stop_s, target.go_on)

    def stuck(self, worker: Worker) -> tuple[str, str]:
        """Which worker waits for what, when nothing can happen any more."""
        action, batch = worker.head if worker.dynamic is None else worker.dynamic.head()
        return (
            f"worker {worker.number} waits for ever before {action._replace(batch=0)} of batch "
            f"{batch}, at {self.now_s:.6f} s: what it needs is never sent or reduced",
            "check the schedule: stagewright schedule --check FILE",
        )
