"""A record as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagewright.record import MEMORY_KINDS, DeviceUse, Record, Span
from stagewright.report.timeline import WORDS, action_text, family_of, lanes, row_names

_Event = dict[str, Any]
_RECEIPT_OF: Mapping[str, str] = {"SF": "RF", "SB": "RB"}


def chrome_trace(record: Record) -> dict[str, Any]:
    """The Trace Event Format: a process a worker, a thread a lane, arrows for transfers, counters for memory."""
    chosen = lanes(record.spans)
    events = [*_row_events(record), *_lane_events(record, chosen)]
    events += [_span_event(span, lane) for span, lane in zip(record.spans, chosen)]
    events += flow_events(record.spans, chosen)
    workers = {str(device): worker for worker, device in enumerate(record.plan.devices)}
    for use in record.devices:
        if use.device in workers:
            events += _memory_events(use, workers[use.device])
    about = {"name": record.name, "source": record.source, "model": record.plan.model, "cluster": record.cluster}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _row_events(record: Record) -> Iterator[_Event]:
    """The names of the workers, in their order."""
    for worker, name in enumerate(row_names(record)):
        yield {"ph": "M", "pid": worker, "name": "process_name", "args": {"name": f"worker {worker} · {name}"}}
        yield {"ph": "M", "pid": worker, "name": "process_sort_index", "args": {"sort_index": worker}}


def _lane_events(record: Record, chosen: tuple[int, ...]) -> Iterator[_Event]:
    """The names of the lanes that hold a span."""
    for worker, lane in sorted({(span.worker, lane) for span, lane in zip(record.spans, chosen)}):
        name = "compute" if lane == 0 else f"communication {lane}"
        yield {"ph": "M", "pid": worker, "tid": lane, "name": "thread_name", "args": {"name": name}}


def _span_event(span: Span, lane: int) -> _Event:
    """One complete event; the format counts in microseconds."""
    return {
        "ph": "X",
        "pid": span.worker,
        "tid": lane,
        "ts": span.start_s * 1e6,
        "dur": (span.stop_s - span.start_s) * 1e6,
        "name": action_text(span),
        "cat": family_of(span.kind).name,
        "args": {"what": WORDS.get(span.kind, span.kind), "batch": span.batch, "stage": span.stage},
    }


def flow_events(spans: Sequence[Span], chosen: tuple[int, ...]) -> Iterator[_Event]:
    """An arrow from each send to the receipt of the same rows at the other worker, where the record has both."""
    ordered = sorted(zip(spans, chosen), key=lambda pair: pair[0].start_s)
    receipts: dict[object, deque[tuple[Span, int]]] = {}
    for span, lane in ordered:
        if span.kind in _RECEIPT_OF.values():
            key = span.kind, span.peer, span.worker, span.batch, span.microbatch
            receipts.setdefault(key, deque()).append((span, lane))
    for number, (span, lane) in enumerate(ordered):
        # Both ends of a pair issue their transfers in the same order, so the first that waits is the one.
        waiting = receipts.get((_RECEIPT_OF.get(span.kind), span.worker, span.peer, span.batch, span.microbatch))
        if waiting:
            yield from _arrow(number, (span, lane), waiting.popleft())


def _arrow(number: int, sent: tuple[Span, int], received: tuple[Span, int]) -> Iterator[_Event]:
    """The two ends of one arrow."""
    for phase, (span, lane), time_s in (("s", sent, sent[0].start_s), ("f", received, received[0].stop_s)):
        event = {"ph": phase, "pid": span.worker, "tid": lane, "ts": time_s * 1e6}
        yield {**event, "id": number, "name": action_text(sent[0]), "cat": "transfer", "bp": "e"}


def _memory_events(use: DeviceUse, worker: int) -> Iterator[_Event]:
    """Memory over time as one counter a device, stacked by kind."""
    kinds = [kind for kind in MEMORY_KINDS if kind in use.memory_parts]
    for index, time_s in enumerate(use.memory_s):
        parts = {kind: use.memory_parts[kind][index] for kind in kinds}
        yield {"ph": "C", "pid": worker, "name": "memory", "ts": time_s * 1e6, "args": parts}
