"""Spans as rows and lanes: what the page, the picture for documents and the trace viewer all draw.

worker 0 │ compute        F0 ─ F1 ── B0 ─── U        one lane: a worker computes one thing at a time
         │ communication     SF ─ SF    RB           up to three lanes: transfers and reductions overlap
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from stagewright.record import MEMORY_KINDS, DeviceUse, Record, Span
from stagewright.report.cases import Case
from stagewright.report.figures import seconds, size
from stagewright.schedule import Action, Kind

_NUM_COMMUNICATION_LANES = 3
_ACTION_KINDS = frozenset(Kind)
_Plain = dict[str, Any]


class _Family(NamedTuple):
    """Kinds of actions that are drawn alike."""

    name: str
    kinds: tuple[str, ...]
    colour: str
    """Told apart under protanopia, deuteranopia and tritanopia, on white and on black; a test computes it."""


_FAMILIES = (
    _Family("forward", ("F",), "#2f7fd0"),
    _Family("backward", ("B", "I", "W"), "#f08a24"),
    _Family("update", ("U",), "#b3368f"),
    _Family("transfer", ("SF", "RF", "SB", "RB"), "#0f9d7a"),
    _Family("reduction", ("G", "A"), "#7a5c2e"),
    _Family("loading", ("data",), "#8e8e99"),
)
_COMPUTE_FAMILIES = ("forward", "backward", "update")

_WORDS: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradients of the inputs",
    "W": "backward, gradients of the weights",
    "SF": "sending activations",
    "RF": "receiving activations",
    "SB": "sending gradients",
    "RB": "receiving gradients",
    "G": "reducing gradients",
    "A": "agreement of all workers",
    "U": "update of the weights",
    "data": "loading data",
}
"""What each kind of action is called when a person asks."""
PAGE_WORDS: Mapping[str, object] = {
    "span_families": [[family.name, family.colour] for family in _FAMILIES], "words": dict(_WORDS),
}  # fmt: skip
"""What the page needs to know of spans."""


def _family_of(kind: str) -> _Family:
    """The family of a kind of action; what is unknown is drawn as loading is."""
    return next((family for family in _FAMILIES if kind in family.kinds), _FAMILIES[-1])


def _is_compute(span: Span) -> bool:
    return _family_of(span.kind).name in _COMPUTE_FAMILIES


def _action_text(span: Span) -> str:
    """The action as schedules write it: `F0.3`, `SF0.3>5`, `U1`, a reduction with its bucket; without batch."""
    if span.kind not in _ACTION_KINDS:
        return span.kind
    text = str(Action(Kind(span.kind), span.stage, 0, span.microbatch, span.peer))
    return f"{text}/{span.peer}" if span.kind == Kind.REDUCE else text


def _lanes(spans: Sequence[Span]) -> tuple[int, ...]:
    """A lane for each span: 0 computes, 1 … 3 communicate, each span in the first lane that is free.

    More overlap than there are lanes falls into the last one.
    """
    free: dict[tuple[int, int], float] = {}
    chosen = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda index: spans[index].start_s):
        span = spans[index]
        if not _is_compute(span):
            tried = range(1, _NUM_COMMUNICATION_LANES)
            open_lanes = (lane for lane in tried if free.get((span.worker, lane), span.start_s) <= span.start_s)
            lane = next(open_lanes, _NUM_COMMUNICATION_LANES)
            free[span.worker, lane] = max(span.stop_s, free.get((span.worker, lane), 0.0))
            chosen[index] = lane
    return tuple(chosen)


class _Window(NamedTuple):
    """A stretch of time."""

    start_s: float
    stop_s: float


def _whole(spans: Iterable[Span]) -> _Window:
    """From the first start to the last stop."""
    edges = [(span.start_s, span.stop_s) for span in spans]
    return _Window(min(start for start, _ in edges), max(stop for _, stop in edges))


def _one_step(spans: Sequence[Span]) -> _Window:
    """From the start to the end of the batch in the middle: a step in the steady state."""
    batches = sorted({span.batch for span in spans if _is_compute(span)} or {span.batch for span in spans})
    middle = batches[len(batches) // 2]
    return _whole(span for span in spans if span.batch == middle)


def _thin(spans: Sequence[Span], limit: int) -> tuple[Span, ...]:
    """At most about `limit` spans: whole batches around the middle one, so that what remains is complete."""
    if len(spans) <= limit:
        return tuple(spans)
    sizes = Counter(span.batch for span in spans)
    batches = sorted(sizes)
    middle = batches[len(batches) // 2]
    kept, total = set[int](), 0
    for batch in sorted(batches, key=lambda batch: abs(batch - middle)):
        total += sizes[batch]
        if kept and total > limit:
            break
        kept.add(batch)
    return tuple(span for span in spans if span.batch in kept)


def _row_names(record: Record) -> list[str]:
    """For each worker its device and stages: `0:7 · stage 1`."""
    stages = record.plan.stages_of
    return [
        f"{device} · stage {'+'.join(map(str, stages[worker]))}" for worker, device in enumerate(record.plan.devices)
    ]


def _busy_shares(record: Record) -> tuple[float | None, ...]:
    """For each worker the share of time in which it computed, as the record says, or as its spans do."""
    told = {use.device: use.busy_share for use in record.devices}
    shares = [told.get(str(device)) for device in record.plan.devices]
    if record.spans and None in shares:
        window = _whole(record.spans)
        length = window.stop_s - window.start_s
        sums = [0.0] * len(shares)
        for span in filter(_is_compute, record.spans):
            sums[span.worker] += span.stop_s - span.start_s
        shares = [min(total / length, 1.0) if share is None and length else share for share, total in zip(shares, sums)]
    return tuple(shares)


# ── on the page ─────────────────────────────────────────────────────────────────────────────────────────


def run_data(case: Case, limit: int) -> _Plain:
    """One run's timeline and memory; times in microseconds from its first span."""
    record = case.record
    spans = _thin(record.spans, limit)
    start_s = _whole(spans).start_s if spans else 0.0
    window = _one_step(spans) if spans else None
    curves: dict[str, _Plain] = {}
    for use in record.devices:
        if use.memory_s:  # devices with the same curve share it
            curve = _memory_curve(use, start_s)
            curves.setdefault(json.dumps(curve), {"devices": [], **curve})["devices"].append(use.device)
    return {
        "rows": _row_names(record),
        "devices": [str(device) for device in record.plan.devices],
        "stages": [[str(device) for device in stage.devices] for stage in record.plan.stages],
        "busy": list(_busy_shares(record)),
        "several": record.plan.num_microbatches > 1,
        "notes": list(case.notes(on_time=True)),
        "num_left_out": len(record.spans) - len(spans),
        "window": [_micro(edge - start_s) for edge in window] if window else None,
        "spans": _span_groups(spans, start_s),
        "memory": list(curves.values()),
    }


def _micro(value_s: float) -> float:
    """Microseconds, to a hundredth: shorter to write, and no reader sees more."""
    return round(value_s * 1e6, 2)


def _span_groups(spans: Sequence[Span], start_s: float) -> _Plain:
    """Spans column by column, those of workers that did the same at the same time once; the page writes them out."""
    families_by_name = [family.name for family in _FAMILIES]
    kinds = sorted({span.kind for span in spans})
    texts = list(dict.fromkeys(map(_action_text, spans)))
    number_of = {text: number for number, text in enumerate(texts)}
    rows: dict[int, list[tuple[float, ...]]] = {}
    for span, lane in zip(spans, _lanes(spans)):
        times = _micro(span.start_s - start_s), _micro(span.stop_s - span.start_s)
        text = number_of[_action_text(span)]
        rows.setdefault(span.worker, []).append((kinds.index(span.kind), lane, span.batch, text, *times))
    alike: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    for worker, own in rows.items():
        alike.setdefault(tuple(own), []).append(worker)
    names = ("kind", "lane", "batch", "text", "start", "length")
    groups = ({"workers": workers, **dict(zip(names, map(list, zip(*own))))} for own, workers in alike.items())
    return {
        "kinds": kinds, "families": [families_by_name.index(_family_of(kind).name) for kind in kinds], "texts": texts,
        "groups": list(groups),
    }  # fmt: skip


def stride(number: int) -> int:
    """Every which point of a curve is drawn: more than 600 are more than a screen has columns for."""
    return max(-(-number // 600), 1)


def _memory_curve(use: DeviceUse, start_s: float) -> _Plain:
    """A device's memory over time, the highest moment of each stretch; one number where a kind never changes."""
    kinds = [kind for kind in MEMORY_KINDS if kind in use.memory_parts]
    totals = [sum(use.memory_parts[kind][index] for kind in kinds) for index in range(len(use.memory_s))]
    firsts = range(0, len(totals), stride(len(totals)))
    stretches = (range(first, min(first + firsts.step, len(totals))) for first in firsts)
    kept = [max(stretch, key=totals.__getitem__) for stretch in stretches]
    parts = {kind: [use.memory_parts[kind][index] for index in kept] for kind in kinds}
    peak = f"{size(max(totals))} at {seconds(use.memory_s[totals.index(max(totals))] - start_s)}" if totals else ""
    return {
        "time": [_micro(use.memory_s[index] - start_s) for index in kept],
        "parts": {kind: part[0] if len(set(part)) == 1 else part for kind, part in parts.items()}, "peak": peak,
    }  # fmt: skip


# ── as a picture ────────────────────────────────────────────────────────────────────────────────────────


class _Layout(NamedTuple):
    """Sizes of the picture, in pixels."""

    label: int = 120
    row: int = 40
    compute: int = 20
    lane: int = 4
    top: int = 30


_AT = _Layout()
_SVG_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.idle { fill: #e9e9ee } .tag { fill: #fff; font-size: 10px; text-anchor: middle; pointer-events: none }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .idle { fill: #33343b } .tag { fill: #fff } }
"""


def timeline_svg(record: Record, width: int = 960) -> str:
    """One step as an SVG picture: a row a worker, compute above communication; a title on each span says its action."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0'
    if not record.spans:
        return f'{head} {width} 40" width="{width}"><text x="0" y="24">this record has no spans</text></svg>\n'
    window = _one_step(record.spans)
    spans = [span for span in record.spans if span.stop_s > window.start_s and span.start_s < window.stop_s]
    rows = _row_names(record)
    height = _AT.top + _AT.row * len(rows) + 8
    parts = [f'{head} {width} {height}" width="{width}" role="img">']
    parts += [f"<title>{escape(f'{record.name}: {seconds(window.stop_s - window.start_s)}, {record.source}')}</title>"]
    parts.append(f"<style>{_SVG_STYLE}</style>")
    for number, family in enumerate(_FAMILIES):
        x = _AT.label + 96 * number
        parts.append(f'<rect x="{x}" y="4" width="12" height="12" rx="2" fill="{family.colour}"/>')
        parts.append(f'<text x="{x + 17}" y="14">{family.name}</text>')
    for worker, name in enumerate(rows):
        y = _AT.top + _AT.row * worker
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        parts.append(f'<rect class="idle" x="{_AT.label}" y="{y}" width="{width - _AT.label}" height="20"/>')
    parts += (_svg_span(span, lane, window, width) for span, lane in zip(spans, _lanes(spans)))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _svg_span(span: Span, lane: int, window: _Window, width: int) -> str:
    """One span, cut at the window's edges, with its action in it where that fits."""
    scale = (width - _AT.label) / (window.stop_s - window.start_s)
    left = _AT.label + max(span.start_s - window.start_s, 0.0) * scale
    right = _AT.label + (min(span.stop_s, window.stop_s) - window.start_s) * scale
    y = _AT.top + _AT.row * span.worker + (0 if lane == 0 else _AT.compute + 1 + _AT.lane * (lane - 1))
    height = _AT.compute if lane == 0 else _AT.lane - 1
    box = f'x="{left:.2f}" y="{y}" width="{max(right - left - 0.5, 0.5):.2f}" height="{height}"'
    title = f"{_action_text(span)} of batch {span.batch}: {_WORDS.get(span.kind, span.kind)}, "
    title += seconds(span.stop_s - span.start_s)
    shape = f'<rect {box} fill="{_family_of(span.kind).colour}"><title>{escape(title)}</title></rect>'
    if lane == 0 and right - left > 9 * len(_action_text(span)):
        shape += f'<text class="tag" x="{(left + right) / 2:.1f}" y="{y + 14}">{escape(_action_text(span))}</text>'
    return shape


# ── as a trace ──────────────────────────────────────────────────────────────────────────────────────────

_RECEIPT_OF: Mapping[str, str] = {"SF": "RF", "SB": "RB"}


def chrome_trace(record: Record) -> dict[str, Any]:
    """The Trace Event Format: a process a worker, a thread a lane, arrows for transfers, counters for memory."""
    events: list[_Plain] = []
    for worker, name in enumerate(_row_names(record)):
        about: _Plain = {"ph": "M", "pid": worker}
        events.append({**about, "name": "process_name", "args": {"name": f"worker {worker} · {name}"}})
        events.append({**about, "name": "process_sort_index", "args": {"sort_index": worker}})
    drawn = list(zip(record.spans, _lanes(record.spans)))
    for worker, lane in sorted({(span.worker, lane) for span, lane in drawn}):
        name = f"communication {lane}" if lane else "compute"
        events.append({"ph": "M", "pid": worker, "tid": lane, "name": "thread_name", "args": {"name": name}})
    events += (
        {
            "ph": "X", "pid": span.worker, "tid": lane,
            "ts": span.start_s * 1e6, "dur": (span.stop_s - span.start_s) * 1e6,  # the format counts in microseconds
            "name": _action_text(span), "cat": _family_of(span.kind).name,
            "args": {"what": _WORDS.get(span.kind, span.kind), "batch": span.batch, "stage": span.stage},
        }
        for span, lane in drawn
    )  # fmt: skip
    events += _flow_events(drawn)
    workers = {str(device): worker for worker, device in enumerate(record.plan.devices)}
    for use in record.devices:
        if use.device in workers:
            events += _memory_events(use, workers[use.device])
    told = {"name": record.name, "source": record.source, "model": record.plan.model, "cluster": record.cluster}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _flow_events(drawn: Sequence[tuple[Span, int]]) -> Iterator[_Plain]:
    """An arrow from each send to the receipt of the same rows at the other worker, where the record has both."""
    ordered = sorted(drawn, key=lambda pair: pair[0].start_s)
    receipts: dict[object, deque[tuple[Span, int]]] = {}
    for span, lane in ordered:
        if span.kind in _RECEIPT_OF.values():
            key = span.kind, span.peer, span.worker, span.batch, span.microbatch
            receipts.setdefault(key, deque()).append((span, lane))
    for number, (sent, lane) in enumerate(ordered):
        # Both ends of a pair issue their transfers in the same order, so the first that waits is the one.
        waiting = receipts.get((_RECEIPT_OF.get(sent.kind), sent.worker, sent.peer, sent.batch, sent.microbatch))
        if waiting:
            received, other = waiting.popleft()
            about: _Plain = {"id": number, "name": _action_text(sent), "cat": "transfer", "bp": "e"}
            yield {"ph": "s", "pid": sent.worker, "tid": lane, "ts": sent.start_s * 1e6, **about}
            yield {"ph": "f", "pid": received.worker, "tid": other, "ts": received.stop_s * 1e6, **about}


def _memory_events(use: DeviceUse, worker: int) -> Iterator[_Plain]:
    """Memory over time as one counter a device, stacked by kind."""
    kinds = [kind for kind in MEMORY_KINDS if kind in use.memory_parts]
    for index, time_s in enumerate(use.memory_s):
        parts = {kind: use.memory_parts[kind][index] for kind in kinds}
        yield {"ph": "C", "pid": worker, "name": "memory", "ts": time_s * 1e6, "args": parts}
