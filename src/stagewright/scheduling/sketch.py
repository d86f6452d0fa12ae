"""Plans without a model, to look at schedules: `7,1` is seven replicas of a stage and one of the next."""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.cluster import DeviceId
from stagewright.errors import PlanError, ScheduleError
from stagewright.plan import DEFAULT_POLICY, Plan, Policy, Route, Stage


def parse_replicas(text: str) -> tuple[int, ...]:
    """The replicas of each stage that `7,1` names."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 4 for part in parts):
        raise ScheduleError(f"--replicas {text}: expected a number for each stage, such as 7,1")
    return tuple(int(part) for part in parts)


def sketch_plan(
    stages: Sequence[int | Sequence[DeviceId]],
    *,
    num_microbatches: int = 1,
    batch: int | None = None,
    policy: Policy = DEFAULT_POLICY,
    route: Route = "split",
) -> Plan:
    """A plan with a nameless layer a stage, on the given devices or on so many of its own.

    Without `batch` a microbatch has a row for every replica of the widest stage.
    """
    placement: list[tuple[DeviceId, ...]] = []
    for number, stage in enumerate(stages or (0,)):
        first = sum(map(len, placement))
        devices = [DeviceId(0, first + one) for one in range(stage)] if isinstance(stage, int) else stage
        if not devices:
            raise ScheduleError(f"stage {number} has {stage} replicas: expected at least 1 in every stage")
        placement.append(tuple(devices))
    made = tuple(Stage(layers=(f"layer{number}",), devices=devices) for number, devices in enumerate(placement))
    rows = max(1, num_microbatches) * max(map(len, placement)) if batch is None else batch
    try:
        return Plan(
            model="sketch", stages=made, batch=rows, num_microbatches=num_microbatches, policy=policy, route=route
        )
    except PlanError as fault:
        raise ScheduleError(fault.what, fault.todo) from None
