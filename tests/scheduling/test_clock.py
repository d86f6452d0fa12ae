"""The one interpreter of orders: by hand, and beside the simulator, which is the judge."""

from __future__ import annotations

import pytest

from stagewright.cluster import Device, make_cluster
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.scheduling import make_schedule
from stagewright.scheduling.clock import Clock
from stagewright.scheduling.ideal import run_ideally
from stagewright.simulation import simulate
from tests.planning.cases import GIB, chain


def test_a_worker_has_a_turn_when_what_it_waits_for_has_ended() -> None:
    clock, turns = Clock(2), list[tuple[int, float, bool]]()

    def act(worker: int, time: float) -> None:
        turns.append((worker, time, clock.is_over(("rows",), time)))
        if turns == [(0, 0, False)]:
            clock.end(("rows",), clock.occupy(0, time, 3), [1])

    clock.run(act)
    assert turns == [(0, 0, False), (1, 0, False), (0, 3, True), (1, 3, True)]


def test_an_event_of_several_parts_ends_with_the_last_and_nobody_is_woken_before() -> None:
    clock, turns = Clock(3), list[tuple[int, float]]()

    def act(worker: int, time: float) -> None:
        turns.append((worker, time))
        if worker < 2 and time == 0:
            clock.end(("sum",), clock.occupy(worker, time, 2 + worker), [2], num_parts=2)

    clock.run(act)
    assert turns == [(0, 0), (1, 0), (2, 0), (0, 2), (1, 3), (2, 3)]


def test_a_busy_worker_has_no_turn() -> None:
    clock, turns = Clock(1), list[float]()

    def act(worker: int, time: float) -> None:
        turns.append(time)
        if time == 0:
            clock.occupy(worker, time, 5)
            clock.end(("early",), 1, [worker])

    clock.run(act)
    assert turns == [0, 5]


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
