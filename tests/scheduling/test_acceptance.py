"""Everything small, and much that is large: built, checked, and carried out under both semantics."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagewright.policy import holds
from stagewright.scheduling import check_schedule, make_schedule
from tests.scheduling.cases import plan_of, wrapped
from tests.scheduling.interpreter import carry_out

POLICIES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "dynamic", "ssp", "2bw")
ALL = [
    (replicas, microbatches, policy, route)
    for stages in range(1, 5)
    for replicas in product(range(1, 5), repeat=stages)
    for microbatches in range(1, 13)
    for policy in POLICIES
    for route in ("split", "rotate")
]


def build_and_carry_out(replicas, microbatches, policy, route, agree=False) -> None:
    """Uneven rows: some microbatches have a row more than others, and fewer than the widest stage has replicas."""
    sizes = {"num_microbatches": microbatches, "batch": 3 * microbatches + microbatches // 2, "route": route}
    if policy == "interleaved":
        plan = wrapped(replicas, max(replicas), **sizes)
    else:
        plan = plan_of(replicas, **sizes)
    if policy in ("ssp", "2bw"):
        schedule, num_batches = make_schedule(plan, staleness=policy, agree=agree), len(replicas) + 2
    else:
        schedule, num_batches = make_schedule(plan, policy=policy, agree=agree), 1
    check_schedule(schedule)
    for meet in (False, True):
        held = carry_out(schedule, num_batches, meet)
        assert all(count <= holds(schedule.plan)[stage] for stage, count in held.items())


def carry_out_all(cases) -> None:
    failures = []
    for number, case in enumerate(cases):
        try:
            build_and_carry_out(*case, agree=number % 5 == 0)
        except Exception as fault:
            failures.append((case, fault))
    print(f"\n{len(cases):,} of {len(ALL):,} schedules built, checked, run twice; {len(failures)} failures")
    assert not failures, failures[:3]


def test_every_97th_of_the_small_schedules():
    carry_out_all(ALL[::97])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_small_schedules():
    carry_out_all(ALL)


@st.composite
def large_plans(draw):
    replicas = draw(st.lists(st.integers(1, 16), min_size=1, max_size=8).map(tuple))
    microbatches = draw(st.integers(1, 64))
    sizes = {
        "num_microbatches": microbatches,
        "batch": microbatches + draw(st.integers(0, 100)),
        "route": draw(st.sampled_from(["split", "rotate"])),
        "policy": draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "dynamic"])),
    }
    if draw(st.booleans()):
        return wrapped(replicas, draw(st.integers(max(replicas), sum(replicas))), **sizes)
    return plan_of(replicas, **sizes)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(large_plans(), st.booleans())
def test_large_schedules(plan, agree):
    schedule = make_schedule(plan, agree=agree)
    check_schedule(schedule)
    for meet in (False, True):
        carry_out(schedule, 1, meet)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(large_plans(), st.data())
def test_large_loops_with_any_versions(plan, data):
    versions = tuple(data.draw(st.lists(st.integers(1, 4), min_size=len(plan.stages), max_size=len(plan.stages))))
    microbatches = data.draw(st.integers(1, min(8, plan.num_microbatches)))
    agree = data.draw(st.booleans())
    schedule = make_schedule(plan, versions=versions, num_microbatches=microbatches, agree=agree)
    check_schedule(schedule)
    for num_batches in (1, data.draw(st.integers(2, 6))):
        carry_out(schedule, num_batches, meet=data.draw(st.booleans()))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(large_plans(), st.integers(1, 12), st.sampled_from(["0", "ssp", "2bw"]))
def test_any_hold_works_and_is_kept_but_for_gpipe(plan, hold, staleness):
    microbatches = min(6, plan.num_microbatches)
    policy = "1f1b" if plan.policy == "gpipe" else plan.policy
    schedule = make_schedule(plan, hold=hold, staleness=staleness, policy=policy, num_microbatches=microbatches)
    check_schedule(schedule)
    assert all(count <= hold for count in carry_out(schedule, 3, meet=True).values())


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(8,) * 8, (63, 1), (1,) * 64, (31, 33)])
@pytest.mark.parametrize("route", ["split", "rotate"])
def test_64_workers_and_512_microbatches_make_a_right_schedule(replicas, route):
    """How fast: benchmarks/schedules.py."""
    check_schedule(make_schedule(plan_of(replicas, 512, batch=512 * 64, route=route)))
