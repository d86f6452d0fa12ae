"""Whole plans: from options that fix every part, where nothing is searched, and from what a search found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stagewright.cluster import Cluster, DeviceId, parse_placement
from stagewright.cost import num_buckets
from stagewright.errors import PlanError
from stagewright.plan import DEFAULT_POLICY, Plan, Stage, parse_staleness
from stagewright.planning.groups import FLUSHED, Setting
from stagewright.planning.options import PlanOptions
from stagewright.planning.ratio import LayerTable, given_cuts, table_of
from stagewright.profile import Profile


def fixed_plan(
    layers: LayerTable | Profile, options: PlanOptions, cluster: Cluster | None = None, notes: Sequence[str] = ()
) -> Plan:
    """The plan that the options describe; without a placement, data parallelism over the whole cluster."""
    table = table_of(layers) if isinstance(layers, Profile) else layers
    groups = parse_placement(options.placement or "", cluster)
    speeds = tuple(sum(_speed_of(id, cluster) for id in group) for group in groups)
    cuts = given_cuts(table, options, len(groups), speeds)
    rows, microbatches = options.rows(len(groups[0])), options.num_microbatches or 1
    if microbatches > rows:
        raise PlanError(f"--microbatches is {microbatches}, but the batch has {rows} rows", "use fewer microbatches")
    setting = Setting(
        batch=rows,
        num_microbatches=microbatches,
        route=options.route or "split",
        policy=options.policy or DEFAULT_POLICY,
        hold=options.hold,
        staleness=options.staleness or FLUSHED,
    )
    versions, recompute = parse_staleness(setting.staleness, len(groups)), [bool(options.recompute)] * len(groups)
    edges = (0, *cuts, len(table.names))
    plan = whole_plan(table, edges, groups, setting, versions, recompute, options.num_buckets, cluster)
    return replace(plan, notes=tuple(notes))


def whole_plan(
    table: LayerTable,
    edges: Sequence[int],
    groups: Sequence[Sequence[DeviceId]],
    setting: Setting,
    versions: Sequence[int],
    recompute: Sequence[bool],
    buckets: int | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """The plan with these cuts on these devices; buckets left at None are as many as the gradients' size asks for."""
    stages = tuple(
        Stage(
            layers=table.names[first:last],
            devices=tuple(devices),
            versions=versions[number],
            recompute=recompute[number],
            num_buckets=buckets or num_buckets(sum(table.parameter_bytes[first:last])),
            row_weights=_row_weights(devices, cluster),
        )
        for number, (first, last, devices) in enumerate(zip(edges, edges[1:], groups))
    )
    plan = Plan(
        model=table.model,
        stages=stages,
        batch=setting.batch,
        num_microbatches=setting.num_microbatches,
        route=setting.route,
        policy=setting.policy,
        hold=setting.hold,
    )
    return normal_form(plan)


def _speed_of(id: DeviceId, cluster: Cluster | None) -> float:
    """How fast a device is, 1 where no cluster says so."""
    return 1.0 if cluster is None else cluster.device(id).speed


def _row_weights(devices: Sequence[DeviceId], cluster: Cluster | None) -> tuple[float, ...] | None:
    """Rows in proportion to speed, where the devices of a stage differ."""
    speeds = tuple(_speed_of(id, cluster) for id in devices)
    return None if len(set(speeds)) == 1 else speeds


def normal_form(plan: Plan) -> Plan:
    """The plan with every field that changes nothing at its default.

    buckets      where a stage has one replica, nothing is reduced
    row weights  where they are equal, or whole microbatches go to the replicas in turn
    route        where every stage has one replica, there is one way to go
    """
    is_lone = max(plan.replicas) == 1
    route = "split" if is_lone else plan.route
    stages = tuple(_normal_stage(stage, is_split=route == "split") for stage in plan.stages)
    return plan if (stages, route) == (plan.stages, plan.route) else replace(plan, stages=stages, route=route)


def _normal_stage(stage: Stage, *, is_split: bool) -> Stage:
    buckets = stage.num_buckets if len(stage.devices) > 1 else 1
    weights = stage.row_weights if is_split and len(set(stage.row_weights or ())) > 1 else None
    if (buckets, weights) == (stage.num_buckets, stage.row_weights):
        return stage
    return replace(stage, num_buckets=buckets, row_weights=weights)
