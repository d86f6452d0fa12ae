"""A plan that is fixed in every part: nothing is searched."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.cluster import Cluster, DeviceId, parse_placement
from stagewright.cost import num_buckets
from stagewright.errors import PlanError, UsageError
from stagewright.plan import DEFAULT_POLICY, Plan, Stage, parse_staleness
from stagewright.planning.normal import normal_form
from stagewright.planning.options import PlanOptions
from stagewright.planning.ratio import LayerTable, cut_by_names, cut_by_ratio, table_of
from stagewright.profile import Profile


def fixed_plan(
    layers: LayerTable | Profile, options: PlanOptions, cluster: Cluster | None = None, notes: Sequence[str] = ()
) -> Plan:
    """The plan that the options describe; without a placement, data parallelism over the whole cluster."""
    table = table_of(layers) if isinstance(layers, Profile) else layers
    groups = parse_placement(options.placement or "", cluster)
    cuts = _choose_cuts(table, groups, options, cluster)
    return _assemble(table, cuts, groups, options, cluster, notes)


def _choose_cuts(
    table: LayerTable, groups: Sequence[Sequence[DeviceId]], options: PlanOptions, cluster: Cluster | None
) -> tuple[int, ...]:
    """Where the stages begin: at the named layers, by the ratio, or else in proportion to the stages' devices."""
    if options.cut:
        cuts = cut_by_names(table.names, options.cut)
        if len(cuts) + 1 != len(groups):
            raise UsageError(
                f"--cut names {len(cuts) + 1} stages, but the placement has {len(groups)}",
                "give one layer for each stage after the first",
            )
        return cuts
    shares = options.shares or tuple(sum(_speed_of(id, cluster) for id in group) for group in groups)
    if len(shares) != len(groups):
        raise UsageError(
            f"--ratio {options.ratio} names {len(shares)} stages, but the placement has {len(groups)}",
            "give as many shares as stages, such as --placement 0:0-6.0:7 --ratio 11:7",
        )
    return cut_by_ratio(table.costs(options.ratio_of), shares) if len(groups) > 1 else ()


def _assemble(
    table: LayerTable,
    cuts: Sequence[int],
    groups: Sequence[Sequence[DeviceId]],
    options: PlanOptions,
    cluster: Cluster | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """The plan with these cuts on these devices; options left at None take their defaults."""
    edges = (0, *cuts, len(table.names))
    versions = parse_staleness(options.staleness or "0", len(groups))
    stages = []
    for number, (first, last) in enumerate(zip(edges, edges[1:])):
        devices = tuple(groups[number])
        stages.append(
            Stage(
                layers=table.names[first:last],
                devices=devices,
                versions=versions[number],
                recompute=bool(options.recompute),
                num_buckets=options.num_buckets or num_buckets(sum(table.parameter_bytes[first:last])),
                row_weights=row_weights(devices, cluster),
            )
        )
    rows = options.rows(len(groups[0]))
    microbatches = options.num_microbatches or 1
    if microbatches > rows:
        raise PlanError(f"--microbatches is {microbatches}, but the batch has {rows} rows", "use fewer microbatches")
    plan = Plan(
        model=table.model,
        stages=tuple(stages),
        batch=rows,
        num_microbatches=microbatches,
        route=options.route or "split",
        policy=options.policy or DEFAULT_POLICY,
        hold=options.hold,
        notes=tuple(notes),
    )
    return normal_form(plan)


def _speed_of(id: DeviceId, cluster: Cluster | None) -> float:
    """How fast a device is, 1 where no cluster says so."""
    return 1.0 if cluster is None else cluster.device(id).speed


def row_weights(devices: Sequence[DeviceId], cluster: Cluster | None) -> tuple[float, ...] | None:
    """Rows in proportion to speed, where the devices of a stage differ."""
    speeds = tuple(_speed_of(id, cluster) for id in devices)
    return None if len(set(speeds)) == 1 else speeds
