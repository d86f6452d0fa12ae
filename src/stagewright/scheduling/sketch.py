"""Plans without a model, to look at schedules: `7,1` is seven replicas of a stage and one of the next."""

from __future__ import annotations

from stagewright.cluster import DeviceId
from stagewright.errors import PlanError, ScheduleError
from stagewright.plan import Plan, Policy, Route, Stage


def parse_replicas(text: str) -> tuple[int, ...]:
    """The replicas of each stage that `7,1` names."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 4 for part in parts):
        raise ScheduleError(f"--replicas {text}: expected a number for each stage, such as 7,1")
    return tuple(int(part) for part in parts)


def sketch_plan(
    replicas: tuple[int, ...],
    *,
    num_microbatches: int = 1,
    batch: int | None = None,
    policy: Policy = "1f1b",
    route: Route = "split",
) -> Plan:
    """A plan with so many replicas a stage, each on a device of its own.

    Without `batch` a microbatch has a row for every replica of the widest stage.
    """
    if not replicas or min(replicas) < 1:
        stage = next((number for number, count in enumerate(replicas) if count < 1), 0)
        raise ScheduleError(
            f"stage {stage} has {replicas[stage] if replicas else 0} replicas: expected at least 1 in every stage"
        )
    first = [sum(replicas[:stage]) for stage in range(len(replicas))]
    placement = [tuple(DeviceId(0, start + number) for number in range(count)) for start, count in zip(first, replicas)]
    return placed_plan(placement, num_microbatches=num_microbatches, batch=batch, policy=policy, route=route)


def placed_plan(
    placement: list[tuple[DeviceId, ...]] | tuple[tuple[DeviceId, ...], ...],
    *,
    num_microbatches: int = 1,
    batch: int | None = None,
    policy: Policy = "1f1b",
    route: Route = "split",
) -> Plan:
    """A plan with a nameless layer on each of the placement's stages."""
    rows = max(1, num_microbatches) * max(map(len, placement)) if batch is None else batch
    stages = tuple(Stage(layers=(f"layer{number}",), devices=devices) for number, devices in enumerate(placement))
    try:
        return Plan(
            model="sketch", stages=stages, batch=rows, num_microbatches=num_microbatches, policy=policy, route=route
        )
    except PlanError as fault:
        raise ScheduleError(fault.what, fault.todo) from None
