"""Small schedules, drawn as on paper."""

from __future__ import annotations

from dataclasses import replace

from stagewright.schedule import Schedule
from stagewright.scheduling import check_schedule, make_schedule
from stagewright.scheduling.drawing import timed_grid
from tests.scheduling.cases import drawn, placed, plan_of


def checked(plan, **options) -> Schedule:
    schedule = make_schedule(plan, **options)
    check_schedule(schedule)
    return schedule


def test_rotate_1f1b_over_three_and_one():
    schedule = checked(plan_of((3, 1), 6, route="rotate"))
    assert schedule.grid() == drawn("""
        0 │ F0 F3 B0 B3 U
        1 │ F1 F4 B1 B4 U
        2 │ F2 F5 B2 B5 U
        3 │ F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 U
    """)


def test_ssp_over_three_and_one():
    schedule = checked(plan_of((3, 1)), staleness="ssp")
    assert schedule.grid(4) == drawn("""
        0-2 │ F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 B3 U3
        3   │ F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3
    """)


def test_gpipe_runs_all_forwards_first():
    assert checked(plan_of((1, 1), 3), policy="gpipe").grid() == drawn("""
        0-1 │ F0 F1 F2 B0 B1 B2 U
    """)


def test_1f1b_over_three_stages():
    assert checked(plan_of((1, 1, 1), 5)).grid() == drawn("""
        0 │ F0 F1 F2 B0 F3 B1 F4 B2 B3 B4 U
        1 │ F0 F1 B0 F2 B1 F3 B2 F4 B3 B4 U
        2 │ F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 U
    """)


def test_1f1b_with_fewer_microbatches_than_stages():
    assert checked(plan_of((1, 1, 1), 2)).grid() == drawn("""
        0-1 │ F0 F1 B0 B1 U
        2   │ F0 B0 F1 B1 U
    """)


def test_the_smallest_case_that_the_textbook_warm_up_locks():
    """Stage 0 needs four forwards before its first backward, since replica 0 of stage 1 wants microbatches 0 and 3."""
    assert checked(plan_of((1, 3, 1), 4, route="rotate")).grid() == drawn("""
        0 │ F0 F1 F2 F3 B0 B1 B2 B3 U
        1 │ F0 F3 B0 B3 U
        2 │ F1 B1 U
        3 │ F2 B2 U
        4 │ F0 B0 F1 B1 F2 B2 F3 B3 U
    """)


def test_a_smaller_hold_cuts_the_warm_ups_of_all_stages():
    assert checked(plan_of((1, 3, 1), 4, route="rotate"), hold=2).grid() == drawn("""
        0 │ F0 F1 B0 F2 B1 F3 B2 B3 U
        1 │ F0 B0 F3 B3 U
        2 │ F1 B1 U
        3 │ F2 B2 U
        4 │ F0 B0 F1 B1 F2 B2 F3 B3 U
    """)


def test_a_larger_hold_stretches_them_but_for_the_last_stage():
    assert checked(plan_of((1, 1, 1), 6), hold=5).grid() == drawn("""
        0 │ F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5 U
        1 │ F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5 U
        2 │ F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 U
    """)


def test_replicas_without_microbatches_still_update():
    assert checked(plan_of((3, 1), 2, route="rotate")).grid() == drawn("""
        0 │ F0 B0 U
        1 │ F1 B1 U
        2 │ U
        3 │ F0 B0 F1 B1 U
    """)


def test_ssp_over_three_stages_and_two_microbatches():
    """Updates come as late as the versions allow: stage 0 has K = 3 and runs two microbatches ahead."""
    assert checked(plan_of((1, 1, 1), 2), staleness="ssp").grid(3) == drawn("""
        0 │ 0:F0 0:F1 1:F0 0:B0 1:F1 0:B1 2:F0 1:B0 2:F1 1:B1 0:U 2:B0 2:B1 1:U 2:U
        1 │ 0:F0 0:F1 0:B0 1:F0 0:B1 1:F1 1:B0 0:U 2:F0 1:B1 2:F1 2:B0 1:U 2:B1 2:U
        2 │ 0:F0 0:B0 0:F1 0:B1 0:U 1:F0 1:B0 1:F1 1:B1 1:U 2:F0 2:B0 2:F1 2:B1 2:U
    """)


def test_a_replica_without_rows_updates_after_the_others_have_reduced():
    schedule = checked(plan_of((2, 1), 2, batch=2), staleness="ssp")
    assert schedule.text == drawn("""
        0 │ G0-1 U0-1
        1 │ F0.1 RB1.0<2 SF0.1>2 B0.0 U0-1 F0.0+1 RB1.1<2 SF0.0>2+1 B0.1 G0
        2 │ F1.0 B1.0 SB1.0>1 RF0.1<1 F1.1 B1.1 SB1.1>1 RF0.0<1+1 U1
    """)


def test_2bw_data_parallelism_overlaps_a_reduction_with_the_next_batch():
    schedule = checked(plan_of((2,)), staleness="2bw")
    assert schedule.grid(4) == "0-1 │ F0 B0 F1 B1 U0 F2 B2 U1 F3 B3 U2 U3"
    assert schedule.text.splitlines()[0] == "0 │ F0.0 B0.0 G0 U0-1"


def test_one_stage_with_one_version_is_data_parallelism():
    assert checked(plan_of((2,), 2)).text == drawn("""
        0 │ F0.0 B0.0 F0.1 B0.1 G0 U0
        1 │ F0.0 B0.0 F0.1 B0.1 G0 U0
    """)


def test_every_action_of_two_stages():
    assert checked(plan_of((2, 1)), agree=True).text == drawn("""
        0 │ F0.0 SF0.0>2 RB1.0<2 B0.0 G0 A U0
        1 │ F0.0 SF0.0>2 RB1.0<2 B0.0 G0 A U0
        2 │ RF0.0<0 RF0.0<1 F1.0 B1.0 SB1.0>0 SB1.0>1 A U1
    """)


def test_every_action_of_the_stale_synchronous_loop():
    assert checked(plan_of((2, 1)), staleness="ssp").text == drawn("""
        0 │ F0.0+1 RB1.0<2 SF0.0>2+1 B0.0 G0 U0
        1 │ F0.0+1 RB1.0<2 SF0.0>2+1 B0.0 G0 U0
        2 │ F1.0 B1.0 SB1.0>0 SB1.0>1 RF0.0<0+1 RF0.0<1+1 U1
    """)


def test_interleaved_over_two_workers_with_two_stages_each():
    """Forward comes round in groups of two; worker 0 runs F0.3 early rather than wait for B2.0."""
    schedule = checked(placed("0:0.0:1.0:0.0:1", 4), policy="interleaved")
    assert schedule.grid() == drawn("""
        0 │ F0.0 F0.1 F2.0 F2.1 F0.2 F0.3 B2.0 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 U2 B0.2 B0.3 U0
        1 │ F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 U3 B1.2 B1.3 U1
    """)


def test_two_stages_on_the_same_two_workers_need_no_transfers():
    assert checked(placed("0:0-1.0:0-1", 2, route="split")).text == drawn("""
        0 │ F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 B1.1 G1 U1 B0.1 G0 U0
        1 │ F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 B1.1 G1 U1 B0.1 G0 U0
    """)


def test_zero_bubble_over_four_stages():
    """As in figure 3 of Qi et al.: the weights' halves come later from stage to stage, and fill the end."""
    schedule = checked(plan_of((1, 1, 1, 1), 6), policy="zero-bubble")
    assert timed_grid(schedule) == drawn("""
        0 │ F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        1 │    F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        2 │       F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        3 │          F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
    """)


def test_1f1b_over_time():
    assert timed_grid(checked(plan_of((1, 1), 3))) == drawn("""
        0 │ F0 F1       B0─── F2 B1───    B2───
        1 │    F0 B0─── F1 B1─── F2 B2───
    """)


def test_dynamic_lists_the_actions_of_1f1b():
    plan = plan_of((2, 1), 4, route="rotate")
    assert checked(plan, policy="dynamic").text == checked(plan, policy="1f1b").text


def test_overrides_are_in_the_plan_of_the_schedule():
    schedule = make_schedule(plan_of((2, 1), 2, batch=12), num_microbatches=3, policy="gpipe", versions=(2, 1), hold=9)
    assert (schedule.plan.num_microbatches, schedule.plan.policy) == (3, "gpipe")
    assert (schedule.plan.versions, schedule.plan.hold) == ((2, 1), 9)


def test_a_stage_is_reduced_once_however_many_buckets_it_has():
    plan = plan_of((2,))
    plan = replace(plan, stages=(replace(plan.stages[0], num_buckets=3),))
    assert checked(plan).text.splitlines()[0] == "0 │ F0.0 B0.0 G0 U0"
