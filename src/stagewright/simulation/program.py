"""A schedule with its costs filled in: every action becomes an op with seconds, bytes and numbers to wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

from stagewright.cluster import Cluster, Device
from stagewright.cost import Costs, Handled, handled_by_each
from stagewright.errors import SimulationError
from stagewright.network import Collective
from stagewright.plan import Plan, Stage
from stagewright.policy import RULES
from stagewright.profile import Profile
from stagewright.schedule import Action, Kind, Order, Schedule
from stagewright.simulation.traffic import Loads


class Code(Enum):
    """What the engine tells apart: an action that computes, a receipt, a sending, a reduction …"""

    COMPUTES, RECEIVE, SEND, GATHER, AGREE, UPDATE, NOTHING = (auto() for _ in range(7))


_CODES = {
    **dict.fromkeys("FBIW", Code.COMPUTES),
    **dict.fromkeys(("RF", "RB"), Code.RECEIVE),
    **dict.fromkeys(("SF", "SB"), Code.SEND),
    "G": Code.GATHER,
    "A": Code.AGREE,
    "U": Code.UPDATE,
}


@dataclass(frozen=True, slots=True)
class Op:
    """What a worker's actions of one kind, stage and peer are, whichever microbatch of equal rows they handle."""

    code: Code
    seconds: float = 0.0
    slot: int = -1
    """What F and B wait for and receipts fill is a slot, one a worker, stage, microbatch and direction: here that of
    microbatch 0, which the others follow; −1: none."""
    channel: int = -1
    """Of a transfer."""
    num_bytes: float = 0.0
    work: int = -1
    """Which of the program's works a compute action is; −1: none."""
    ready: tuple[float, ...] = ()
    """Of a batch's last backward: for each bucket the share of it after which the bucket can be reduced."""
    needs: tuple[float, ...] = ()
    """Of a batch's first forward: for each bucket the share of it that runs without the bucket's new weights, where
    replicas have to give these to one another."""
    waits: tuple[tuple[int, int], ...] = ()
    """Of the last reduction that a worker begins in a turn, where it computes nothing until all of them are over: their
    stages, each with its batch against this one's."""
    needs_data: bool = False


class Computation(NamedTuple):
    """What ops of equal kind, stage, rows and device have in common."""

    kind: Kind
    stage: int
    rows: int
    device: Device


class _Channel(NamedTuple):
    """Transfers from one worker to another in one direction of the pipeline: they run one after the other."""

    source: int
    target: int
    forward: bool
    loads: Loads
    bytes_per_s: float
    latency_s: float


class _Reduction(NamedTuple):
    """How one stage's buckets are reduced."""

    num_replicas: int
    num_buckets: int
    bucket_bytes: float
    way: Collective | None
    sharers: int
    """Replicas that share out the optimizer's states; 1 where each has all of them. With more, half of the way goes by
    before the update, and half after it, for weights."""


class Program(NamedTuple):
    """All workers' orders with the op of each action, the channels and the reductions."""

    plan: Plan
    costs: Costs
    bounds: tuple[tuple[int, int], ...]
    """First layer and end of each stage."""
    orders: tuple[Order, ...]
    ops: tuple[list[Op], ...]
    works: tuple[Computation, ...]
    channels: tuple[_Channel, ...]
    reductions: tuple[_Reduction, ...]
    slot_bytes: tuple[float, ...]
    """What is received for each slot, in one batch."""
    offsets: tuple[int, int]
    agree_s: float
    shares: tuple[tuple[Loads, float], ...]
    """For each worker, where hosts share cores, those it computes on: what it loads, and how fast its work goes when it
    has them to itself."""

    @property
    def busiest_s(self) -> float:
        """For how long the busiest worker computes for a batch; 0 where cores are shared, and may be faster alone."""
        return 0.0 if self.shares else max(sum(op.seconds for op in ops) for ops in self.ops)


def make_program(schedule: Schedule, profile: Profile, cluster: Cluster, costs: Costs | None = None) -> Program:
    """The schedule's actions with the seconds and bytes that the profile and the cluster give them."""
    return _Compiler(schedule, costs or Costs(profile, cluster)).program()


def _stage_layers(plan: Plan, profile: Profile) -> tuple[tuple[int, int], ...]:
    """First layer and end of each stage, after a check that the plan and the profile are of the same model."""
    if plan.layers != profile.names:
        wrong = next(
            (pair for pair in zip(plan.layers, profile.names) if pair[0] != pair[1]),
            (f"{len(plan.layers)} layers", f"{len(profile.names)}"),
        )
        raise SimulationError(
            f"the plan is of {plan.model}, the profile of {profile.model}: "
            f"the plan has {wrong[0]} where the profile has {wrong[1]}",
            "make the plan from this profile, or give the profile that it was made from",
        )
    return tuple(pairwise(plan.edges))


class _Compiler:
    """Numbers slots, channels and works while it goes through the orders."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs, self.system = schedule, costs, costs.system
        self.bounds = _stage_layers(schedule.plan, costs.profile)
        self.plan = replace(schedule.plan, stages=tuple(map(self.bucketed, schedule.plan.stages, self.bounds)))
        self.devices = [costs.cluster.device(id) for id in self.plan.devices]
        self.is_dynamic = RULES[self.plan.policy].by_arrival
        self.slots: dict[tuple[int, int, bool], int] = {}
        self.slot_bytes: defaultdict[int, float] = defaultdict(float)
        self.channels: dict[tuple[int, int, bool, int], int] = {}
        self.works: dict[Computation, int] = {}
        self.known_rows: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        self.known_s: dict[tuple[str, int, int, str, float], float] = {}

    def program(self) -> Program:
        ops = tuple(self.worker_ops(worker, order) for worker, order in enumerate(self.schedule.orders))
        cores, devices = self.costs.network.cores, self.plan.devices
        sharing = () if cores.of_all is None else devices
        slot_bytes = tuple(self.slot_bytes[slot] for slot in range(len(self.slots) * self.plan.num_microbatches))
        # An agreement of all workers is an all-reduce of next to nothing.
        agree = self.costs.network.collective(devices, 0.0) if self.schedule.agree else None
        return Program(
            plan=self.plan, costs=self.costs, bounds=self.bounds, orders=self.schedule.orders, ops=ops,
            works=tuple(self.works), slot_bytes=slot_bytes, offsets=self.schedule.offsets,
            agree_s=0.0 if agree is None else agree.latency_s,
            channels=tuple(self.channel(*key[:3]) for key in self.channels),
            reductions=tuple(self.reduction(stage) for stage in range(len(self.plan.stages))),
            shares=tuple((cores.computing(id), cores.wanted(id) / cores.unit_s) for id in sharing),
        )  # fmt: skip

    def bucketed(self, stage: Stage, bounds: tuple[int, int]) -> Stage:
        """A stage whose gradients are reduced in as many pieces as the system does."""
        many = self.costs.num_buckets(*bounds, stage.num_buckets)
        return replace(stage, num_buckets=many) if len(stage.devices) > 1 else stage

    def channel(self, source: int, target: int, forward: bool) -> _Channel:
        ends, network = (self.plan.devices[source], self.plan.devices[target]), self.costs.network
        return _Channel(source, target, forward, network.loads(*ends), network.rate(*ends), network.latency_s(*ends))

    def reduction(self, stage: int) -> _Reduction:
        devices, buckets = self.plan.stages[stage].devices, self.plan.stages[stage].num_buckets
        num_bytes = self.costs.gradient_bytes(*self.bounds[stage]) / buckets
        way = self.costs.network.collective(devices, num_bytes)
        return _Reduction(len(devices), buckets, num_bytes, way, self.sharers(stage))

    def sharers(self, stage: int) -> int:
        """How many replicas share out a stage's optimizer states."""
        return self.plan.replicas[stage] if self.plan.shard_optimizer[stage] else 1

    def worker_ops(self, worker: int, order: Order) -> list[Op]:
        """The op of each action of one worker's turn."""
        known: dict[tuple[str, int, int, tuple[int, int]], Op] = {}
        ops: list[Op] = []
        add, patterns, slot_bytes, receive = ops.append, self.plan.patterns, self.slot_bytes, Code.RECEIVE
        for action in order:
            kind, stage, _, microbatch, peer = action
            key = (kind._value_, stage, peer, patterns[microbatch])
            op = known.get(key)
            if op is None:
                op = known[key] = self.op(worker, action)
            add(op)
            if op.code is receive:
                slot_bytes[op.slot + microbatch] += op.num_bytes
        self.finish(worker, order, ops)
        return ops

    def finish(self, worker: int, order: Order, ops: list[Op]) -> None:
        """Gives last backwards the shares at which buckets are ready, and the last update the step's overhead."""
        gathers = _places(ops, Code.GATHER)
        hides = self.system.reduction_overlaps != "nothing"
        last = self.last_backwards(order, ops) if gathers and hides else {}
        # A replica without rows has no backward that would say when its (empty) gradients are ready: G itself does.
        for index in [index for index in gathers if order[index].stage in last]:
            ops[index] = replace(ops[index], code=Code.NOTHING)
        for stage in {order[index].stage for index in gathers} & set(last):
            op, buckets = ops[last[stage]], self.plan.stages[stage].num_buckets
            ready = self.costs.ready_shares(*self.bounds[stage], list(self.works)[op.work].rows, buckets)
            ops[last[stage]] = replace(op, ready=ready)
        if gathers and self.system.reduction_overlaps != "next-batch":
            begun, end = [order[index] for index in gathers], gathers[-1]
            waits = tuple((each.stage, each.batch - order[end].batch) for each in begun)
            ops[end] = replace(ops[end], waits=waits)
        for index, op in enumerate(ops):
            work = list(self.works)[op.work] if op.work >= 0 else None
            if work is not None and work.kind is Kind.FORWARD and self.plan.shard_optimizer[work.stage]:
                buckets = self.plan.stages[work.stage].num_buckets
                ready = self.costs.ready_shares(*self.bounds[work.stage], work.rows, buckets)
                ops[index] = replace(op, needs=tuple(1 - share for share in ready))
        for index in _places(ops, Code.UPDATE)[-1:]:
            ops[index] = replace(ops[index], seconds=ops[index].seconds + self.devices[worker].step_overhead_s)

    def last_backwards(self, order: Order, ops: Sequence[Op]) -> dict[int, int]:
        """Stage by stage the index of the backward after which the gradients of a batch are whole."""
        whole = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        stages = {number: work.stage for number, work in enumerate(self.works) if work.kind in whole}
        last: dict[int, int] = {}
        for index in [index for index, op in enumerate(ops) if op.work in stages]:
            stage = stages[ops[index].work]
            # In the loop, an action of an earlier batch comes in a later turn: the last one has the lowest offset.
            if stage not in last or order[index].batch <= order[last[stage]].batch:
                last[stage] = index
        return last

    def op(self, worker: int, action: Action) -> Op:
        code, stage, peer = _CODES[action.kind._value_], action.stage, action.peer
        if code is Code.COMPUTES:
            return self.compute_op(worker, action)
        if code is Code.RECEIVE:
            forward, user = action.kind is Kind.RECEIVE_FORWARD, self.user(worker, action)
            num_bytes, slot = self.message_bytes(worker, user, action, not forward), self.slot(worker, user, forward)
            return Op(code, slot=slot, channel=self.channel_of(peer, worker, forward, stage), num_bytes=num_bytes)
        if code is Code.SEND:
            forward = action.kind is Kind.SEND_FORWARD
            num_bytes = self.message_bytes(worker, stage, action, forward)
            sending_s = self.sending_s(worker, peer, num_bytes)
            return Op(
                code, channel=self.channel_of(worker, peer, forward, stage), num_bytes=num_bytes, seconds=sending_s
            )
        return Op(code, seconds=self.update_s(worker, stage) if code is Code.UPDATE else 0.0)

    def sending_s(self, worker: int, peer: int, num_bytes: float) -> float:
        """How long a worker does nothing else than send, where sends block."""
        ends, network = (self.plan.devices[worker], self.plan.devices[peer]), self.costs.network
        if not self.system.blocking_sends or self.is_dynamic:
            return 0.0
        return network.latency_s(*ends) + num_bytes / network.rate(*ends)

    def compute_op(self, worker: int, action: Action) -> Op:
        """Forward, backward or one of its halves."""
        kind, stage, _, microbatch, _ = action
        first, stop = self.rows(stage, microbatch, worker)
        is_forward, device = kind is Kind.FORWARD, self.devices[worker]
        may_wait = stage > 0 if is_forward else kind is not Kind.BACKWARD_WEIGHT and stage + 1 < len(self.bounds)
        return Op(
            Code.COMPUTES, seconds=self.compute_s(kind, stage, stop - first, device),
            slot=self.slot(worker, stage, is_forward) if may_wait else -1,
            work=self.works.setdefault(Computation(kind, stage, stop - first, device), len(self.works)),
            needs_data=is_forward and stage == 0,
        )  # fmt: skip

    def user(self, worker: int, action: Action) -> int:
        """The stage that will use what is received: schedules name the stage that made it."""
        step = 1 if action.kind is Kind.RECEIVE_FORWARD else -1
        workers, user = self.plan.workers, action.stage + step
        is_made_by_peer = action.peer in workers[action.stage] and 0 <= user < len(workers)
        return user if is_made_by_peer and worker in workers[user] else action.stage

    def slot(self, worker: int, stage: int, forward: bool) -> int:
        """The number of what a worker's forward or backward of microbatch 0 waits for; the others follow."""
        return self.slots.setdefault((worker, stage, forward), len(self.slots) * self.plan.num_microbatches)

    def channel_of(self, source: int, target: int, forward: bool, stage: int) -> int:
        """The number of a channel; stages that run in any order have channels of their own."""
        return self.channels.setdefault((source, target, forward, stage if self.is_dynamic else -1), len(self.channels))

    def rows(self, stage: int, microbatch: int, worker: int) -> tuple[int, int]:
        """The rows of a microbatch that a worker handles in a stage."""
        found = self.known_rows.get((stage, microbatch))
        if found is None:
            workers, shares = self.plan.workers[stage], self.plan.shares(stage, microbatch)
            found = {workers[replica]: (start, stop) for replica, start, stop in shares}
            self.known_rows[stage, microbatch] = found
        if worker not in found:
            raise SimulationError(
                f"worker {worker} has no rows of microbatch {microbatch} in stage {stage}",
                "make the schedule from the plan that it carries",
            )
        return found[worker]

    def compute_s(self, kind: Kind, stage: int, rows: int, device: Device) -> float:
        """Seconds of F, B, I or W."""
        key = (kind._value_, stage, rows, device.kind, device.speed)
        if key not in self.known_s:
            self.known_s[key] = self.fresh_s(kind, stage, rows, device)
        return self.known_s[key]

    def fresh_s(self, kind: Kind, stage: int, rows: int, device: Device) -> float:
        recompute, costs = self.plan.stages[stage].recompute, self.costs.on(device)
        found = costs.seconds(*self.bounds[stage], rows, device.speed, recompute=recompute, handled=self.handled(stage))
        if kind is Kind.BACKWARD:
            return found.backward - self.kept_s(stage, rows, device)
        halves = {Kind.BACKWARD_INPUT: found.backward - found.weight, Kind.BACKWARD_WEIGHT: found.weight}
        return halves.get(kind, found.forward)

    def handled(self, stage: int) -> Handled:
        """What each replica of a stage handles."""
        plan = self.plan
        return handled_by_each(plan.policy, plan.route, plan.num_microbatches, plan.replicas[stage])

    def kept_s(self, stage: int, rows: int, device: Device) -> float:
        """What of a microbatch's B belongs to U: products of linear layers, after the batch's last gradients have left.

        Where replicas add gradients up, they belong to the last B, so that buckets start while it runs.
        """
        if self.plan.replicas[stage] > 1:
            return 0.0
        costs = self.costs.on(device)
        return costs.seconds(*self.bounds[stage], rows, device.speed, handled=self.handled(stage)).kept

    def update_s(self, worker: int, stage: int) -> float:
        """Seconds of U, with the products that are left of its batch."""
        device = self.devices[worker]
        buckets = self.plan.stages[stage].num_buckets
        how = {"versions": self.plan.versions[stage], "sharers": self.sharers(stage), "buckets": buckets}
        own = self.costs.on(device).optimizer_s(*self.bounds[stage], device.speed, **how)
        if self.plan.replicas[stage] > 1:
            return own
        shares = (self.rows(stage, microbatch, worker) for microbatch in range(self.plan.num_microbatches))
        return own + sum(self.kept_s(stage, stop - start, device) for start, stop in shares)

    def message_bytes(self, worker: int, stage: int, action: Action, after: bool) -> float:
        """Bytes of the rows that both ends of a transfer handle, over the boundary after the stage or before it."""
        mine = self.rows(stage, action.microbatch, worker)
        theirs = self.rows(stage + (1 if after else -1), action.microbatch, action.peer)
        rows = max(min(mine[1], theirs[1]) - max(mine[0], theirs[0]), 0)
        return rows * self.costs.crossings[self.bounds[stage][1 if after else 0]]


def _places(ops: Iterable[Op], code: Code) -> list[int]:
    return [index for index, op in enumerate(ops) if op.code is code]
