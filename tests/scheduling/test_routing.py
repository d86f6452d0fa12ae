"""Routes: every row goes once, straight to where it is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.errors import ScheduleError
from stagewright.plan import Share
from stagewright.schedule import Action
from stagewright.scheduling.routing import Transfer, action_rows, make_routes, overlaps, rows_between, transfers
from tests.scheduling.cases import plan_of


def test_two_replicas_to_three():
    r"""
    stage 0 │ 0 1 2 │ 3 4 5 │
    stage 1 │ 0 1 │ 2 3 │ 4 5 │
    """
    assert transfers(plan_of((2, 3), batch=6), 0, 0) == (
        Transfer(source=0, target=0, start=0, stop=2),
        Transfer(source=0, target=1, start=2, stop=3),
        Transfer(source=1, target=1, start=3, stop=4),
        Transfer(source=1, target=2, start=4, stop=6),
    )


def test_seven_to_one_is_a_gather():
    parts = transfers(plan_of((7, 1), batch=14), 0, 0)
    assert [(part.source, part.target, part.stop - part.start) for part in parts] == [(one, 0, 2) for one in range(7)]


def test_rotated_microbatches_travel_whole():
    plan = plan_of((3, 2), 4, batch=10, route="rotate")
    assert [transfers(plan, 0, number)[0] for number in range(4)] == [
        Transfer(0, 0, 0, 2),
        Transfer(1, 1, 2, 5),
        Transfer(2, 0, 5, 7),
        Transfer(0, 1, 7, 10),
    ]


def test_uneven_weights_share_the_rows():
    plan = plan_of((3, 1), batch=10)
    plan = replace(plan, stages=(replace(plan.stages[0], row_weights=(3.0, 3.0, 4.0)), plan.stages[1]))
    assert [part.stop - part.start for part in transfers(plan, 0, 0)] == [3, 3, 4]


def test_another_batch_size_needs_no_other_plan():
    assert rows_between(plan_of((2, 1), batch=8), 0, 0, source=1, target=0, rows=3) == (1, 3)
    assert rows_between(plan_of((2, 2), batch=8), 0, 0, source=0, target=1) == (0, 0)


def test_rows_of_every_kind_of_action():
    """Workers 0 and 1 hold stage 0, worker 2 stage 1; microbatch 1 has the rows 4 … 7."""
    plan = plan_of((2, 1), 2, batch=8)

    def rows(worker: int, text: str) -> list[tuple[int, int]]:
        return [action_rows(plan, worker, Action.parse(word)) for word in text.split()]

    assert rows(0, "F0.1 SF0.1>2 RB1.1<2 B0.1") == [(4, 6)] * 4
    assert rows(1, "F0.1 SF0.1>2 RB1.1<2 B0.1") == [(6, 8)] * 4
    assert rows(2, "RF0.1<0 RF0.1<1 F1.1 B1.1") == [(4, 6), (6, 8), (4, 8), (4, 8)]
    assert rows(2, "SB1.1>0 SB1.1>1") == [(4, 6), (6, 8)]


def test_a_worker_that_does_not_hold_the_stage_is_named():
    with pytest.raises(ScheduleError, match=r"worker 2 holds no replica of stage 0: the placement is 0:0-1\.0:2"):
        action_rows(plan_of((2, 1)), 2, Action.parse("F0.0"))


def test_shares_that_do_not_meet_have_nothing_in_common():
    assert overlaps([Share(0, 0, 2)], [Share(0, 2, 4)]) == ()
    assert overlaps([], [Share(0, 2, 4)]) == ()


replica_counts = st.lists(st.integers(1, 16), min_size=2, max_size=8).map(tuple)


@settings(max_examples=150, deadline=None)
@given(replica_counts, st.integers(1, 64), st.integers(0, 300), st.sampled_from(["split", "rotate"]))
def test_every_row_passes_every_boundary_once(replicas, num_microbatches, extra_rows, route):
    plan = plan_of(replicas, num_microbatches, batch=num_microbatches + extra_rows, route=route)
    for boundary in range(len(replicas) - 1):
        parts = [part for number in range(num_microbatches) for part in transfers(plan, boundary, number)]
        rows = [row for part in parts for row in range(part.start, part.stop)]
        assert sorted(rows) == list(range(plan.batch))
        assert rows == sorted(rows)


@settings(max_examples=50, deadline=None)
@given(replica_counts, st.integers(1, 12), st.integers(0, 60), st.sampled_from(["split", "rotate"]))
def test_all_routes_at_once_agree_with_one_at_a_time(replicas, num_microbatches, extra_rows, route):
    plan = plan_of(replicas, num_microbatches, batch=num_microbatches + extra_rows, route=route)
    routes = make_routes(plan)
    for stage in range(len(replicas)):
        for number in range(num_microbatches):
            shares = plan.shares(stage, number)
            assert routes.own[stage][number] == tuple((one.replica, one.stop - one.start) for one in shares)
            if stage + 1 < len(replicas):
                links = [(part.source, part.target) for part in transfers(plan, stage, number)]
                assert list(routes.links[stage][number]) == links
                assert {(a, b) for a, some in routes.targets[stage][number].items() for b in some} == set(links)
                assert {(a, b) for b, some in routes.sources[stage][number].items() for a in some} == set(links)
