"""What can be worked out on paper comes out exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate
from tests.simulation.cases import even_profile, layer, length, plan, profile, run, star

EXACT = 1e-9


@pytest.mark.parametrize("policy", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 4), (4, 8), (4, 2), (8, 32)])
def test_a_pipeline_takes_M_plus_S_minus_1_slots(policy, stages, microbatches):
    _, log = run(plan([1] * stages, microbatches, policy=policy), even_profile(stages))
    assert length(log) == pytest.approx((microbatches + stages - 1) * 3.0, rel=EXACT)


@pytest.mark.parametrize(("weights", "seconds"), [(100, 7.0), (0, 9.0)])
def test_products_of_linear_layers_come_after_the_batchs_last_gradients(weights, seconds):
    """Of B's 2 s one is the weights'. With room for the rows of both microbatches it waits for U:

    0 │ F F . B B B B          0 │ F F . . B B . B B
    1 │ . F B F B U U          1 │ . F B B F B B        without room
    """
    wide = layer("l1", kind="matmul", saved_bytes=1.0, output_bytes=1.0, parameter_bytes=weights)
    _, log = run(plan([1, 1], 2), profile(layer("l0", output_bytes=1.0), wide))
    assert length(log) == pytest.approx(seconds, rel=EXACT)


@pytest.mark.parametrize("replicas", [2, 3, 7, 8])
@pytest.mark.parametrize("buckets", [1, 4])
def test_a_ring_takes_2_n_minus_1_over_n_of_the_bytes(replicas, buckets):
    figures = profile(layer("l0", parameter_bytes=840))
    made = plan([replicas], num_buckets=buckets)
    _, log = run(made, figures, star(*[10.0] * replicas))
    reduced = sum(entry.stop_s - entry.start_s for entry in log.reduced)
    assert reduced == pytest.approx(2 * (replicas - 1) / replicas * 840 / 10.0, rel=EXACT)


def test_two_flows_that_share_a_link_get_half_each():
    # 0 and 1 send 30 bytes each to 2, whose link carries 10 bytes a second: 6 s instead of 3.
    figures = profile(layer("l0", output_bytes=30.0), layer("l1"))
    _, log = run(plan([2, 1], batch=2), figures, star(10.0, 10.0, 10.0))
    forward = [moved for moved in log.moved if moved.sent.stage == 0]
    assert [moved.stop_s - moved.start_s for moved in forward] == pytest.approx([6.0, 6.0], rel=EXACT)


def test_a_gather_from_seven_is_limited_by_the_receivers_link():
    figures = profile(layer("l0", output_bytes=50.0), layer("l1"))
    _, log = run(plan([7, 1], batch=7), figures, star(*[100.0] * 7, 10.0))
    forward = [moved for moved in log.moved if moved.sent.stage == 0]
    assert len(forward) == 7
    assert [moved.stop_s - moved.start_s for moved in forward] == pytest.approx([7 * 50.0 / 10.0] * 7, rel=EXACT)


def test_a_transfer_adds_the_latencies_of_its_path():
    figures = profile(layer("l0", output_bytes=30.0), layer("l1"))
    _, log = run(plan([1, 1]), figures, star(10.0, 10.0, latency_s=0.25))
    assert log.moved[0].stop_s - log.moved[0].start_s == pytest.approx(3.0 + 0.5, rel=EXACT)


def test_buckets_start_while_the_last_backward_still_runs():
    # Backward takes 2 s from right to left over two layers of equal bytes: bucket 0 can go after 1 s of it.
    stage = plan([2], num_buckets=2).stages[0]
    figures = profile(layer("l0", 1, 1, parameter_bytes=10), layer("l1", 1, 1, parameter_bytes=10))
    made = plan([2], num_buckets=2)
    made = replace(made, stages=(replace(stage, layers=("l0", "l1")),))
    _, log = run(made, figures, star(10.0, 10.0))
    assert [entry.start_s for entry in log.reduced] == pytest.approx([3.0, 4.0], rel=EXACT)


def test_with_two_versions_the_reduction_overlaps_the_next_batch():
    # Compute 3 s, reduction 5 s: without versions a step is 3 + 5 s less what is hidden; with K = 2 the wire decides.
    figures = profile(layer("l0", parameter_bytes=50))
    one = simulate(make_schedule(plan([2])), figures, star(10.0, 10.0))
    two = simulate(make_schedule(plan([2], versions=[2])), figures, star(10.0, 10.0))
    assert one.median_step_s == pytest.approx(3.0 + 5.0, rel=EXACT)
    assert two.median_step_s == pytest.approx(5.0, rel=EXACT)


def test_sharded_states_go_half_of_the_way_before_the_update_and_half_under_the_next_forward():
    # Whole: backward 2-4 of 11 s, buckets 3-7 and 7-11, the update of 3 s. Shared: buckets 3-5 and 5-7, half the update
    # to 8.5, weights of l0 to 10.5 and of l1 to 12.5: the next forward has l0 from 10.5 to 11.5, and l1 ends at 13.5.
    figures = profile(layer("l0", 1, 1, parameter_bytes=40), layer("l1", 1, 1, parameter_bytes=40), optimizer_s=3.0)
    (stage,) = plan([2], num_buckets=2).stages
    for shares, step_s in ((False, 11.0 + 3.0), (True, 13.5 - 2.0)):
        made = replace(stage, layers=("l0", "l1"), shard_optimizer=shares)
        record = simulate(make_schedule(replace(plan([2]), stages=(made,))), figures, star(10.0, 10.0))
        assert record.median_step_s == pytest.approx(step_s, rel=EXACT)


def test_start_up_is_told_apart_from_the_steady_state():
    record = simulate(make_schedule(plan([1, 1], versions=[2, 1])), even_profile(2), star(1e30, 1e30))
    assert record.median_step_s == pytest.approx(3.0, rel=EXACT)
    assert record.start_up_s > record.median_step_s


def test_no_step_is_shorter_than_the_busiest_worker_computes():
    # gpipe without a flush takes dozens of batches to fill: until then they end at the pace of the stages before.
    figures = profile(layer("l0", 1.0, 2.0), layer("l1", 1.3, 1.6), layer("l2", 1.01, 2.02))
    made = plan([1, 1, 1], 8, policy="gpipe", versions=[3, 2, 1])
    record = simulate(make_schedule(made), figures, star(1e18, 1e18, 1e18), detail=False)
    assert record.median_step_s == pytest.approx(8 * 3.03)
