"""Plan → schedule, in three passes: orders (as ideal times) → lowering → check.

    make_schedule(plan, policy="1f1b", staleness="ssp", …) → Schedule     `.plan` carries what was overridden
    check_schedule(schedule)                                             raises a ScheduleError, or all is well

The files, in the order of the passes: orders (when everyone computes), lower, check. ideal carries a schedule out for
check and drawing (over time, SVG, CSV, plans without a model); windows cuts an order for those who run it dynamically.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stagewright.errors import PlanError, ScheduleError
from stagewright.plan import POLICIES, ROUTES, Plan, Policy, Route, parse_staleness
from stagewright.policy import holds
from stagewright.schedule import Schedule
from stagewright.scheduling.check import check_batches, check_schedule
from stagewright.scheduling.lower import lower
from stagewright.scheduling.orders import make_timing

__all__ = ["check_schedule", "make_schedule"]


def make_schedule(
    plan: Plan,
    *,
    num_microbatches: int | None = None,
    policy: Policy | None = None,
    route: Route | None = None,
    staleness: str | None = None,
    versions: tuple[int, ...] | None = None,
    hold: int | None = None,
    agree: bool = False,
    num_batches: int | None = None,
) -> Schedule:
    """The orders of all workers; what is given here replaces what the plan says."""
    if staleness is not None and versions is not None:
        raise ScheduleError(f"staleness {staleness!r} and versions {versions} were both given: give one")
    given = {"num_microbatches": num_microbatches, "policy": policy, "route": route, "hold": hold}
    try:
        plan = _overridden(plan, given, versions, staleness)
    except PlanError as fault:
        raise ScheduleError(fault.what, fault.todo) from None
    if num_batches is not None:
        check_batches(plan, num_batches)
    _check_hold(plan)
    return Schedule(plan=plan, orders=lower(plan, make_timing(plan, agree), agree), agree=agree)


def _overridden(
    plan: Plan, given: Mapping[str, object], versions: tuple[int, ...] | None, staleness: str | None
) -> Plan:
    """The plan with what is given here in place of what it says."""
    for key, known in (("policy", POLICIES), ("route", ROUTES)):
        if given[key] is not None and given[key] not in known:
            raise ScheduleError(f"{key} {given[key]!r} is unknown", f"use one of {', '.join(known)}")
    if staleness is not None:
        versions = parse_staleness(staleness, len(plan.stages))
    stages = plan.stages
    if versions is not None:
        if len(versions) != len(stages) or min(versions) < 1:
            raise ScheduleError(
                f"versions {versions}: expected {len(stages)} numbers from 1 on, one a stage of {plan.placement}"
            )
        stages = tuple(replace(stage, versions=count) for stage, count in zip(stages, versions))
    return replace(plan, stages=stages, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]


def _check_hold(plan: Plan) -> None:
    """Refuses a bound on held microbatches that the policy cannot keep: one that runs all forwards first."""
    found = holds(plan)
    if plan.hold is not None and max(found) > plan.hold:
        stage = found.index(max(found))
        raise ScheduleError(
            f"hold {plan.hold} cannot work: under {plan.policy} stage {stage} runs all of its {found[stage]} forwards "
            "first",
            f"use hold {found[stage]}, fewer microbatches, or policy 1f1b",
        )
