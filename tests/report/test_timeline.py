"""Spans in rows and lanes, as pictures, bars and traces."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from stagewright.record import Span
from stagewright.report import chrome_trace, timeline_svg
from stagewright.report.cases import make_cases
from stagewright.report.timeline import _action_text, _flow_events, _lanes, _one_step, _thin, _Window, run_data

from .synthetic import make_record


def test_computing_has_one_lane_and_overlapping_transfers_have_their_own() -> None:
    spans = (
        Span(0, "F", 0, 0, 0, 0.0, 2.0),
        Span(0, "SF", 0, 0, 0, 1.0, 3.0, 1),
        Span(0, "RB", 0, 0, 0, 2.0, 4.0, 1),  # while the first is under way
        Span(0, "G", 0, 0, -1, 3.0, 5.0, 0),  # the first lane is free again
        Span(1, "RF", 0, 0, 0, 1.0, 3.0, 0),  # another worker
    )
    assert _lanes(spans) == (0, 1, 2, 1, 1)


def test_more_overlap_than_lanes_shares_the_last() -> None:
    assert _lanes([Span(0, "RF", 0, 0, number, 0.0, 1.0, 1) for number in range(5)]) == (1, 2, 3, 3, 3)


def test_actions_are_written_as_in_schedules() -> None:
    told = [
        _action_text(Span(0, "F", 0, 7, 3, 0, 1)),
        _action_text(Span(0, "SF", 0, 7, 3, 0, 1, 5)),
        _action_text(Span(0, "G", 0, 7, -1, 0, 1, 2)),
        _action_text(Span(0, "data", 0, 7, -1, 0, 1)),
    ]
    assert told == ["F0.3", "SF0.3>5", "G0/2", "data"]


def test_the_step_shown_is_the_batch_in_the_middle() -> None:
    spans = [Span(0, "F", 0, batch, 0, batch, batch + 0.5) for batch in range(5)]
    assert _one_step(spans) == _Window(2.0, 2.5)


def test_thinning_keeps_whole_batches_around_the_middle() -> None:
    spans = [Span(0, "F", 0, batch, number, batch, batch + 0.5) for batch in range(5) for number in range(10)]
    kept = _thin(spans, 30)
    assert {span.batch for span in kept} == {1, 2, 3}
    assert len(kept) == 30


def test_what_the_page_leaves_out_is_counted() -> None:
    (case,) = make_cases([make_record(num_batches=20)])
    assert run_data(case, 1_000_000)["num_left_out"] == 0
    few = run_data(case, 100)
    kept = sum(len(group["workers"]) * len(group["start"]) for group in few["spans"]["groups"])
    assert few["num_left_out"] == len(case.record.spans) - kept > 0


def test_the_picture_has_a_row_a_worker_and_a_title_a_span() -> None:
    record = make_record("<b>&", num_microbatches=2)
    root = ElementTree.fromstring(timeline_svg(record))
    space = "{http://www.w3.org/2000/svg}"

    titles = [title.text or "" for title in root.iter(f"{space}title")]
    rows = [text.text for text in root.iter(f"{space}text") if "stage" in (text.text or "")]

    assert titles[0].startswith("<b>&: ")
    assert len(rows) == 8
    assert any(re.fullmatch(r"F0\.1 of batch 3: forward, .* ms", title) for title in titles)


def test_a_record_without_spans_says_so() -> None:
    empty = make_record(with_spans=False)
    assert "no spans" in timeline_svg(empty)


def test_a_trace_that_perfetto_reads() -> None:
    record = make_record()
    trace = json.loads(json.dumps(chrome_trace(record)))
    by_phase: dict[str, list[dict[str, object]]] = {}
    for event in trace["traceEvents"]:
        by_phase.setdefault(event["ph"], []).append(event)

    assert len(by_phase["X"]) == len(record.spans)
    assert by_phase["X"][0]["dur"] == pytest.approx((record.spans[0].stop_s - record.spans[0].start_s) * 1e6)
    assert len(by_phase["s"]) == len(by_phase["f"]) == sum(span.kind in ("SF", "SB") for span in record.spans)
    assert {event["args"]["name"] for event in by_phase["M"] if event["name"] == "thread_name"} >= {"compute"}  # type: ignore[index]
    assert len(by_phase["C"]) == 8 * 201


def test_an_arrow_leads_from_a_send_to_the_receipt_of_the_same_rows() -> None:
    events = chrome_trace(make_record())["traceEvents"]
    start = next(event for event in events if event["ph"] == "s")
    stop = next(event for event in events if event["ph"] == "f" and event["id"] == start["id"])
    assert (start["pid"], stop["pid"]) == (0, 7)
    assert stop["ts"] >= start["ts"]


def test_two_transfers_of_the_same_rows_are_paired_in_the_order_of_their_issue() -> None:
    spans = (
        Span(0, "SF", 0, 0, 0, 0.0, 1.0, 1),
        Span(1, "RF", 1, 0, 0, 0.0, 1.0, 0),
        Span(0, "SF", 2, 0, 0, 2.0, 3.0, 1),  # an interleaved stage, between the same workers
        Span(1, "RF", 3, 0, 0, 2.0, 3.0, 0),
    )
    events = [event for event in _flow_events(list(zip(spans, _lanes(spans)))) if event["ph"] == "f"]
    assert [event["ts"] for event in events] == [1e6, 3e6]
