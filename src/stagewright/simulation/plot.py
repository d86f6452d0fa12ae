"""A sweep as a small picture: images a second over the value that was swept, beside the straight line."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stagewright.simulation.whatif import Point

_WIDTH, _HEIGHT, _MARGIN = 640, 360, 56


def plot_svg(points: Sequence[Point]) -> str:
    """An SVG with a dot a point; the dashed line is what proportional growth from the first point would be."""
    ordered = sorted(points, key=lambda point: point.value)
    first = ordered[0]
    most_x = max(point.value for point in ordered)
    ideal = first.record.samples_per_s * most_x / first.value if first.value else 0.0
    most_y = max(*(point.record.samples_per_s for point in ordered), ideal)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _MARGIN + x / most_x * (_WIDTH - 2 * _MARGIN)
        return round(across, 1), round(_HEIGHT - _MARGIN - y / most_y * (_HEIGHT - 2 * _MARGIN), 1)

    dots = [place(point.value, point.record.samples_per_s) for point in ordered]
    line = " ".join(f"{x},{y}" for x, y in dots)
    start, end = place(first.value, first.record.samples_per_s), place(most_x, ideal)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" stroke="#999" stroke-dasharray="4 4"/>',
        f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/>',
    ]
    for point, (x, y) in zip(ordered, dots):
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="#2563eb"/>')
        parts.append(f'<text x="{x}" y="{y - 10}" text-anchor="middle">{point.record.samples_per_s:,.0f}</text>')
        parts.append(f'<text x="{x}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{escape(point.label)}</text>')
    parts.append(
        f'<text x="{_MARGIN}" y="{_MARGIN - 28}">images/s; dashed: in proportion to the first point</text></svg>'
    )
    return "\n".join(parts)
