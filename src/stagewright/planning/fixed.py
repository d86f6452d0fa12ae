"""Whole plans: from options that fix every part, where nothing is searched, and from what a search found.

A ratio such as `11:7` of time, FLOPs, parameters or layers cuts the layers, or their names do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from stagewright.cluster import Cluster, DeviceId, parse_placement
from stagewright.cost import Costs, layer_seconds, num_buckets
from stagewright.errors import PlanError, UsageError
from stagewright.plan import DEFAULT_POLICY, Plan, Stage, parse_staleness
from stagewright.planning.groups import FLUSHED, Savings, Setting
from stagewright.planning.options import PlanOptions, RatioOf
from stagewright.profile import Profile


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """What cutting needs to know of each layer; a profile gives it, and a model alone gives it without seconds."""

    model: str
    names: tuple[str, ...]
    flops: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    seconds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        columns = (self.flops, self.parameter_bytes, self.names if self.seconds is None else self.seconds)
        if not self.names or {len(column) for column in columns} != {len(self.names)}:
            raise PlanError(f"{self.model}: the table of layers has columns of unequal length, or no layer")

    def costs(self, of: RatioOf) -> tuple[float, ...]:
        """One cost a layer; time without a profile is taken to go with FLOPs."""
        if of == "layers":
            return (1.0,) * len(self.names)
        if of == "params":
            return tuple(float(value) for value in self.parameter_bytes)
        return self.flops if of == "flops" or self.seconds is None else self.seconds


def table_of(profile: Profile, rows: int | None = None) -> LayerTable:
    """The table of a profile, its seconds being forward and backward on so many rows (its largest batch)."""
    rows = rows or profile.batch_sizes[-1]
    return LayerTable(
        model=profile.model,
        names=profile.names,
        flops=tuple(layer.flops for layer in profile.layers),
        parameter_bytes=tuple(layer.parameter_bytes for layer in profile.layers),
        seconds=layer_seconds(profile, rows),
    )


def cut_by_ratio(costs: Sequence[float], shares: Sequence[float]) -> tuple[int, ...]:
    """The layers that begin the second, third … stage, so that the stages' costs come closest to the shares.

    Cut k lies where the cost before it is nearest to its share of the whole, and every stage keeps a layer:

        costs 4 4 2 2 │ 2 4        shares 2 : 1  →  12 : 6, cut at layer 4
    """
    stages, layers = len(shares), len(costs)
    if stages > layers:
        raise PlanError(f"{layers} layers cannot be cut into {stages} stages", "use fewer stages")
    if sum(costs) <= 0:
        raise PlanError("a ratio of costs that are all zero means nothing", "use --ratio-of layers, or --cut NAME")
    passed = [0.0, *accumulate(costs)]
    wanted = [passed[-1] * part / sum(shares) for part in accumulate(shares[:-1])]
    cuts: list[int] = []
    for number, target in enumerate(wanted, start=1):
        first = (cuts[-1] if cuts else 0) + 1
        cuts.append(_nearest(passed, target, first, layers - (stages - number)))
    return tuple(cuts)


def _nearest(passed: Sequence[float], target: float, first: int, last: int) -> int:
    upper = min(max(bisect_left(passed, target), first), last)
    lower = max(upper - 1, first)
    return lower if target - passed[lower] <= passed[upper] - target else upper


def _cut_by_names(names: Sequence[str], starts: Sequence[str]) -> tuple[int, ...]:
    """The layers that begin the second, third … stage, given by name."""
    for name in starts:
        if name not in names:
            close = ", ".join(other for other in names if other.startswith(name[:2])) or ", ".join(names[:12])
            raise UsageError(f"--cut {name}: the model has no such layer", f"layers: {close}")
        if name == names[0]:
            raise UsageError(f"--cut {name}: the first layer begins the first stage anyway", "name a later layer")
    cuts = tuple(names.index(name) for name in starts)
    if list(cuts) != sorted(set(cuts)):
        raise UsageError(f"--cut {','.join(starts)}: expected layers in the model's order, each once")
    return cuts


def given_cuts(
    table: LayerTable, options: PlanOptions, num_groups: int | None, shares: Sequence[float] = ()
) -> tuple[int, ...]:
    """Where the options say that stages begin; where they do not, in proportion to `shares`."""
    wanted = options.shares or shares
    num_stages = len(options.cut) + 1 if options.cut else len(wanted)
    if num_groups is not None and num_stages != num_groups:
        told = f"--cut {','.join(options.cut)}" if options.cut else f"--ratio {options.ratio}"
        raise UsageError(
            f"{told} makes {num_stages} stages, but the placement has {num_groups}",
            "give as many stages to both, such as --placement 0:0-6.0:7 --ratio 11:7, or --cut fc1",
        )
    if options.cut:
        return _cut_by_names(table.names, options.cut)
    return cut_by_ratio(table.costs(options.ratio_of), wanted) if num_stages > 1 else ()


def fixed_plan(
    layers: LayerTable | Profile, options: PlanOptions, cluster: Cluster | None = None, notes: Sequence[str] = ()
) -> Plan:
    """The plan that the options describe; without a placement, data parallelism over the whole cluster."""
    table = table_of(layers) if isinstance(layers, Profile) else layers
    costs = Costs(layers, cluster) if isinstance(layers, Profile) and layers.others and cluster else None
    cluster = cluster if costs is None else costs.cluster
    groups = parse_placement(options.placement or "", cluster)
    speeds = tuple(sum(_speed_of(id, cluster) for id in group) for group in groups)
    cuts = given_cuts(table, options, len(groups), speeds)
    rows, microbatches = options.rows(len(groups[0])), options.num_microbatches or 1
    if microbatches > rows:
        raise PlanError(f"--microbatches is {microbatches}, but the batch has {rows} rows", "use fewer microbatches")
    setting = Setting(
        batch=rows, num_microbatches=microbatches, route=options.route or "split",
        policy=options.policy or DEFAULT_POLICY, hold=options.hold, staleness=options.staleness or FLUSHED,
    )  # fmt: skip
    versions = parse_staleness(setting.staleness, len(groups))
    savings = [Savings(bool(options.recompute), bool(options.shard_optimizer))] * len(groups)
    edges = (0, *cuts, len(table.names))
    plan = whole_plan(table, edges, groups, setting, versions, savings, options.num_buckets, cluster, costs)
    return replace(plan, notes=tuple(notes))


def whole_plan(
    table: LayerTable,
    edges: Sequence[int],
    groups: Sequence[Sequence[DeviceId]],
    setting: Setting,
    versions: Sequence[int],
    savings: Sequence[Savings],
    buckets: int | None = None,
    cluster: Cluster | None = None,
    costs: Costs | None = None,
) -> Plan:
    """The plan with these cuts on these devices, rows in proportion to speed where the devices of a stage differ.

    With `costs` that is each device's speed in the stage's own layers.

    Buckets left at None are as many as the gradients' size asks for.
    """
    stages = tuple(
        Stage(
            layers=table.names[first:last],
            devices=tuple(devices),
            versions=versions[number],
            recompute=savings[number].recompute,
            shard_optimizer=savings[number].shard_optimizer,
            num_buckets=buckets or num_buckets(sum(table.parameter_bytes[first:last])),
            row_weights=tuple(
                _speed_of(id, cluster)
                if costs is None or cluster is None
                else costs.stage_speed(cluster.device(id), first, last)
                for id in devices
            ),
        )
        for number, (first, last, devices) in enumerate(zip(edges, edges[1:], groups))
    )
    plan = Plan(
        model=table.model, stages=stages, batch=setting.batch, num_microbatches=setting.num_microbatches,
        route=setting.route, policy=setting.policy, hold=setting.hold,
    )  # fmt: skip
    return normal_form(plan)


def _speed_of(id: DeviceId, cluster: Cluster | None) -> float:
    return 1.0 if cluster is None else cluster.device(id).speed


def normal_form(plan: Plan) -> Plan:
    """The plan with every field that changes nothing at its default.

    buckets      where a stage has one replica, nothing is reduced, and there is nobody to share states with
    row weights  where they are equal, or whole microbatches go to the replicas in turn
    route        where every stage has one replica, there is one way to go
    """
    route = "split" if max(plan.replicas) == 1 else plan.route
    stages = tuple(
        replace(
            stage,
            num_buckets=stage.num_buckets if len(stage.devices) > 1 else 1,
            shard_optimizer=stage.shard_optimizer and len(stage.devices) > 1,
            row_weights=stage.row_weights if route == "split" and len(set(stage.row_weights or ())) > 1 else None,
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages, route=route)
