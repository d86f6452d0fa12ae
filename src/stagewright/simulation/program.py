"""A schedule with its costs filled in: every action becomes an `Op` with seconds, bytes and numbers to wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stagewright.cluster import Cluster
from stagewright.cost import Collective, Costs
from stagewright.errors import SimulationError
from stagewright.plan import Plan
from stagewright.profile import Profile
from stagewright.schedule import Action, Kind, Schedule

COMPUTES, RECEIVE, SEND, GATHER, AGREE, UPDATE, NOTHING = range(7)
"""What the engine tells apart: an action that computes, a receipt, a sending, a reduction …"""

CODES = {
    **dict.fromkeys("FBIW", COMPUTES),
    **dict.fromkeys(("RF", "RB"), RECEIVE),
    **dict.fromkeys(("SF", "SB"), SEND),
    "G": GATHER,
    "A": AGREE,
    "U": UPDATE,
    "V": NOTHING,
    "D": NOTHING,
}


class Op(NamedTuple):
    """One action of one worker, ready to be run."""

    code: int
    offset: int
    """The action's batch, relative to the turn."""
    seconds: float
    slot: int
    """What F and B wait for and receipts fill: a number a worker, stage, microbatch and direction; −1: none."""
    channel: int
    """Which channel a transfer uses; the stage of a reduction or an update."""
    num_bytes: float
    action: Action
    ready: tuple[float, ...] = ()
    """Of a batch's last backward: for each bucket the share of it after which the bucket can be reduced."""
    rows: int = 0
    loads: int = -1
    """The microbatch of data that a forward of the first stage waits for."""


class Channel(NamedTuple):
    """Transfers from one worker to another in one direction of the pipeline: they run one after the other."""

    source: int
    target: int
    forward: bool
    loads: tuple[tuple[int, int], ...]
    bytes_per_s: float
    latency_s: float


class Reduction(NamedTuple):
    """How one stage's buckets are reduced."""

    num_replicas: int
    num_buckets: int
    bucket_bytes: float
    way: Collective | None


class Program(NamedTuple):
    """All workers' ops, the channels and the reductions."""

    plan: Plan
    costs: Costs
    ops: tuple[tuple[Op, ...], ...]
    channels: tuple[Channel, ...]
    reductions: tuple[Reduction, ...]
    num_slots: int
    offsets: tuple[int, int]
    agree_s: float


def make_program(schedule: Schedule, profile: Profile, cluster: Cluster, costs: Costs | None = None) -> Program:
    """The schedule's actions with the seconds and bytes that the profile and the cluster give them."""
    return Compiler(schedule, costs or Costs(profile, cluster)).program()


def stage_layers(plan: Plan, profile: Profile) -> tuple[tuple[int, int], ...]:
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
    edges = [0]
    for stage in plan.stages:
        edges.append(edges[-1] + len(stage.layers))
    return tuple(zip(edges, edges[1:]))


class Compiler:
    """Numbers slots and channels while it goes through the orders."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.plan, self.costs = schedule, schedule.plan, costs
        self.bounds = stage_layers(self.plan, costs.profile)
        self.speeds = [costs.cluster.device(id).speed for id in self.plan.devices]
        self.slots: dict[tuple[int, int, int, bool], int] = {}
        self.channels: list[Channel] = []
        self.channel_numbers: dict[tuple[int, int, bool], int] = {}
        self._rows: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        self._seconds: dict[tuple[str, int, int, float], float] = {}

    def program(self) -> Program:
        """The whole program."""
        ops = tuple(tuple(self.worker_ops(worker, order)) for worker, order in enumerate(self.schedule.orders))
        return Program(
            self.plan,
            self.costs,
            ops,
            tuple(self.channels),
            tuple(self.reduction(stage) for stage in range(len(self.plan.stages))),
            max(len(self.slots), 1),
            self.schedule.offsets,
            self.agree_s(),
        )

    def worker_ops(self, worker: int, order: Sequence[Action]) -> list[Op]:
        """The ops of one worker's turn."""
        receipts = (self.at_receiver(worker, action) for action in order if CODES[action.kind._value_] == RECEIVE)
        received = {(a.stage, a.microbatch, a.kind is Kind.RECEIVE_FORWARD) for a in receipts}
        ops = [self.op(worker, action, received) for action in order]
        updates = [index for index, op in enumerate(ops) if op.code == UPDATE]
        for index in updates[-1:]:
            overhead_s = self.costs.cluster.device(self.plan.devices[worker]).step_overhead_s
            ops[index] = ops[index]._replace(seconds=ops[index].seconds + overhead_s)
        for index, shares in self.last_backwards(worker, order):
            ops[index] = ops[index]._replace(ready=shares)
        # A replica without rows has no backward that would say when its (empty) gradients are ready: G itself does.
        ready = {op.action.stage for op in ops if op.ready}
        return [op._replace(code=NOTHING) if op.code == GATHER and op.action.stage in ready else op for op in ops]

    def op(self, worker: int, action: Action, received: set[tuple[int, int, bool]]) -> Op:
        """One action with its costs."""
        code = CODES[action.kind._value_]
        if code == COMPUTES:
            return self.compute_op(worker, action, received)
        if code == RECEIVE:
            action = self.at_receiver(worker, action)
            forward = action.kind is Kind.RECEIVE_FORWARD
            channel, num_bytes = (
                self.channel(action.peer, worker, forward),
                self.message_bytes(worker, action, not forward),
            )
            return Op(code, action.batch, 0.0, self.slot(worker, action, forward), channel, num_bytes, action)
        if code == SEND:
            forward = action.kind is Kind.SEND_FORWARD
            channel, num_bytes = self.channel(worker, action.peer, forward), self.message_bytes(worker, action, forward)
            return Op(code, action.batch, 0.0, -1, channel, num_bytes, action)
        seconds = self.update_s(action.stage, self.speeds[worker]) if code == UPDATE else 0.0
        return Op(code, action.batch, seconds, -1, action.stage, 0.0, action)

    def compute_op(self, worker: int, action: Action, received: set[tuple[int, int, bool]]) -> Op:
        """Forward, backward or one of its halves."""
        kind, stage, _, microbatch, _ = action
        first, stop = self.rows(stage, microbatch, worker)
        is_forward = kind is Kind.FORWARD
        waits = kind is not Kind.BACKWARD_WEIGHT and (stage, microbatch, is_forward) in received
        slot = self.slot(worker, action, is_forward) if waits else -1
        seconds = self.compute_s(kind, stage, stop - first, self.speeds[worker])
        loads = microbatch if is_forward and stage == 0 else -1
        return Op(COMPUTES, action.batch, seconds, slot, -1, 0.0, action, (), stop - first, loads)

    def at_receiver(self, worker: int, action: Action) -> Action:
        """A receipt with the stage that will use it: schedules name the stage that made what is received."""
        step = 1 if action.kind is Kind.RECEIVE_FORWARD else -1
        workers, user = self.plan.workers, action.stage + step
        if action.peer in workers[action.stage] and 0 <= user < len(workers) and worker in workers[user]:
            return action._replace(stage=user)
        return action

    def rows(self, stage: int, microbatch: int, worker: int) -> tuple[int, int]:
        """The rows of a microbatch that a worker handles in a stage."""
        found = self._rows.get((stage, microbatch))
        if found is None:
            workers = self.plan.workers[stage]
            shares = self.plan.shares(stage, microbatch)
            found = {workers[replica]: (start, stop) for replica, start, stop in shares}
            self._rows[stage, microbatch] = found
        if worker not in found:
            raise SimulationError(
                f"worker {worker} has no rows of microbatch {microbatch} in stage {stage}",
                "make the schedule from the plan that it carries",
            )
        return found[worker]

    def compute_s(self, kind: Kind, stage: int, rows: int, speed: float) -> float:
        """Seconds of F, B, I or W."""
        key = (kind._value_, stage, rows, speed)
        found = self._seconds.get(key)
        if found is None:
            first, last = self.bounds[stage]
            found = self._fresh_s(kind, first, last, rows, speed, self.plan.stages[stage].recompute)
            self._seconds[key] = found
        return found

    def _fresh_s(self, kind: Kind, first: int, last: int, rows: int, speed: float, recompute: bool) -> float:
        if kind is Kind.FORWARD:
            return self.costs.forward_s(first, last, rows, speed)
        whole = self.costs.backward_s(first, last, rows, speed, recompute=recompute)
        weight = self.costs.weight_gradient_s(first, last, rows, speed)
        return {Kind.BACKWARD: whole, Kind.BACKWARD_INPUT: whole - weight, Kind.BACKWARD_WEIGHT: weight}[kind]

    def update_s(self, stage: int, speed: float) -> float:
        """Seconds of U."""
        return self.costs.optimizer_s(*self.bounds[stage], speed, versions=self.plan.versions[stage])

    def slot(self, worker: int, action: Action, forward: bool) -> int:
        """The number of what a forward or backward waits for."""
        key = (worker, action.stage, action.microbatch, forward)
        return self.slots.setdefault(key, len(self.slots))

    def channel(self, source: int, target: int, forward: bool) -> int:
        """The number of the channel, made at first use."""
        key = (source, target, forward)
        found = self.channel_numbers.get(key)
        if found is None:
            ends, wires = (self.plan.devices[source], self.plan.devices[target]), self.costs.wires
            loads = tuple((link, 1) for link in wires.path(*ends))
            found = self.channel_numbers[key] = len(self.channels)
            self.channels.append(Channel(source, target, forward, loads, wires.rate(*ends), wires.latency_s(*ends)))
        return found

    def message_bytes(self, worker: int, action: Action, after: bool) -> float:
        """Bytes of the rows that both ends of a transfer handle, over the boundary after the stage or before it."""
        other = action.stage + (1 if after else -1)
        mine = self.rows(action.stage, action.microbatch, worker)
        theirs = self.rows(other, action.microbatch, action.peer)
        if mine == theirs:
            rows = mine[1] - mine[0]
        else:
            rows = max(min(mine[1], theirs[1]) - max(mine[0], theirs[0]), 0)
        return rows * self.costs.crossings[self.bounds[action.stage][1 if after else 0]]

    def reduction(self, stage: int) -> Reduction:
        """How a stage's gradients are reduced."""
        devices, buckets = self.plan.stages[stage].devices, self.plan.stages[stage].num_buckets
        num_bytes = self.costs.parameter_bytes(*self.bounds[stage]) / buckets
        return Reduction(len(devices), buckets, num_bytes, self.costs.wires.collective(devices, num_bytes))

    def last_backwards(self, worker: int, order: Sequence[Action]) -> Iterator[tuple[int, tuple[float, ...]]]:
        """The backwards after which a stage's gradients of a batch are whole, with the buckets' shares of each."""
        stages = {action.stage for action in order if action.kind is Kind.REDUCE}
        kinds = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        for stage in stages:
            places = [(-a.batch, index) for index, a in enumerate(order) if a.stage == stage and a.kind in kinds]
            if places:
                # In the loop, an action of an earlier batch comes in a later turn: the last one has the lowest offset.
                _, index = max(places)
                first, last = self.bounds[stage]
                rows = self.rows(stage, order[index].microbatch, worker)
                shares = self.costs.ready_shares(first, last, rows[1] - rows[0], self.plan.stages[stage].num_buckets)
                yield index, shares

    def agree_s(self) -> float:
        """An agreement of all workers: an all-reduce of next to nothing."""
        if not self.schedule.agree:
            return 0.0
        way = self.costs.wires.collective(self.plan.devices, 0.0)
        return 0.0 if way is None else way.latency_s
