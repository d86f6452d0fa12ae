"""The spans of a simulated run: every action with its times, each end of a transfer, each replica of a reduction."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings

from stagewright.cluster import make_cluster
from stagewright.record import Span
from stagewright.schedule import COMPUTE, TRANSFERS, Kind
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate
from tests.simulation.cases import even_profile, plan, star
from tests.simulation.test_conservation import settings_of_a_run

TIMED = COMPUTE | TRANSFERS | {Kind.UPDATE}


def test_the_spans_of_a_batch_drawn_by_hand() -> None:
    """Transfers of 2 bytes over 1 byte a second, forward 1 s, backward 2 s.

    worker 0   F0 SF0 ───                    ─── RB0 B0 ── U0
    worker 1      RF1 ─── F1 B1 ── SB1 ─── U1
    """
    figures = even_profile(2, output_bytes=2.0)
    record = simulate(make_schedule(plan((1, 1))), figures, star(1.0, 1.0), num_batches=1)
    assert sorted(record.spans, key=lambda span: (span.worker, span.start_s, span.kind)) == [
        Span(0, "F", 0, 0, 0, 0.0, 1.0),
        Span(0, "SF", 0, 0, 0, 1.0, 3.0, 1),
        Span(0, "RB", 0, 0, 0, 6.0, 8.0, 1),
        Span(0, "B", 0, 0, 0, 8.0, 10.0),
        Span(0, "U", 0, 0, -1, 10.0, 10.0),
        Span(1, "RF", 1, 0, 0, 1.0, 3.0, 0),
        Span(1, "F", 1, 0, 0, 3.0, 4.0),
        Span(1, "B", 1, 0, 0, 4.0, 6.0),
        Span(1, "SB", 1, 0, 0, 6.0, 8.0, 0),
        Span(1, "U", 1, 0, -1, 6.0, 6.0),
    ]


def test_a_reduction_is_shown_at_every_replica() -> None:
    figures = even_profile(1, parameter_bytes=8)
    record = simulate(make_schedule(plan((3,), num_buckets=2)), figures, star(1.0, 1.0, 1.0), num_batches=1)
    reduced = [span for span in record.spans if span.kind == "G"]
    assert [(span.worker, span.peer) for span in reduced] == [
        (worker, bucket) for bucket in (0, 1) for worker in range(3)
    ]


@settings(max_examples=40, deadline=None)
@given(settings_of_a_run())
def test_every_action_of_every_batch_is_there(case) -> None:
    made, figures, cluster = case
    schedule = make_schedule(made)
    record = simulate(schedule, figures, cluster, num_batches=3)
    expected = Counter(
        (worker, action.kind.value, action.microbatch, batch)
        for worker, order in enumerate(schedule.orders)
        for action in order
        if action.kind in TIMED
        for batch in range(3)
    )
    assert Counter(
        (span.worker, span.kind, span.microbatch, span.batch) for span in record.spans if span.kind != "G"
    ) == (expected)


def test_none_is_made_before_one_is_read() -> None:
    record = simulate(make_schedule(plan((1, 1), 4)), even_profile(2), make_cluster(2))
    assert len(record.spans) > 0
    assert "made" not in vars(record.spans)
    assert isinstance(record.spans[0], Span)
    assert "made" in vars(record.spans)
