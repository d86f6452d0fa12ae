"""Decoding that limits, the steady state, agreement, and the critical path in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.errors import UsageError
from stagewright.scheduling import make_schedule
from stagewright.simulation import fastest_schedule, simulate
from stagewright.simulation.run import find_steady
from stagewright.simulation.whatif import Point, faster_links, knee, parse_factors
from tests.simulation.cases import even_profile, layer, plan, profile, star


def with_decoding(cluster, images_per_s):
    return replace(cluster, hosts=(replace(cluster.hosts[0], decode_images_per_s=images_per_s),))


@pytest.mark.parametrize(("images_per_s", "step_s"), [(10.0, 3.0), (0.5, 4.0)])
def test_decoding_limits_only_where_it_is_slower_than_everything_else(images_per_s, step_s):
    # Two devices, a row each: compute takes 3 s; two rows at 0.5 images/s take 4 s.
    cluster = with_decoding(star(1e30, 1e30), images_per_s)
    record = simulate(make_schedule(plan([2])), even_profile(1), cluster, data="records")
    assert record.median_step_s == pytest.approx(step_s)


def test_a_batch_is_decoded_after_the_one_before_it_is_whole():
    # Two microbatches of a row, 10 s each to decode: the first forward begins early, yet a batch takes 20 s.
    cluster = with_decoding(star(1e30), 0.1)
    record = simulate(make_schedule(plan([1], 2)), even_profile(1), cluster, data="records")
    assert record.median_step_s == pytest.approx(20.0)


def test_synthetic_data_needs_no_decoding():
    record = simulate(make_schedule(plan([2])), even_profile(1), with_decoding(star(1e30, 1e30), 0.01))
    assert record.median_step_s == pytest.approx(3.0)


def test_a_run_limited_by_decoding_says_so():
    cluster = with_decoding(star(1e30), 0.1)
    record = simulate(make_schedule(plan([1])), even_profile(1), cluster, data="records")
    assert record.limit == "data loading of host 0"


def test_compute_transfers_and_reductions_are_named_when_they_limit():
    slow = simulate(
        make_schedule(plan([1, 1], 2)), profile(layer("l0", output_bytes=100.0), layer("l1")), star(1.0, 1.0)
    )
    assert slow.limit in ("transfer 0 → 1 over the local link", "transfer 1 → 0 over the local link")
    reduced = simulate(make_schedule(plan([2])), profile(layer("l0", parameter_bytes=1000)), star(1.0, 1.0))
    assert reduced.limit == "all-reduce of stage 0 among 0:0-1"
    computed = simulate(make_schedule(plan([1])), even_profile(1), star(1.0))
    assert computed.limit == "compute of stage 0"
    assert computed.notes[0] == "critical path: compute of stage 0 100%"


def test_the_critical_path_covers_the_whole_step():
    record = simulate(
        make_schedule(plan([2, 1], 4)), even_profile(2, output_bytes=1.0, parameter_bytes=8), star(1, 1, 1)
    )
    shares = [int(part.rsplit(" ", 1)[1].rstrip("%")) for part in record.notes[0].split(": ", 1)[1].split(", ")]
    assert sum(shares) == pytest.approx(100, abs=3)


def test_an_agreement_makes_everyone_wait_for_the_slowest():
    figures = profile(layer("l0"), layer("l1", 10.0, 10.0))
    free = simulate(make_schedule(plan([1, 1], versions=[2, 1])), figures, star(1e30, 1e30))
    agreed = simulate(make_schedule(plan([1, 1]), agree=True), figures, star(1e30, 1e30))
    assert agreed.median_step_s >= free.median_step_s


@pytest.mark.parametrize(
    ("done", "drain", "step_s", "start_s"),
    [
        ([5.0, 9.0, 12.0, 15.0, 18.0, 19.0], 1, 3.0, 9.0),
        ([1.0, 3.0, 4.0, 6.0, 7.0, 9.0, 10.0, 12.0], 0, 1.5, 1.0),
        ([7.0], 0, 7.0, 0.0),
        ([7.0, 7.0], 0, 3.5, 0.0),
    ],
)
def test_start_up_and_drain_are_left_out_of_the_steps(done, drain, step_s, start_s):
    steady = find_steady(done, drain)
    assert steady.step_s[0] == pytest.approx(step_s)
    assert steady.start_s == pytest.approx(start_s)


def test_where_versions_leave_the_choice_the_faster_hold_is_taken():
    # A long reduction wants hold 1, so that it overlaps the whole next batch.
    figures = profile(layer("l0", parameter_bytes=100), layer("l1", 0.01, 0.01))
    made = plan([2, 1], versions=[2, 1])
    cluster = star(10.0, 10.0, 1e9)
    chosen = fastest_schedule(made, figures, cluster, agree=False, data="synthetic")
    assert chosen.plan.hold == 1
    slower = simulate(make_schedule(made), figures, cluster).median_step_s
    assert simulate(chosen, figures, cluster).median_step_s < slower


def test_a_sweep_ends_where_more_stops_helping():
    figures = profile(layer("l0", parameter_bytes=100))
    points = []
    for factor in (1.0, 2.0, 4.0, 100.0, 200.0):
        record = simulate(make_schedule(plan([2])), figures, faster_links(star(10.0, 10.0), factor))
        points.append(Point(factor, f"×{factor:g}", record))
    assert knee(points).value == 100.0


@pytest.mark.parametrize("text", ["", "x0", "fast", "x2,,x4", "-1"])
def test_factors_that_mean_nothing_are_refused(text):
    with pytest.raises(UsageError, match="--bandwidth"):
        parse_factors(text)


def test_factors_are_read():
    assert parse_factors("×2,x0.5,4") == (2.0, 0.5, 4.0)
