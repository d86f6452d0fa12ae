"""Plan → schedule, in four passes: routing → orders (and their ideal times) → lowering → check.

    make_schedule(plan, policy="1f1b", staleness="ssp", …) → Schedule     `.plan` carries what was overridden
    check_schedule(schedule)                                             raises a ScheduleError, or all is well

The files, in the order of the passes: routing; orders, timing (by rule) and greedy (by trying); lower; check, ideal.
windows cuts an order for those who run it dynamically.
Faces: drawing (over time, SVG), torch_csv, sketch (plans without a model).
"""

from __future__ import annotations

from dataclasses import replace

from stagewright.errors import PlanError, ScheduleError
from stagewright.plan import POLICIES, ROUTES, Plan, Policy, Route, Stage, parse_staleness
from stagewright.policy import RULES, holds
from stagewright.schedule import Schedule
from stagewright.scheduling.check import check_batches, check_schedule
from stagewright.scheduling.greedy import time_greedily
from stagewright.scheduling.lower import lower
from stagewright.scheduling.orders import steps
from stagewright.scheduling.routing import Routes, make_routes
from stagewright.scheduling.timing import Costs, Timing, time_steps

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
    costs: Costs | None = None,
    num_batches: int | None = None,
) -> Schedule:
    """The orders of all workers; what is given here replaces what the plan says."""
    if staleness is not None:
        if versions is not None:
            raise ScheduleError(f"staleness {staleness!r} and versions {versions} were both given: give one")
        versions = staleness_versions(plan, staleness)
    plan = overridden(plan, num_microbatches, policy, route, versions, hold)
    if num_batches is not None:
        check_batches(plan, num_batches)
    check_hold(plan)
    routes = make_routes(plan)
    timing = make_timing(plan, routes, agree, costs)
    return Schedule(plan=plan, orders=lower(plan, routes, timing, agree), agree=agree)


def make_timing(plan: Plan, routes: Routes, agree: bool, costs: Costs | None) -> Timing:
    """The order of compute, as times: by rule, or by trying where idle time is to be filled.

    Where batches follow each other without a flush there is no idle time to fill, and the rule serves all policies.
    """
    several_stages, rule = len(plan.devices) < sum(plan.replicas), RULES[plan.policy]
    to_fill = rule.halves or (several_stages and not rule.all_forwards_first)
    if to_fill and plan.is_synchronous:
        return time_greedily(plan, routes, agree, costs)
    return time_steps(plan, routes, list(steps(plan, agree)), costs)


def check_hold(plan: Plan) -> None:
    """Refuses a bound on held microbatches that the policy cannot keep: one that runs all forwards first."""
    found = holds(plan)
    if plan.hold is not None and max(found) > plan.hold:
        stage = found.index(max(found))
        raise ScheduleError(
            f"hold {plan.hold} cannot work: under {plan.policy} stage {stage} runs all of its {found[stage]} forwards "
            "first",
            f"use hold {found[stage]}, fewer microbatches, or policy 1f1b",
        )


def staleness_versions(plan: Plan, staleness: str) -> tuple[int, ...]:
    """The versions of each stage that `ssp`, `2bw`, `0` or `3,2,1` means."""
    try:
        return parse_staleness(staleness, len(plan.stages))
    except PlanError as fault:
        raise ScheduleError(fault.what, fault.todo) from None


def overridden(
    plan: Plan,
    num_microbatches: int | None,
    policy: Policy | None,
    route: Route | None,
    versions: tuple[int, ...] | None,
    hold: int | None,
) -> Plan:
    """The plan with what is given here in place of what it says."""
    if policy is not None and policy not in POLICIES:
        raise ScheduleError(f"policy {policy!r} is unknown", f"use one of {', '.join(POLICIES)}")
    if route is not None and route not in ROUTES:
        raise ScheduleError(f"route {route!r} is unknown", f"use one of {', '.join(ROUTES)}")
    stages = plan.stages if versions is None else with_versions(plan, versions)
    try:
        return replace(
            plan,
            stages=stages,
            num_microbatches=plan.num_microbatches if num_microbatches is None else num_microbatches,
            policy=policy or plan.policy,
            route=route or plan.route,
            hold=plan.hold if hold is None else hold,
        )
    except PlanError as fault:
        raise ScheduleError(fault.what, fault.todo) from None


def with_versions(plan: Plan, versions: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stages, each with its number of versions."""
    if len(versions) != len(plan.stages) or min(versions) < 1:
        raise ScheduleError(
            f"versions {versions}: expected {len(plan.stages)} numbers from 1 on, one a stage of {plan.placement}"
        )
    return tuple(replace(stage, versions=count) for stage, count in zip(plan.stages, versions))
