"""Plan → schedule, in four passes: routing → orders (and their ideal times) → lowering → check.

    make_schedule(plan, policy="1f1b", staleness="ssp", …) → Schedule     `.plan` carries what was overridden
    check_schedule(schedule)                                             raises a ScheduleError, or all is well

The files, in the order of the passes: routing; orders (by rule) and greedy (by trying); lower; check.
clock is the one interpreter: greedy runs compute with it, ideal (for check and drawing) whole schedules.
windows cuts an order for those who run it dynamically.
Faces: drawing (over time, SVG), torch_csv, sketch (plans without a model).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stagewright.errors import PlanError, ScheduleError
from stagewright.plan import POLICIES, ROUTES, Plan, Policy, Route, parse_staleness
from stagewright.policy import RULES, holds
from stagewright.schedule import Schedule
from stagewright.scheduling.check import check_batches, check_schedule
from stagewright.scheduling.clock import Timing
from stagewright.scheduling.greedy import time_greedily
from stagewright.scheduling.lower import lower
from stagewright.scheduling.orders import steps, time_steps
from stagewright.scheduling.routing import Routes, make_routes

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
    routes = make_routes(plan)
    timing = _make_timing(plan, routes, agree)
    return Schedule(plan=plan, orders=lower(plan, routes, timing, agree), agree=agree)


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


def _make_timing(plan: Plan, routes: Routes, agree: bool) -> Timing:
    """The order of compute, as times: by rule, or by trying where idle time is to be filled.

    Where batches follow each other without a flush there is no idle time to fill, and the rule serves all policies.
    """
    several_stages, rule = len(plan.devices) < sum(plan.replicas), RULES[plan.policy]
    to_fill = rule.halves or (several_stages and not rule.all_forwards_first)
    if to_fill and plan.is_synchronous:
        return time_greedily(plan, routes, agree)
    return time_steps(plan, routes, list(steps(plan, agree)))


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
