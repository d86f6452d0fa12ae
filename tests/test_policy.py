"""How many microbatches a replica holds: one formula, equal to counting over the schedules that are run."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import stagewright
from stagewright.plan import Plan, Policy
from stagewright.planning.groups import Setting
from stagewright.policy import RULES, holds, reach
from stagewright.schedule import Kind, Schedule
from stagewright.scheduling import make_schedule
from tests.scheduling.cases import plan_of, wrapped


def counted(schedule: Schedule) -> tuple[int, ...]:
    """The most that a replica of each stage holds, action by action over enough batches to fill the loop."""
    most = [0] * len(schedule.plan.stages)
    for worker in range(len(schedule.orders)):
        held: Counter[int] = Counter()
        for action in schedule.unroll(worker, schedule.num_batches_drawn + max(schedule.plan.versions)):
            if action.kind is Kind.FORWARD:
                held[action.stage] += 1
                most[action.stage] = max(most[action.stage], held[action.stage])
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                held[action.stage] -= 1
    return tuple(most)


@st.composite
def schedules(draw: st.DrawFn, policies: tuple[Policy, ...], *, shared: bool = False) -> Schedule:
    """A schedule of any policy, route, replicas, microbatches, staleness and hold."""
    replicas = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple))
    num = draw(st.integers(1, 12))
    sizes = {
        "num_microbatches": num,
        "batch": num * max(replicas) + draw(st.integers(0, 5)),
        "route": draw(st.sampled_from(("split", "rotate"))),
        "policy": draw(st.sampled_from(policies)),
    }
    plan = wrapped(replicas, max(replicas), **sizes) if shared else plan_of(replicas, **sizes)
    versions = draw(st.lists(st.integers(1, 4), min_size=len(replicas), max_size=len(replicas)).map(tuple))
    hold = draw(st.none() | st.integers(1, 12))
    if RULES[plan.policy].all_forwards_first:
        hold = None
    staleness = draw(st.sampled_from(("0", "ssp", "2bw", None)))
    return make_schedule(plan, hold=hold, staleness=staleness, versions=versions if staleness is None else None)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules(("gpipe", "1f1b", "interleaved", "dynamic")))
def test_what_is_held_is_what_counting_over_the_schedule_gives(schedule: Schedule) -> None:
    assert holds(schedule.plan) == counted(schedule)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules(("zero-bubble",)) | schedules(("1f1b", "interleaved", "zero-bubble", "dynamic"), shared=True))
def test_where_orders_are_found_by_trying_no_more_is_held_than_promised(schedule: Schedule) -> None:
    assert all(found <= bound for found, bound in zip(counted(schedule), holds(schedule.plan), strict=True))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules(get_args(Policy)))
def test_a_search_from_the_last_stage_on_counts_the_same(schedule: Schedule) -> None:
    plan = schedule.plan
    assume(not (RULES[plan.policy].halves and plan.is_synchronous))
    found = seen_from_the_end(plan)
    if plan.hold is None:
        assert found == holds(plan)
    else:
        assert all(bound >= exact for bound, exact in zip(found, holds(plan), strict=True))
        assert max(found) <= plan.hold


def seen_from_the_end(plan: Plan) -> tuple[int, ...]:
    setting, depths = Setting.of(plan), reach(plan)
    assert depths == tuple(setting.reach(later) for later in reversed(range(len(depths))))
    found = []
    for stage, own in enumerate(plan.replicas):
        later = plan.replicas[stage + 1 :]
        found.append(setting.held(len(later), own, sum(later)))
    return tuple(found)


@pytest.mark.parametrize(
    ("policy", "staleness", "expected"),
    [
        ("gpipe", "0", (8, 8, 8)),
        ("1f1b", "0", (3, 2, 1)),
        ("dynamic", "0", (3, 2, 1)),
        ("zero-bubble", "0", (3, 3, 3)),
        ("gpipe", "2bw", (16, 16, 16)),
        ("1f1b", "ssp", (3, 2, 1)),
    ],
)
def test_on_paper(policy: Policy, staleness: str, expected: tuple[int, ...]) -> None:
    made = make_schedule(plan_of((1, 1, 1), 8), policy=policy, staleness=staleness)
    assert holds(made.plan) == counted(made) == expected


def test_every_policy_has_an_entry() -> None:
    assert tuple(RULES) == get_args(Policy)


def test_nobody_compares_the_names_of_policies() -> None:
    """Whoever adds a policy adds an entry: what it means is asked of the table."""
    package = Path(stagewright.__file__).parent
    compared = re.compile(r"policy *(==|!=|not in|in) *[(\[{\"']")
    found = [path.name for path in package.rglob("*.py") if compared.search(path.read_text(encoding="utf-8"))]
    assert found == []
