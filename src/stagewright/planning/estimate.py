"""The step time of a plan in closed form: the cost that the searches minimise, before a simulator has the last word.

Stages are looked at from the last to the first, because what a stage holds depends on the stages after it. With f, i, w
for one microbatch (forward, the part of backward that the stage before waits for, the part that can come later), n of
them a replica of which it holds h at once, x for a boundary, and g + u for reduction and update after backward:

    pass = Σ (f + i) + 2 x                       one microbatch through the later stages and back
    idle = max(pass − (h − 1) f, n / h (f + i + pass) − n (f + i + w), 0)     waiting for it, at first and for each h
    core = the larger of idle + n (f + i), and f + i + 2 x more than the next stage's: the last gradient has left
    end  = the largest over stages of idle + n (f + i + w) + g + u, core + w + g + u, and f + x more than the next one's
    flush      step = end
    no flush   step = max over stages of n (f + i + w) + u, the reduction, x of the batch, and (core + w + g + u) / K
    cores      step ≥ Σ over stages of (n (f + i + w) + u) · the share of the cores it keeps busy, where shared

w is the weights' half of backward where it runs in halves; of it all but the last few microbatches' is done by then
(`_undone`). Fill and drain as in Huang et al., "GPipe", 2019, section 2.3, and Qi et al., "Zero bubble pipeline
parallelism", 2023, table 2; K batches under way as in PipeDream-2BW, 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from stagewright.cluster import Device, DeviceId, Devices
from stagewright.cost import Costs, Handled, handled_by_each
from stagewright.plan import Plan, split_edges
from stagewright.planning.groups import FLUSHED, ClusterRates, Savings, Setting
from stagewright.policy import RULES, holds, outstanding


class _Kind(NamedTuple):
    """So many rows on devices like this one."""

    rows: int
    id: DeviceId
    device: Device
    speed: float
    """While the other devices of its stage compute as well."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """How a microbatch falls on some devices."""

    kinds: tuple[_Kind, ...]
    """The distinct ones, the most rows first; devices without rows are left out."""
    edges: tuple[float, ...]
    """Where the rows are cut, as shares of a microbatch."""
    handled: Handled
    """The microbatches of a batch that one replica handles."""
    evenness: float
    """The rows of an average microbatch over those of the largest."""
    slowest: float
    core_share: float
    """The share of the cores that the devices keep busy, where hosts share any."""


def _make_group(costs: Costs, setting: Setting, devices: Devices, weights: tuple[float, ...] | None = None) -> _Group:
    """The group of some devices; rows go with speed where no weights are given."""
    found = [costs.cluster.device(id) for id in devices]
    weights = weights or tuple([device.speed for device in found])
    rows: list[int] = [setting.rows] * len(devices)
    if setting.route != "rotate":
        cut = split_edges(setting.rows, weights)
        rows = [high - low for low, high in zip(cut, cut[1:])]
    kinds: dict[tuple[int, Device], DeviceId] = {}
    for count, id, device in zip(rows, devices, found):
        if count:
            kinds.setdefault((count, device), id)
    ordered = sorted(kinds.items(), key=lambda kind: (-kind[0][0], kind[1]))
    return _Group(
        kinds=tuple(_Kind(count, id, device, costs.speed(id, devices)) for (count, device), id in ordered),
        edges=tuple([passed / sum(weights) for passed in accumulate(weights, initial=0)]),
        handled=handled_by_each(setting.policy, setting.route, setting.num_microbatches, len(devices)),
        evenness=setting.batch / (setting.num_microbatches * setting.rows),
        slowest=min(device.speed for device in found), core_share=costs.network.cores.share(devices),
    )  # fmt: skip


class _Part(NamedTuple):
    """One stage's seconds; the first four are of one microbatch, the others of the batch."""

    forward_s: float
    backward_s: float
    """Until the gradient of its input has left."""
    late_s: float
    """The weights' half of backward, where it runs in halves."""
    drain_s: float
    """What a later stage's last gradient has still to wait for here, before it goes on to the stage before."""
    done_s: float
    """Compute until the last gradient has left: some of the weights' halves come later."""
    busy_s: float
    reduce_s: float
    exposed_s: float
    """What of the reduction is left when the last backward is over."""
    update_s: float
    """With the products of linear layers that wait for the batch's last gradient."""
    microbatches: int
    """How many of a batch a replica handles."""
    waiting: int
    """How many of its microbatches at once may wait for their gradients."""
    lanes: int
    """How many microbatches its replicas work on at a time."""
    versions: int
    savings: Savings
    peak_bytes: int
    """On the device that is fullest against its memory."""
    work_s: float
    """For how long it keeps all cores of the machine busy, where hosts share them."""


class _Crossing(NamedTuple):
    """One boundary's seconds, in one direction: of a microbatch, and of the whole batch."""

    one_s: float
    all_s: float


class Label(NamedTuple):
    """The stages from one on to the last; less in every field is never worse."""

    pass_s: float = 0.0
    core_s: float = 0.0
    end_s: float = 0.0
    bound_s: float = 0.0
    work_s: float = 0.0
    front_s: float = 0.0
    """One microbatch through the first of these stages and back."""
    front_waiting: int = 0
    """How many microbatches may wait for gradients there, if it works on one at a time."""


class Shortage(NamedTuple):
    """A stage on the device that it fills most; does not fit where it needs more than there is."""

    first: int
    last: int
    device: DeviceId
    need_bytes: int
    has_bytes: int
    how: Mapping[str, Any]
    """What `stage_bytes` was told."""

    @property
    def ratio(self) -> float:
        """How many times the device would have to have its memory."""
        return self.need_bytes / self.has_bytes


class Estimator:
    """Seconds and bytes of stages under one setting, each worked out once."""

    def __init__(self, costs: Costs, setting: Setting, shared: ClusterRates | None = None) -> None:
        self.costs, self.setting, self.rule = costs, setting, RULES[setting.policy]
        self.shared = shared or ClusterRates(costs)
        self.is_flushed = setting.staleness == FLUSHED
        self.waits = costs.system.reduction_overlaps != "next-batch"
        self._alike: dict[tuple[int, int, Devices, int, int], _Part | None] = {}
        """By looks, held microbatches and versions: all that a part depends on."""
        self._groups: dict[Devices, _Group] = {}
        self.part, self._wires, self._ends_flushed = cache(self._part), cache(self._rates), cache(setting.is_flushed)

    # one stage

    def _part(self, first: int, last: int, devices: Devices, later: int, later_replicas: int) -> _Part | None:
        """A stage with its default buckets and row weights, recomputing where it must; None where it does not fit."""
        setting, versions = self.setting, self.setting.versions(later)
        if versions is None:
            return None
        held = setting.held(later, len(devices), later_replicas)
        if setting.hold is not None and held > setting.hold:
            return None
        key = (first, last, self.shared.looks(devices), held, versions)
        if key not in self._alike:
            self._alike[key] = self._fitting(first, last, devices, held, versions)
        return self._alike[key]

    def _fitting(self, first: int, last: int, devices: Devices, held: int, versions: int) -> _Part | None:
        for savings in self.savings(devices):
            use = self.use(first, last, devices, held, versions, savings)
            if use.ratio <= 1:
                return self.timed(first, last, devices, held, versions, savings, use.need_bytes)
        return None

    def savings(self, devices: Devices) -> Iterator[Savings]:
        """What a stage on some devices may do without, the cheapest first."""
        setting = self.setting
        return Savings.to_try(setting.recompute, setting.shard_optimizer if len(devices) > 1 else False)

    def use(self, first: int, last: int, devices: Devices, held: int, versions: int, savings: Savings) -> Shortage:
        """The bytes on the device that is fullest against its memory."""
        uses = [Shortage(first, last, devices[0], 0, 1, {})]
        for rows, id, device, _ in self.group(devices).kinds:
            how: dict[str, Any] = {
                "rows": rows, "held": held, "versions": versions, "num_replicas": len(devices),
                "recompute": savings.recompute, "sharded": savings.shard_optimizer and len(devices) > 1,
                "microbatches": self.group(devices).handled.microbatches, "device": device,
            }  # fmt: skip
            need = self.costs.on(device).stage_bytes(first, last, **how)
            uses.append(Shortage(first, last, id, need.total, device.memory_bytes, how))
        return max(uses, key=lambda use: use.ratio)

    def timed(
        self, first: int, last: int, devices: Devices, waiting: int, versions: int, savings: Savings, peak_bytes: int,
        buckets: int | None = None,
    ) -> _Part:  # fmt: skip
        """The seconds of a stage."""
        group, costs = self.group(devices), self.costs
        count = group.handled.microbatches
        forward = backward = late = kept = 0.0
        for rows, _, device, speed in group.kinds:
            rows_s = costs.on(device).seconds(
                first, last, rows * group.evenness, speed, recompute=savings.recompute, handled=group.handled
            )
            forward, backward = max(forward, rows_s.forward), max(backward, rows_s.backward)
            if self.rule.halves:
                late = max(late, rows_s.weight)
            elif len(devices) == 1:
                kept = rows_s.kept
        backward = max(backward - late - kept, 0.0)
        buckets = costs.num_buckets(first, last, buckets) if len(devices) > 1 else 1
        reduce_s = self.reduce_s(first, last, devices, buckets)
        busy_s = count * (forward + backward + late)
        sharers = len(devices) if savings.shard_optimizer else 1
        update_s = costs.optimizer_s(first, last, group.slowest, versions=versions, sharers=sharers, buckets=buckets)
        return _Part(
            forward_s=forward, backward_s=backward, late_s=late,
            drain_s=max(backward - late, 0.0) if late and first else backward,
            done_s=busy_s - late * min(count, 2 if first else 1), busy_s=busy_s, reduce_s=reduce_s,
            exposed_s=self.exposed_s(first, last, reduce_s, backward + late, group, buckets),
            update_s=update_s + count * kept, microbatches=count, waiting=max(waiting, 1),
            lanes=len(devices) if self.setting.route == "rotate" else 1, versions=versions, savings=savings,
            peak_bytes=peak_bytes, work_s=group.core_share * (busy_s + update_s + count * kept),
        )  # fmt: skip

    def group(self, devices: Devices, weights: tuple[float, ...] | None = None) -> _Group:
        """How a microbatch falls on some devices; weights, once given, stay."""
        found = self._groups.get(devices) if weights is None else None
        if found is None:
            found = self._groups[devices] = _make_group(self.costs, self.setting, devices, weights)
        return found

    def reduce_s(self, first: int, last: int, devices: Devices, buckets: int) -> float:
        """The stage's all-reduce, alone on the wires; devices that are wired alike stand for one another."""
        if len(devices) < 2:
            return 0.0
        size = self.costs.gradient_bytes(first, last)
        return self.shared.reduce_s(size, self.shared.lowest(devices), buckets)

    def exposed_s(self, first: int, last: int, reduce_s: float, backward_s: float, group: _Group, count: int) -> float:
        """What of the reduction outlasts the last backward: buckets go one after the other, each once it is complete.

        backward  ├──────────────────┤
        buckets       ├─0─┤  ├─1─┤   ├─2─┤     the part after backward's end is exposed
        """
        if reduce_s <= 0 or self.costs.system.reduction_overlaps == "nothing":
            return reduce_s
        now, bucket_s = 0.0, reduce_s / count
        for share in self.costs.ready_shares(first, last, group.kinds[0].rows, count):
            now = max(now, share * backward_s) + bucket_s
        return max(0.0, now - backward_s)

    # boundaries

    def crossing(self, cut: int, sources: Devices, targets: Devices) -> _Crossing:
        """What crosses the cut before a layer, from the replicas of one stage to those of the next, if there is one."""
        if not targets:
            return _Crossing(0.0, 0.0)
        latency, one, every = self._wires(sources, targets)
        row_bytes, setting = self.costs.crossings[cut], self.setting
        return _Crossing(latency + row_bytes * setting.rows * one, latency + row_bytes * setting.batch * every)

    def _rates(self, sources: Devices, targets: Devices) -> tuple[float, float, float]:
        if self.setting.route == "rotate":
            return self.shared.rotate_rates(sources, targets, self.setting.num_microbatches)
        return self.shared.split_rates(sources, targets, self.group(sources).edges, self.group(targets).edges)

    # all stages

    def extend(self, label: Label, crossing: _Crossing, part: _Part) -> Label:
        """The label with one stage more in front."""
        forward_s, backward_s, late_s, drain_s, done_s, busy_s, _, exposed_s, update_s, count, waiting, lanes, *_ = part
        one_s, all_s = crossing
        turn_s, round_s = forward_s + backward_s, label.pass_s + 2 * one_s
        idle_s, pass_s = round_s, forward_s + backward_s + round_s
        if not self.rule.all_forwards_first:
            each_s = count / waiting * pass_s - max(busy_s, pass_s)
            idle_s = max(round_s - (waiting - 1) * forward_s, each_s, 0.0)
        core_s = max(label.core_s + forward_s + drain_s + 2 * one_s, idle_s + done_s, turn_s + all_s - one_s)
        left_s = core_s + late_s + exposed_s + update_s
        end_s = max(label.end_s + forward_s + one_s, left_s, idle_s + busy_s + exposed_s + update_s)
        bound_s = (
            0.0 if self.is_flushed else max(label.bound_s, all_s, self._pace_s(label, part, round_s, one_s, left_s))
        )
        return Label(pass_s, core_s, end_s, bound_s, label.work_s + part.work_s, turn_s, waiting if lanes == 1 else 0)

    def _pace_s(self, label: Label, part: _Part, round_s: float, one_s: float, left_s: float) -> float:
        """What a batch takes without a flush in a stage: its compute, its reduction, or a wait for gradients.

        Before backward of one microbatch it runs forward of those that it may hold, and so does the next stage:

            stage 0   F2 B0 F3 B1        K = 2, 2, 2: B0 comes once stage 1 has run F2, which waits for stage 0,
            stage 1      F2 B1 F3 B2     so that a step takes a microbatch through both
        """
        steady_s = part.busy_s + part.update_s + (part.exposed_s if part.versions == 1 or self.waits else 0.0)
        turn_s, count, waiting = part.forward_s + part.backward_s + part.late_s, part.microbatches, part.waiting
        every_s = (count * (turn_s + round_s) + part.update_s) / waiting
        near_s = 0.0
        if label.front_waiting and part.lanes == 1 and not self.rule.by_arrival:
            both_s = count * (turn_s + label.front_s + 2 * one_s) + part.update_s
            near_s = both_s / max(1, waiting - label.front_waiting + 1)
        return max(steady_s, part.reduce_s, every_s, near_s, left_s / self.depth(part.versions))

    def depth(self, versions: int) -> int:
        """How many batches may be under way in a stage."""
        hold = self.setting.hold
        return versions if hold is None else max(1, min(versions, hold // self.setting.num_microbatches))

    def total(self, label: Label, num_stages: int) -> float:
        """The step, once all stages are in the label; before that, a bound from below."""
        return max(label.end_s if self._ends_flushed(num_stages) else label.bound_s, label.work_s)


class _Estimate(NamedTuple):
    """What a plan should take, stage by stage."""

    step_s: float
    parts: Sequence[_Part]
    crossings: Sequence[_Crossing]
    shortage: Shortage | None
    limit: str


def estimate(plan: Plan, costs: Costs, shared: ClusterRates | None = None) -> _Estimate:
    """The plan's step time, and whether it fits: the same figures that the searches add up."""
    estimator, edges = Estimator(costs, Setting.of(plan), shared), plan.edges
    parts, crossings, shortage, label = list[_Part](), list[_Crossing](), None, Label()
    for stage in plan.stages:
        estimator.group(stage.devices, stage.row_weights or (1.0,) * len(stage.devices))
    every = list(zip(plan.stages, edges, edges[1:], holds(plan), outstanding(plan)))
    for later, (stage, first, last, held, waiting) in enumerate(reversed(every)):
        savings = Savings(stage.recompute, stage.shard_optimizer)
        use = estimator.use(first, last, stage.devices, held, stage.versions, savings)
        shortage = use if use.ratio > 1 else shortage
        targets = plan.stages[-later].devices if later else ()
        crossings.insert(0, estimator.crossing(last, stage.devices, targets))
        how = (waiting, stage.versions, savings, use.need_bytes, stage.num_buckets)
        parts.insert(0, estimator.timed(first, last, stage.devices, *how))
        label = estimator.extend(label, crossings[0], parts[0])
    step_s = estimator.total(label, len(parts))
    return _Estimate(step_s, parts, crossings, shortage, _name_limit(costs, edges, parts, crossings, step_s))


def with_prediction(plan: Plan, costs: Costs, step_s: float) -> Plan:
    """The plan with how long a step should take, and what each stage does in it."""
    (_, parts, crossings, *_), none = estimate(plan, costs), _Crossing(0.0, 0.0)
    wires = zip((none, *crossings), crossings, parts)
    return replace(
        plan, predicted_step_s=step_s, predicted_on=costs.cluster.name,
        predicted_compute_s=tuple(part.busy_s for part in parts),
        predicted_send_s=tuple(before.all_s + after.all_s + part.reduce_s for before, after, part in wires),
    )  # fmt: skip


def _name_limit(
    costs: Costs, edges: Sequence[int], parts: Sequence[_Part], crossings: Sequence[_Crossing], step_s: float
) -> str:
    """What takes most of the step: a stage's compute, a reduction, a transfer, or waiting."""
    found = [(part.busy_s, -number, f"compute of stage {number}") for number, part in enumerate(parts)]
    for number, part in enumerate(parts):
        shown = part.exposed_s if part.versions == 1 else part.reduce_s
        if shown > 0:
            layers = costs.profile.layers[edges[number] : edges[number + 1]]
            heaviest = max(layers, key=lambda layer: layer.gradient_bytes)
            size = f"{heaviest.gradient_bytes / 2**20:,.0f} MiB"
            what = f"{shown * 1e3:,.0f} ms{' exposed' if part.versions == 1 else ''}"
            found.append((shown, -number, f"all-reduce of {heaviest.name} ({size}; {what})"))
    for number, crossing in enumerate(crossings[:-1]):
        found.append((crossing.all_s, -number, f"transfer {number} → {number + 1}"))
    most, _, text = max(found)
    waiting = step_s - max(part.busy_s for part in parts)
    return text if most >= waiting / 2 else "waiting for the pipeline to fill and drain"
