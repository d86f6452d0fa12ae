"""Spans as rows and lanes: what the page, the picture for documents and the trace viewer all draw.

worker 0 │ compute        F0 ─ F1 ── B0 ─── U        one lane: a worker computes one thing at a time
         │ communication     SF ─ SF    RB           up to three lanes: transfers and reductions overlap
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from stagewright.record import MEMORY_KINDS, DeviceUse, Record, Span
from stagewright.report.figures import seconds
from stagewright.schedule import Action, Kind

NUM_COMMUNICATION_LANES = 3
_ACTION_KINDS = frozenset(Kind)


class _Family(NamedTuple):
    """Kinds of actions that are drawn alike."""

    name: str
    kinds: tuple[str, ...]
    colour: str
    """Told apart under protanopia, deuteranopia and tritanopia, on white and on black; a test computes it."""


FAMILIES = (
    _Family("forward", ("F",), "#2f7fd0"),
    _Family("backward", ("B", "I", "W"), "#f08a24"),
    _Family("update", ("U",), "#b3368f"),
    _Family("transfer", ("SF", "RF", "SB", "RB"), "#0f9d7a"),
    _Family("reduction", ("G", "A"), "#7a5c2e"),
    _Family("loading", ("data",), "#8e8e99"),
)
_COMPUTE_FAMILIES = ("forward", "backward", "update")

WORDS: Mapping[str, str] = {
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


def family_of(kind: str) -> _Family:
    """The family of a kind of action; what is unknown is drawn as loading is."""
    return next((family for family in FAMILIES if kind in family.kinds), FAMILIES[-1])


def _is_compute(span: Span) -> bool:
    """Whether a span stands in the compute lane."""
    return family_of(span.kind).name in _COMPUTE_FAMILIES


def action_text(span: Span) -> str:
    """The action as schedules write it: `F0.3`, `SF0.3>5`, `U1`; the batch is told apart."""
    if span.kind not in _ACTION_KINDS:
        return span.kind
    return str(Action(Kind(span.kind), span.stage, 0, span.microbatch, span.peer))


def lanes(spans: Sequence[Span]) -> tuple[int, ...]:
    """A lane for each span: 0 computes, 1 … 3 communicate, each span in the first lane that is free.

    More overlap than there are lanes falls into the last one.
    """
    free: dict[tuple[int, int], float] = {}
    chosen = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda index: spans[index].start_s):
        span = spans[index]
        if _is_compute(span):
            continue
        open_lanes = (lane for lane in _LANE_RANGE if free.get((span.worker, lane), span.start_s) <= span.start_s)
        lane = next(open_lanes, NUM_COMMUNICATION_LANES)
        free[span.worker, lane] = max(span.stop_s, free.get((span.worker, lane), 0.0))
        chosen[index] = lane
    return tuple(chosen)


_LANE_RANGE = range(1, NUM_COMMUNICATION_LANES + 1)


class Window(NamedTuple):
    """A stretch of time."""

    start_s: float
    stop_s: float


def whole(spans: Iterable[Span]) -> Window:
    """From the first start to the last stop."""
    edges = [(span.start_s, span.stop_s) for span in spans]
    return Window(min(start for start, _ in edges), max(stop for _, stop in edges))


def one_step(spans: Sequence[Span]) -> Window:
    """From the start to the end of the batch in the middle: a step in the steady state."""
    batches = sorted({span.batch for span in spans if _is_compute(span)} or {span.batch for span in spans})
    middle = batches[len(batches) // 2]
    return whole(span for span in spans if span.batch == middle)


def inside(spans: Iterable[Span], window: Window) -> tuple[Span, ...]:
    """The spans that a window touches."""
    return tuple(span for span in spans if span.stop_s > window.start_s and span.start_s < window.stop_s)


def thin(spans: Sequence[Span], limit: int) -> tuple[Span, ...]:
    """At most about `limit` spans: whole batches around the middle one, so that what remains is complete."""
    if len(spans) <= limit:
        return tuple(spans)
    batches = sorted({span.batch for span in spans})
    middle = batches[len(batches) // 2]
    ranked = sorted(batches, key=lambda batch: abs(batch - middle))
    sizes = dict.fromkeys(batches, 0)
    for span in spans:
        sizes[span.batch] += 1
    kept, total = set(ranked[:1]), sizes[middle]
    for batch in ranked[1:]:
        total += sizes[batch]
        if total > limit:
            break
        kept.add(batch)
    return tuple(span for span in spans if span.batch in kept)


def row_names(record: Record) -> tuple[str, ...]:
    """For each worker its device and stages: `0:7 · stage 1`."""
    names = []
    for worker, device in enumerate(record.plan.devices):
        names.append(f"{device} · stage {'+'.join(map(str, record.plan.stages_of[worker]))}")
    return tuple(names)


def busy_shares(record: Record) -> tuple[float | None, ...]:
    """For each worker the share of time in which it computed, as the record says, or as its spans do."""
    told = {use.device: use.busy_share for use in record.devices}
    shares = [told.get(str(device)) for device in record.plan.devices]
    if record.spans and None in shares:
        window = whole(record.spans)
        length = window.stop_s - window.start_s
        sums = [0.0] * len(shares)
        for span in filter(_is_compute, record.spans):
            sums[span.worker] += span.stop_s - span.start_s
        shares = [min(total / length, 1.0) if share is None and length else share for share, total in zip(shares, sums)]
    return tuple(shares)


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
    if not record.spans:
        return _empty_svg(width)
    window = one_step(record.spans)
    spans = inside(record.spans, window)
    rows = row_names(record)
    height = _AT.top + _AT.row * len(rows) + 8
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">']
    parts += [f"<title>{escape(f'{record.name}: {seconds(window.stop_s - window.start_s)}, {record.source}')}</title>"]
    parts += [f"<style>{_SVG_STYLE}</style>", *_svg_legend()]
    for worker, name in enumerate(rows):
        y = _AT.top + _AT.row * worker
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        parts.append(f'<rect class="idle" x="{_AT.label}" y="{y}" width="{width - _AT.label}" height="20"/>')
    parts += (_svg_span(span, lane, window, width) for span, lane in zip(spans, lanes(spans)))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _empty_svg(width: int) -> str:
    """A picture that says that there is nothing to draw."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 40" width="{width}">'
        '<text x="0" y="24">this record has no spans</text></svg>\n'
    )


def _svg_legend() -> Iterator[str]:
    """A square and a word for each family, in a line."""
    for number, family in enumerate(FAMILIES):
        x = _AT.label + 96 * number
        yield f'<rect x="{x}" y="4" width="12" height="12" rx="2" fill="{family.colour}"/>'
        yield f'<text x="{x + 17}" y="14">{family.name}</text>'


def _svg_span(span: Span, lane: int, window: Window, width: int) -> str:
    """One span, cut at the window's edges, with its action in it where that fits."""
    scale = (width - _AT.label) / (window.stop_s - window.start_s)
    left = _AT.label + max(span.start_s - window.start_s, 0.0) * scale
    right = _AT.label + (min(span.stop_s, window.stop_s) - window.start_s) * scale
    y = _AT.top + _AT.row * span.worker + (0 if lane == 0 else _AT.compute + 1 + _AT.lane * (lane - 1))
    height = _AT.compute if lane == 0 else _AT.lane - 1
    box = f'x="{left:.2f}" y="{y}" width="{max(right - left - 0.5, 0.5):.2f}" height="{height}"'
    title = f"{action_text(span)} of batch {span.batch}: {WORDS.get(span.kind, span.kind)}, "
    title += seconds(span.stop_s - span.start_s)
    shape = f'<rect {box} fill="{family_of(span.kind).colour}"><title>{escape(title)}</title></rect>'
    if lane == 0 and right - left > 9 * len(action_text(span)):
        shape += f'<text class="tag" x="{(left + right) / 2:.1f}" y="{y + 14}">{escape(action_text(span))}</text>'
    return shape


_Event = dict[str, Any]
_RECEIPT_OF: Mapping[str, str] = {"SF": "RF", "SB": "RB"}


def chrome_trace(record: Record) -> dict[str, Any]:
    """The Trace Event Format: a process a worker, a thread a lane, arrows for transfers, counters for memory."""
    chosen = lanes(record.spans)
    events = [*_row_events(record), *_lane_events(record, chosen)]
    events += [_span_event(span, lane) for span, lane in zip(record.spans, chosen)]
    events += _flow_events(record.spans, chosen)
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


def _flow_events(spans: Sequence[Span], chosen: tuple[int, ...]) -> Iterator[_Event]:
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
