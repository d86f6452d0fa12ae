"""A schedule carried out in one's head: by hand, and beside the simulator, which is the judge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.cluster import Device, make_cluster
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.schedule import Kind, Schedule
from stagewright.scheduling import make_schedule
from stagewright.scheduling.ideal import run_ideally
from stagewright.simulation import simulate
from tests.planning.cases import GIB, chain
from tests.scheduling.cases import plan_of


def spans(schedule: Schedule, num_batches: int = 1) -> list[str]:
    """For each worker what it does and from when to when."""
    run = run_ideally(schedule, num_batches)
    return [" ".join(f"{one.action!s}={one.start:g}-{one.stop:g}" for one in own) for own in run.spans]


def test_forward_waits_for_rows_and_backward_for_gradients() -> None:
    assert spans(make_schedule(plan_of((1, 1), 2))) == [
        "F0.0=0-1 F0.1=1-2 B0.0=4-6 B0.1=7-9 U0=9-9",
        "F1.0=1-2 B1.0=2-4 F1.1=4-5 B1.1=5-7 U1=7-7",
    ]


def test_an_update_waits_for_all_replicas_and_an_agreement_for_all_workers() -> None:
    plan = plan_of((2, 1), 3, route="rotate")
    assert [own.split()[-1] for own in spans(make_schedule(plan))] == ["U0=12-12", "U0=12-12", "U1=10-10"]
    assert [own.split()[-2:] for own in spans(make_schedule(plan, agree=True))] == [
        ["A=12-12", "U0=12-12"],
        ["A=12-12", "U0=12-12"],
        ["A=12-12", "U1=12-12"],
    ]


def test_a_forward_waits_for_the_updates_of_all_who_share_the_states() -> None:
    for shares, stuck in ((False, set()), (True, {0, 1, 2})):
        plan = plan_of((2, 1), 2, route="rotate")
        plan = replace(plan, stages=(replace(plan.stages[0], shard_optimizer=shares), plan.stages[1]))
        schedule = make_schedule(plan)
        without = tuple(one for one in schedule.orders[0] if one.kind is not Kind.UPDATE)
        assert set(run_ideally(replace(schedule, orders=(without, *schedule.orders[1:])), 2).stuck) == stuck


def test_whoever_waits_for_ever_is_named() -> None:
    schedule = make_schedule(plan_of((1, 1)))
    without = tuple(one for one in schedule.orders[0] if one.kind is not Kind.SEND_FORWARD)
    run = run_ideally(replace(schedule, orders=(without, schedule.orders[1])))
    assert {worker: str(action) for worker, action in run.stuck.items()} == {0: "B0.0", 1: "F1.0"}


@pytest.mark.parametrize(
    ("policy", "placement"),
    [("gpipe", "0:0"), ("gpipe", "0:0.0:1.0:2"), ("1f1b", "0:0.0:1.0:2.0:3"), ("interleaved", "0:0.0:1.0:0.0:1")],
)
@pytest.mark.parametrize("microbatches", [1, 4, 8])
def test_a_batch_takes_as_long_as_in_the_simulator(policy: str, placement: str, microbatches: int) -> None:
    """Even stages whose forward takes a second and backward two, links that cost nothing."""
    num_stages = placement.count(".") + 1
    profile = chain((3.0,) * num_stages, rows=2)
    cluster = make_cluster(4, device=Device(kind="cpu", memory_bytes=64 * GIB), bytes_per_s=1e15)
    options = PlanOptions(
        batch=2 * microbatches,
        num_microbatches=microbatches,
        placement=placement,
        cut=profile.names[1:],
        policy=policy,  # type: ignore[arg-type]
    )
    schedule = make_schedule(fixed_plan(profile, options, cluster))
    step_s = simulate(schedule, profile, cluster, detail=False).median_step_s
    assert step_s == pytest.approx(run_ideally(schedule).length, rel=1e-6)
