"""Routes: every row goes once, straight to where it is needed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.plan import Share, overlaps
from tests.scheduling.cases import plan_of


def test_two_replicas_to_three():
    r"""
    stage 0 │ 0 1 2 │ 3 4 5 │
    stage 1 │ 0 1 │ 2 3 │ 4 5 │
    """
    found = plan_of((2, 3), batch=6).transfers(0, 0)
    assert found == [(0, 0, 0, 2), (0, 1, 2, 3), (1, 1, 3, 4), (1, 2, 4, 6)]


def test_seven_to_one_is_a_gather():
    parts = plan_of((7, 1), batch=14).transfers(0, 0)
    assert parts == [(one, 0, 2 * one, 2 * one + 2) for one in range(7)]


def test_rotated_microbatches_travel_whole():
    plan = plan_of((3, 2), 4, batch=10, route="rotate")
    assert [plan.transfers(0, number)[0] for number in range(4)] == [
        (0, 0, 0, 2),
        (1, 1, 2, 5),
        (2, 0, 5, 7),
        (0, 1, 7, 10),
    ]


def test_uneven_weights_share_the_rows():
    plan = plan_of((3, 1), batch=10)
    plan = replace(plan, stages=(replace(plan.stages[0], row_weights=(3.0, 3.0, 4.0)), plan.stages[1]))
    assert [stop - start for _, _, start, stop in plan.transfers(0, 0)] == [3, 3, 4]


def test_shares_that_do_not_meet_have_nothing_in_common():
    assert overlaps([Share(0, 0, 2)], [Share(0, 2, 4)]) == []
    assert overlaps([], [Share(0, 2, 4)]) == []


replica_counts = st.lists(st.integers(1, 16), min_size=2, max_size=8).map(tuple)


@settings(max_examples=150, deadline=None)
@given(replica_counts, st.integers(1, 64), st.integers(0, 300), st.sampled_from(["split", "rotate"]))
def test_every_row_passes_every_boundary_once(replicas, num_microbatches, extra_rows, route):
    plan = plan_of(replicas, num_microbatches, batch=num_microbatches + extra_rows, route=route)
    for boundary in range(len(replicas) - 1):
        parts = [part for number in range(num_microbatches) for part in plan.transfers(boundary, number)]
        rows = [row for part in parts for row in range(*part[2:])]
        assert sorted(rows) == list(range(plan.batch))
        assert rows == sorted(rows)


@settings(max_examples=50, deadline=None)
@given(replica_counts, st.integers(1, 12), st.integers(0, 60), st.sampled_from(["split", "rotate"]))
def test_peers_are_those_that_rows_pass_between(replicas, num_microbatches, extra_rows, route):
    plan = plan_of(replicas, num_microbatches, batch=num_microbatches + extra_rows, route=route)
    last = len(replicas) - 1
    for stage in range(len(replicas)):
        for number in range(num_microbatches):
            peers = plan.peers(stage, number)
            assert tuple(peers) == tuple(one.replica for one in plan.shares(stage, number))
            before = {(a, b) for b, (some, _) in peers.items() for a in some}
            after = {(a, b) for a, (_, some) in peers.items() for b in some}
            assert before == {part[:2] for part in (plan.transfers(stage - 1, number) if stage else ())}
            assert after == {part[:2] for part in (plan.transfers(stage, number) if stage < last else ())}
