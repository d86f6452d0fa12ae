"""The timeline as a picture for documents, and as bars for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rich.text import Text

from stagewright.record import Record, Span
from stagewright.report.figures import seconds
from stagewright.report.timeline import (
    FAMILIES,
    IDLE_MARK,
    WORDS,
    Family,
    Window,
    action_text,
    busy_shares,
    family_of,
    inside,
    is_compute,
    lanes,
    one_step,
    row_names,
)

_LABEL_WIDTH, _ROW_HEIGHT, _COMPUTE_HEIGHT, _LANE_HEIGHT, _TOP = 120, 40, 20, 4, 30

_SVG_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #333 }
.idle { fill: #e9e9ee } .tag { fill: #fff; font-size: 10px; text-anchor: middle; pointer-events: none }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .idle { fill: #33343b } .tag { fill: #fff } }
"""


def timeline_svg(record: Record, *, window: Window | None = None, width: int = 960) -> str:
    """One step as an SVG picture: a row a worker, compute above communication; a title on each span says its action."""
    if not record.spans:
        return _empty_svg(width)
    window = window or one_step(record.spans)
    spans = inside(record.spans, window)
    rows = row_names(record)
    height = _TOP + _ROW_HEIGHT * len(rows) + 8
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">']
    parts += [f"<title>{escape(f'{record.name}: {seconds(window.stop_s - window.start_s)}, {record.source}')}</title>"]
    parts += [f"<style>{_SVG_STYLE}</style>", *_svg_legend()]
    for worker, name in enumerate(rows):
        y = _TOP + _ROW_HEIGHT * worker
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        parts.append(f'<rect class="idle" x="{_LABEL_WIDTH}" y="{y}" width="{width - _LABEL_WIDTH}" height="20"/>')
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
        x = _LABEL_WIDTH + 96 * number
        yield f'<rect x="{x}" y="4" width="12" height="12" rx="2" fill="{family.colour}"/>'
        yield f'<text x="{x + 17}" y="14">{family.name}</text>'


def _svg_span(span: Span, lane: int, window: Window, width: int) -> str:
    """One span, cut at the window's edges, with its action in it where that fits."""
    scale = (width - _LABEL_WIDTH) / (window.stop_s - window.start_s)
    left = _LABEL_WIDTH + max(span.start_s - window.start_s, 0.0) * scale
    right = _LABEL_WIDTH + (min(span.stop_s, window.stop_s) - window.start_s) * scale
    y = _TOP + _ROW_HEIGHT * span.worker + (0 if lane == 0 else _COMPUTE_HEIGHT + 1 + _LANE_HEIGHT * (lane - 1))
    height = _COMPUTE_HEIGHT if lane == 0 else _LANE_HEIGHT - 1
    box = f'x="{left:.2f}" y="{y}" width="{max(right - left - 0.5, 0.5):.2f}" height="{height}"'
    title = f"{action_text(span)} of batch {span.batch}: {WORDS.get(span.kind, span.kind)}, "
    title += seconds(span.stop_s - span.start_s)
    shape = f'<rect {box} fill="{family_of(span.kind).colour}"><title>{escape(title)}</title></rect>'
    if lane == 0 and right - left > 9 * len(action_text(span)):
        shape += f'<text class="tag" x="{(left + right) / 2:.1f}" y="{y + 14}">{escape(action_text(span))}</text>'
    return shape


def timeline_text(record: Record, width: int = 72, *, window: Window | None = None) -> Text:
    """One step as bars of characters, a row a worker, the busy share behind it; the last line says what they mean.

    0:0 · stage 0  ████████▓▓▓▓▓▓▓▓▓▓▓▓▓▓▌·  97 %
    0:1 · stage 1  ····████▓▓▓▓▓▌···········  37 %
    """
    if not record.spans:
        return Text("this record has no spans", style="dim")
    window = window or one_step(record.spans)
    names, shares = row_names(record), busy_shares(record)
    label = max(map(len, names))
    cells = max(width - label - 8, 10)
    text = Text(no_wrap=True)
    for worker, (name, share) in enumerate(zip(names, shares)):
        mine = [span for span in inside(record.spans, window) if span.worker == worker]
        text.append(f"{name:<{label}}  ")
        text.append_text(_bar(mine, window, cells))
        text.append(f"  {'' if share is None else f'{share:.0%}':>4}\n")
    return text.append_text(_text_legend(window))


def _bar(spans: Sequence[Span], window: Window, cells: int) -> Text:
    """One worker's row: each character is what its slice of time was for; computing outranks communicating."""
    computing = _covered([span for span in spans if is_compute(span)], window, cells)
    communicating = _covered([span for span in spans if not is_compute(span)], window, cells)
    half_s = (window.stop_s - window.start_s) / cells / 2
    text = Text()
    for busy, other in zip(computing, communicating):
        shown = busy if sum(busy.values()) >= half_s else other
        best = max(shown, key=lambda family: shown[family], default=None)
        text.append(IDLE_MARK if best is None else best.mark, style="dim" if best is None else best.colour)
    return text


def _covered(spans: Sequence[Span], window: Window, cells: int) -> list[dict[Family, float]]:
    """For each slice of a window the seconds that each family took of it."""
    slice_s = (window.stop_s - window.start_s) / cells
    found: list[dict[Family, float]] = [{} for _ in range(cells)]
    for span in spans:
        family = family_of(span.kind)
        first = max(int((span.start_s - window.start_s) / slice_s), 0)
        last = min(int((span.stop_s - window.start_s) / slice_s), cells - 1)
        for cell in range(first, last + 1):
            edge = window.start_s + cell * slice_s
            part = min(span.stop_s, edge + slice_s) - max(span.start_s, edge)
            found[cell][family] = found[cell].get(family, 0.0) + part
    return found


def _text_legend(window: Window) -> Text:
    """`█ forward  ▓ backward …  149.2 ms`."""
    text = Text()
    for family in FAMILIES:
        text.append(f"{family.mark} ", style=family.colour).append(f"{family.name}  ")
    return text.append(f"{IDLE_MARK} idle   {seconds(window.stop_s - window.start_s)}", style="dim")
