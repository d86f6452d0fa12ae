"""One form for plans that do the same: fields without effect have one value, so that equal plans compare as equal."""

from __future__ import annotations

from dataclasses import replace

from stagewright.plan import Plan, Stage


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
