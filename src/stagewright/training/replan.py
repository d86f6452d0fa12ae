"""A plan for what is left when devices are lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from stagewright.cluster import DeviceId, format_placement
from stagewright.errors import PlanError
from stagewright.plan import Plan, Stage


def plan_without(plan: Plan, lost: Collection[DeviceId]) -> Plan:
    """The plan with the same layers a stage, on the devices that are left.

    A stage that has lost all of its devices gets one of the stage that has most of them; where there are fewer devices
    than stages, the stages at the end become one.

        7-1 without 0:3    →  6-1        7-1 without 0:7    →  6-1        1-1 without either    →  1
    """
    left = [tuple(id for id in stage.devices if id not in lost) for stage in plan.stages]
    alive = {id for devices in left for id in devices}
    if not alive:
        raise PlanError(f"all devices of {plan.placement} are lost", "start again when some are back")
    stages = list(plan.stages)
    while len(stages) > len(alive):
        stages[-2:] = [_merged(stages[-2], stages[-1])]
        left[-2:] = [tuple(dict.fromkeys((*left[-2], *left[-1])))]
    for number in range(len(stages)):
        if not left[number]:
            _take_one(left, number)
    made = tuple(replace(stage, devices=devices, row_weights=None) for stage, devices in zip(stages, left))
    return replace(plan, stages=made, notes=(f"made when {format_placement([tuple(sorted(lost))])} was lost",))


def plan_without_hosts(plan: Plan, lost: Collection[int]) -> Plan:
    """The plan without all devices of some hosts; the others move up in number."""
    after = plan_without(plan, {id for id in plan.devices if id.host in lost})
    hosts = sorted({id.host for id in plan.devices} - set(lost))
    number = {host: place for place, host in enumerate(hosts)}
    return replace(
        after,
        stages=tuple(
            replace(stage, devices=tuple(DeviceId(number[id.host], id.device) for id in stage.devices))
            for stage in after.stages
        ),
    )


def _merged(one: Stage, other: Stage) -> Stage:
    """Two neighbouring stages as one, with as many versions as the first."""
    return replace(one, layers=(*one.layers, *other.layers), recompute=one.recompute or other.recompute)


def _take_one(left: list[tuple[DeviceId, ...]], stage: int) -> None:
    """Gives a stage the last device of the stage that has most."""
    richest = max(range(len(left)), key=lambda number: len(left[number]))
    *kept, given = left[richest]
    left[stage] = (given,)
    if kept:
        left[richest] = tuple(kept)


def describe_change(before: Plan, after: Plan) -> str:
    """What is different, in a line."""
    return (
        f"going on as {_shape(after.replicas)} instead of {_shape(before.replicas)}: "
        f"{after.placement} instead of {before.placement}"
    )


def _shape(replicas: Sequence[int]) -> str:
    """Replicas of the stages in short: 7-1."""
    return "-".join(map(str, replicas))
