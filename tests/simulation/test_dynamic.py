"""Dynamic orders: whatever is ready runs, backward first, within what may be held."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from stagewright.cluster import DeviceId
from stagewright.plan import Plan, Stage
from stagewright.simulation.log import Log
from tests.simulation.cases import even_profile, layer, length, plan, profile, run, star
from tests.simulation.test_conservation import settings_of_a_run


def drawn(log: Log, worker: int) -> str:
    """One worker's compute, as one draws it on paper."""
    return " ".join(
        f"{done.action.kind.value}{done.action.microbatch if done.action.microbatch >= 0 else ''}"
        for done in log.done[worker]
    )


def test_forward_goes_on_while_backward_is_late():
    # Stage 1 takes 1 s and 1 s, its rows 8 s over the wire: worker 0 need not stop after two forwards as 1f1b does.
    figures = profile(layer("l0", 1.0, 1.0, output_bytes=8.0), layer("l1", 1.0, 1.0))
    made = plan([1, 1], 4, policy="dynamic", hold=4)
    _, log = run(made, figures, star(1.0, 1.0))
    assert drawn(log, 0) == "F0 F1 F2 F3 B0 B1 B2 B3 U"
    _, listed = run(replace(made, policy="1f1b", hold=None), figures, star(1.0, 1.0))
    assert drawn(listed, 0) == "F0 F1 B0 F2 B1 F3 B2 B3 U"
    assert length(log) < length(listed)


def test_backward_comes_first_where_both_are_ready():
    # Stage 1 answers within 0.2 s: at 2 s worker 0 could run F2 or B0, and four may be held.
    figures = profile(layer("l0", 1.0, 1.0), layer("l1", 0.1, 0.1))
    _, log = run(plan([1, 1], 4, policy="dynamic", hold=4), figures)
    assert drawn(log, 0) == "F0 F1 B0 B1 F2 F3 B2 B3 U"


@pytest.mark.parametrize(("hold", "order"), [(1, "F0 B0 F1 B1 F2 B2 U"), (2, "F0 F1 B0 F2 B1 B2 U")])
def test_no_more_is_held_than_may_be(hold, order):
    figures = profile(layer("l0", 1.0, 1.0), layer("l1", 1.0, 4.0))
    _, log = run(plan([1, 1], 3, policy="dynamic", hold=hold), figures)
    assert drawn(log, 0) == order


def test_two_stages_on_one_device_wait_for_one_another():
    # F of stage 1 needs that of stage 0 from the same device: the later stage goes first as soon as it can.
    stages = tuple(Stage(layers=(f"l{number}",), devices=(DeviceId(0, 0),)) for number in range(2))
    made = Plan(model="m", stages=stages, batch=2, num_microbatches=2, policy="dynamic")
    _, log = run(made, even_profile(2))
    computed = [done.action for done in log.done[0] if done.action.kind.value != "U"]
    order = [f"{action.kind.value}{action.stage}.{action.microbatch}" for action in computed]
    assert order == ["F0.0", "F1.0", "B1.0", "B0.0", "F0.1", "F1.1", "B1.1", "B0.1"]


def test_a_send_goes_out_although_the_window_of_what_it_sends_is_over():
    groups = [range(4), range(1), range(4)]
    stages = tuple(
        Stage(layers=(f"l{n}",), devices=tuple(DeviceId(0, each) for each in group), versions=3 - n, num_buckets=2)
        for n, group in enumerate(groups)
    )
    made = Plan(model="m", stages=stages, batch=24, num_microbatches=2, policy="dynamic", route="rotate", hold=2)
    program, log = run(made, even_profile(3, output_bytes=1.0), num_batches=5)
    assert len(log.moved) == sum(action.kind.value in ("SF", "SB") for order in program.orders for action in order) * 5


@settings(max_examples=60, deadline=None)
@given(settings_of_a_run(policies=("dynamic",)))
def test_everything_runs_once_and_nothing_early(case):
    program, log = run(*case, num_batches=2)
    for order, entries in zip(program.orders, log.done):
        listed = [action for action in order if action.kind.value in "FBU"]
        wanted = sorted((str(action._replace(batch=0)), batch) for action in listed for batch in range(2))
        assert sorted((str(done.action._replace(batch=0)), done.batch) for done in entries) == wanted
        assert all(later.start_s >= earlier.stop_s for earlier, later in zip(entries, entries[1:]))
