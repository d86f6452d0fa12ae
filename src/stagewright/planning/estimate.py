"""The step time of a plan in closed form: the cost that the searches minimise, before a simulator has the last word.

Stages are looked at from the last to the first, because what a stage holds depends on the stages after it. With
f, b for one microbatch, n of them a replica, x for a boundary, and g + u for reduction and update after backward:

    pass = Σ (f + b) + Σ 2 x                     one microbatch through all stages and back
    rest = max((n − 1)(f + b), x of the batch − x)    the other microbatches, at the pace of the slowest
    flush      step = pass + rest + tail,        tail = max over stages of g + u − what earlier stages still run
    no flush   step = max over stages of n (f + b) + u, the reduction, x of the batch, and (pass + rest + g + u) / K
    cores      step ≥ Σ over stages of (n (f + b) + u) · the share of the cores it keeps busy, where hosts share them

Fill and drain as in Huang et al., "GPipe", 2019, section 2.3; K batches under way as in PipeDream-2BW, 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagewright.cluster import DeviceId
from stagewright.cost import Costs, num_buckets
from stagewright.plan import Plan
from stagewright.planning.groups import Group, Setting, Shared, make_group
from stagewright.policy import held_before, holds


class Part(NamedTuple):
    """One stage's seconds; forward and backward are of one microbatch, the others of the batch."""

    forward_s: float
    backward_s: float
    busy_s: float
    reduce_s: float
    exposed_s: float
    """What of the reduction is left when the last backward is over."""
    update_s: float
    versions: int
    recompute: bool
    peak_bytes: int
    """On the device that is fullest against its memory."""
    work_s: float
    """For how long it keeps all cores of the machine busy, where hosts share them."""


class Crossing(NamedTuple):
    """One boundary's seconds, in one direction: of a microbatch, and of the whole batch."""

    one_s: float
    all_s: float


class Label(NamedTuple):
    """The stages from one on to the last; less in every field is never worse."""

    pass_s: float
    rest_s: float
    tail_s: float
    bound_s: float
    work_s: float = 0.0


class Shortage(NamedTuple):
    """A stage that does not fit, and where."""

    first: int
    last: int
    device: DeviceId
    need_bytes: int
    has_bytes: int


class Estimator:
    """Seconds and bytes of stages under one setting, each worked out once."""

    def __init__(self, costs: Costs, setting: Setting, shared: Shared | None = None) -> None:
        self.costs, self.setting = costs, setting
        self.shared = shared or Shared(costs)
        self.twins = self.shared.twins
        self.shortage: Shortage | None = None
        """The stage that came closest to fitting of those that did not."""
        self._parts: dict[tuple[int, int, tuple[DeviceId, ...], int, int], Part | None] = {}
        self._alike: dict[tuple[int, int, tuple[DeviceId, ...], int, int], Part | None] = {}
        """The same by looks, held microbatches and versions: all that a part depends on."""
        self._groups: dict[tuple[DeviceId, ...], Group] = {}
        self._flushed: dict[int, bool] = {}
        self._wires: dict[tuple[tuple[DeviceId, ...], tuple[DeviceId, ...]], tuple[float, float, float]] = {}

    # one stage

    def part(
        self, first: int, last: int, devices: tuple[DeviceId, ...], later: int, later_replicas: int
    ) -> Part | None:
        """A stage with its default buckets and row weights, recomputing where it must; None where it does not fit."""
        key = (first, last, devices, later, later_replicas)
        if key not in self._parts:
            self._parts[key] = self._like_its_twins(*key)
        return self._parts[key]

    def _like_its_twins(
        self, first: int, last: int, devices: tuple[DeviceId, ...], later: int, later_replicas: int
    ) -> Part | None:
        versions = self.setting.versions(later)
        if versions is None:
            return None
        held = held_before(self.setting, len(devices), later, later_replicas, self.setting.reach(later))
        if self.setting.hold is not None and held > self.setting.hold:
            return None
        key = (first, last, self.twins.looks(devices), held, versions)
        if key not in self._alike:
            self._alike[key] = self._fitting(first, last, devices, held, versions)
        return self._alike[key]

    def _fitting(self, first: int, last: int, devices: tuple[DeviceId, ...], held: int, versions: int) -> Part | None:
        wish = self.setting.recompute
        for recompute in (False, True) if wish is None else (wish,):
            peak, short = self.fullest(first, last, devices, held, versions, recompute)
            if short is None:
                return self.timed(first, last, devices, versions, recompute, peak)
            if self.shortage is None or short.need_bytes / short.has_bytes < _ratio(self.shortage):
                self.shortage = short
        return None

    def fullest(
        self, first: int, last: int, devices: tuple[DeviceId, ...], held: int, versions: int, recompute: bool
    ) -> tuple[int, Shortage | None]:
        """The bytes on the device that is fullest against its memory, and whether they are too many."""
        worst = (0.0, 0, devices[0], 1)
        for rows, id, device, _ in self.group(devices).kinds:
            need = self.costs.stage_bytes(
                first,
                last,
                rows=rows,
                held=held,
                versions=versions,
                num_replicas=len(devices),
                recompute=recompute,
                device=device,
            ).total
            if need / device.memory_bytes > worst[0]:
                worst = (need / device.memory_bytes, need, id, device.memory_bytes)
        share, need, id, has = worst
        return need, Shortage(first, last, id, need, has) if share > 1 else None

    def timed(
        self,
        first: int,
        last: int,
        devices: tuple[DeviceId, ...],
        versions: int,
        recompute: bool,
        peak_bytes: int,
        buckets: int | None = None,
    ) -> Part:
        """The seconds of a stage."""
        group = self.group(devices)
        forward = backward = 0.0
        for rows, _, _, speed in group.kinds:
            forward = max(forward, self.costs.forward_s(first, last, rows, speed))
            own = self.costs.backward_s(first, last, rows, speed, recompute=recompute, handled=group.handled)
            backward = max(backward, own)
        reduce_s = self.reduce_s(first, last, devices, buckets)
        busy_s = group.handled.microbatches * (forward + backward)
        update_s = self.costs.optimizer_s(first, last, group.slowest, versions=versions)
        return Part(
            forward_s=forward,
            backward_s=backward,
            busy_s=busy_s,
            reduce_s=reduce_s,
            exposed_s=self.exposed_s(first, last, reduce_s, backward, group, buckets),
            update_s=update_s,
            versions=versions,
            recompute=recompute,
            peak_bytes=peak_bytes,
            work_s=group.core_share * (busy_s + update_s),
        )

    def group(self, devices: tuple[DeviceId, ...], weights: tuple[float, ...] | None = None) -> Group:
        """How a microbatch falls on some devices; weights, once given, stay."""
        found = self._groups.get(devices) if weights is None else None
        if found is None:
            found = self._groups[devices] = make_group(self.costs, self.setting, devices, weights)
        return found

    def reduce_s(self, first: int, last: int, devices: tuple[DeviceId, ...], buckets: int | None = None) -> float:
        """The stage's all-reduce, alone on the wires; devices that are wired alike stand for one another."""
        if len(devices) < 2:
            return 0.0
        size = self.costs.parameter_bytes(first, last)
        alike = self.twins.lowest(devices)
        return self.shared.reduce_s(size, alike, buckets or num_buckets(size))

    def exposed_s(
        self, first: int, last: int, reduce_s: float, backward_s: float, group: Group, buckets: int | None
    ) -> float:
        """What of the reduction outlasts the last backward: buckets go one after the other, each once it is complete.

        backward  ├──────────────────┤
        buckets       ├─0─┤  ├─1─┤   ├─2─┤     the part after backward's end is exposed
        """
        if reduce_s <= 0:
            return 0.0
        count = buckets or num_buckets(self.costs.parameter_bytes(first, last))
        now, bucket_s = 0.0, reduce_s / count
        for share in self.costs.ready_shares(first, last, group.kinds[0].rows, count):
            now = max(now, share * backward_s) + bucket_s
        return max(0.0, now - backward_s)

    # boundaries

    def crossing(self, cut: int, sources: tuple[DeviceId, ...], targets: tuple[DeviceId, ...]) -> Crossing:
        """What crosses the cut before a layer, from the replicas of one stage to those of the next."""
        key = (sources, targets)
        if key not in self._wires:
            self._wires[key] = self._rates(sources, targets)
        latency, one, every = self._wires[key]
        row_bytes = self.costs.crossings[cut]
        rows, batch = self.setting.rows, self.setting.batch
        return Crossing(latency + row_bytes * rows * one, latency + row_bytes * batch * every)

    def _rates(self, sources: tuple[DeviceId, ...], targets: tuple[DeviceId, ...]) -> tuple[float, float, float]:
        if self.setting.route == "rotate":
            return self.shared.rotate_rates(sources, targets, self.setting.num_microbatches)
        return self.shared.split_rates(sources, targets, self.group(sources), self.group(targets))

    # all stages

    def begin(self, part: Part) -> Label:
        """The label of the last stage alone."""
        return self.extend(Label(0.0, 0.0, 0.0, 0.0), Crossing(0.0, 0.0), part)

    def extend(self, label: Label, crossing: Crossing, part: Part) -> Label:
        """The label with one stage more in front."""
        forward_s, backward_s, busy_s, reduce_s, exposed_s, update_s, versions, _, _, work_s = part
        one_s, all_s = crossing
        own, turn_s = exposed_s + update_s, forward_s + backward_s
        pass_s = turn_s + 2 * one_s + label.pass_s
        rest_s = max(label.rest_s, busy_s - turn_s, all_s - one_s)
        tail_s = max(own, label.tail_s - backward_s - one_s)
        steady = busy_s + update_s + (exposed_s if versions == 1 else 0.0)
        round_s = (pass_s + rest_s + own) / self.depth(versions)
        bound_s = max(label.bound_s, steady, reduce_s, all_s, round_s)
        return Label(pass_s, rest_s, tail_s, bound_s, label.work_s + work_s)

    def depth(self, versions: int) -> int:
        """How many batches may be under way in a stage."""
        hold = self.setting.hold
        return versions if hold is None else max(1, min(versions, hold // self.setting.num_microbatches))

    def total(self, label: Label, num_stages: int) -> float:
        """The step, once all stages are in the label; before that, a bound from below."""
        if num_stages not in self._flushed:
            self._flushed[num_stages] = self.setting.is_flushed(num_stages)
        flushed = label.pass_s + label.rest_s + label.tail_s if self._flushed[num_stages] else 0.0
        return max(label.bound_s, label.work_s, flushed)


def _ratio(shortage: Shortage) -> float:
    return shortage.need_bytes / shortage.has_bytes


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a plan should take, stage by stage."""

    step_s: float
    parts: tuple[Part, ...]
    crossings: tuple[Crossing, ...]
    shortage: Shortage | None
    limit: str


def setting_of(plan: Plan) -> Setting:
    """The setting of a plan."""
    return Setting(
        batch=plan.batch,
        num_microbatches=plan.num_microbatches,
        route=plan.route,
        policy=plan.policy,
        hold=plan.hold,
        staleness=",".join(map(str, plan.versions)),
    )


def estimate(plan: Plan, costs: Costs, shared: Shared | None = None) -> Estimate:
    """The plan's step time, and whether it fits: the same figures that the searches add up."""
    estimator = Estimator(costs, setting_of(plan), shared)
    edges, held = stage_edges(plan, costs), holds(plan)
    parts: list[Part] = []
    crossings: list[Crossing] = []
    shortage: Shortage | None = None
    label: Label | None = None
    for stage in plan.stages:
        estimator.group(stage.devices, stage.row_weights or (1.0,) * len(stage.devices))
    for number in reversed(range(len(plan.stages))):
        stage, first, last = plan.stages[number], edges[number], edges[number + 1]
        peak, short = estimator.fullest(first, last, stage.devices, held[number], stage.versions, stage.recompute)
        shortage = short or shortage
        part = estimator.timed(first, last, stage.devices, stage.versions, stage.recompute, peak, stage.num_buckets)
        if label is None:
            label = estimator.begin(part)
        else:
            crossings.append(estimator.crossing(last, stage.devices, plan.stages[number + 1].devices))
            label = estimator.extend(label, crossings[-1], part)
        parts.append(part)
    assert label is not None
    step_s = estimator.total(label, len(parts))
    ordered, between = tuple(parts[::-1]), tuple(crossings[::-1])
    limit = name_limit(plan, costs, ordered, between, step_s)
    return Estimate(step_s=step_s, parts=ordered, crossings=between, shortage=shortage, limit=limit)


def stage_edges(plan: Plan, costs: Costs) -> tuple[int, ...]:
    """Where each stage begins in the profile, and where the last one ends."""
    edges = [0]
    for stage in plan.stages:
        edges.append(edges[-1] + len(stage.layers))
    return tuple(edges)


def name_limit(plan: Plan, costs: Costs, parts: Sequence[Part], crossings: Sequence[Crossing], step_s: float) -> str:
    """What takes most of the step: a stage's compute, a reduction, a transfer, or waiting."""
    found: list[tuple[float, int, str]] = []
    edges = stage_edges(plan, costs)
    for number, part in enumerate(parts):
        found.append((part.busy_s, -number, f"compute of stage {number}"))
        shown = part.exposed_s if part.versions == 1 else part.reduce_s
        if shown > 0:
            found.append((shown, -number, _reduction(costs, edges[number], edges[number + 1], part)))
    for number, crossing in enumerate(crossings):
        found.append((crossing.all_s, -number, f"transfer {number} → {number + 1}"))
    most, _, text = max(found)
    waiting = step_s - max(part.busy_s for part in parts)
    return text if most >= waiting / 2 else "waiting for the pipeline to fill and drain"


def _reduction(costs: Costs, first: int, last: int, part: Part) -> str:
    heaviest = max(costs.profile.layers[first:last], key=lambda layer: layer.parameter_bytes)
    shown = f"{part.exposed_s * 1e3:,.0f} ms exposed" if part.versions == 1 else f"{part.reduce_s * 1e3:,.0f} ms"
    return f"all-reduce of {heaviest.name} ({heaviest.parameter_bytes / 2**20:,.0f} MiB; {shown})"
