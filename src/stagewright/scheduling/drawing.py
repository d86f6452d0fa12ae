"""A schedule over time: as text, a column a unit of time, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from stagewright.schedule import Kind, Schedule
from stagewright.scheduling.ideal import IdealRun, TimedAction, run_ideally
from stagewright.scheduling.timing import Costs

_COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f2a541",
    Kind.BACKWARD_INPUT: "#f2a541",
    Kind.BACKWARD_WEIGHT: "#72a98f",
}
_UNIT_WIDTH, _ROW_HEIGHT, _GAP, _MARGIN = 28, 22, 4, 48


def timed_grid(schedule: Schedule, num_batches: int | None = None) -> str:
    """Compute over time with free transfers, forward taking one column, backward two; idle time is blank.

    0 │ F0 F1       B0──  B1──
    1 │    F0 B0── F1 B1──
    """
    num_batches = schedule.num_batches_drawn if num_batches is None else num_batches
    run = run_ideally(schedule, num_batches)
    labels = [
        [(span, schedule.cell(span.action, num_batches)) for span in spans if span.stop > span.start]
        for spans in run.spans
    ]
    unit = 1 + max((len(label) for row in labels for _, label in row), default=1)
    width = len(str(len(labels) - 1))
    return "\n".join(f"{worker:>{width}} │ {_timed_row(row, unit)}".rstrip() for worker, row in enumerate(labels))


def _timed_row(row: list[tuple[TimedAction, str]], unit: int) -> str:
    line = ""
    for span, label in row:
        length = round(span.stop - span.start) * unit - 1
        line += " " * (round(span.start) * unit - len(line)) + label.ljust(length, "─" if length >= unit else " ") + " "
    return line.rstrip()


def draw_svg(schedule: Schedule, num_batches: int | None = None, costs: Costs | None = None) -> str:
    """The timed grid as an SVG picture: a row a worker, a box an action, its name in the box and in its tooltip."""
    num_batches = schedule.num_batches_drawn if num_batches is None else num_batches
    run = run_ideally(schedule, num_batches, costs)
    shortest = min((span.stop - span.start for span in _computing(run)), default=1.0)
    scale = _UNIT_WIDTH / shortest
    width = _MARGIN + run.length * scale + _GAP
    height = len(run.spans) * (_ROW_HEIGHT + _GAP) + _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(schedule.plan.policy)}, {escape(schedule.plan.placement)}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        *_boxes(schedule, run, num_batches, scale),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _computing(run: IdealRun) -> Iterator[TimedAction]:
    return (span for spans in run.spans for span in spans if span.stop > span.start)


def _boxes(schedule: Schedule, run: IdealRun, num_batches: int, scale: float) -> Iterator[str]:
    for worker, spans in enumerate(run.spans):
        top = _GAP + worker * (_ROW_HEIGHT + _GAP)
        middle = top + _ROW_HEIGHT / 2 + 4
        yield f'<text x="{_MARGIN - 8}" y="{middle:.0f}" text-anchor="end">{worker}</text>'
        for span in spans:
            if span.stop == span.start:
                continue
            left, width = _MARGIN + span.start * scale, (span.stop - span.start) * scale
            label = escape(schedule.cell(span.action, num_batches))
            yield (
                f'<rect x="{left:.1f}" y="{top}" width="{width - 1:.1f}" height="{_ROW_HEIGHT}" rx="2" '
                f'fill="{_COLOURS[span.action.kind]}"><title>{label} {span.start:g} – {span.stop:g}</title></rect>'
                f'<text x="{left + width / 2:.1f}" y="{middle:.0f}" text-anchor="middle" fill="white">{label}</text>'
            )
