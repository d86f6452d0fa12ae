"""Predicted and measured figures side by side, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from rich.table import Table as RichTable
from rich.text import Text

from stagewright.record import Record
from stagewright.report.cases import Case, make_cases, plan_key, work_key
from stagewright.report.comparison import peak_bytes
from stagewright.report.figures import GAP, percent, rate, seconds
from stagewright.report.tables import SOURCE_MARKS, memory_text

_ORDER = ("simulated", "rehearsed", "measured")

_FIGURES: tuple[tuple[str, Callable[[Case], str], Callable[[Case], float] | None], ...] = (
    ("step", lambda case: seconds(case.step_s), lambda case: case.step_s),
    ("images/s", lambda case: rate(case.images_per_s), lambda case: case.images_per_s),
    ("epoch", lambda case: _epoch_text(case), None),
    ("memory first / last", memory_text, peak_bytes),
    ("busiest device", lambda case: f"{case.busiest_share:.0%}" if case.busiest_share else GAP, None),
    ("limited by", lambda case: case.record.limit or GAP, None),
)
"""A figure's name, its text, and its value where a prediction of it has an error."""


def comparison_table(records: Iterable[Record]) -> RichTable:
    """Each case's figures, simulated, rehearsed and measured side by side.

                ◇ simulated   ● measured    error
    vgg16-7-1
      step         149.2 ms     150.5 ms   −0.9 %
    """
    cases = make_cases(records)
    present = [source for source in _ORDER if any(case.source == source for case in cases)]
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for source in present:
        table.add_column(f"{SOURCE_MARKS[source]} {source}", justify="right")
    if len(present) > 1:
        table.add_column("error", justify="right")
    for group in _comparable(cases):
        _add_group(table, group, present)
    return table


def _comparable(cases: Sequence[Case]) -> tuple[dict[str, Case], ...]:
    """Cases of one work and one plan, or at least one name, together, by source."""
    groups: list[dict[str, Case]] = []
    for case in cases:
        free = [group for group in groups if case.source not in group]
        same_plan = (group for group in free if all(_is_alike(case, other, plan=True) for other in group.values()))
        same_name = (group for group in free if all(_is_alike(case, other, plan=False) for other in group.values()))
        home = next(same_plan, None) or next(same_name, None)
        if home is None:
            groups.append({case.source: case})
        else:
            home[case.source] = case
    return tuple(groups)


def _is_alike(case: Case, other: Case, *, plan: bool) -> bool:
    """Whether two cases do the same work, under the same plan or else under the same name."""
    if work_key(case.record) != work_key(other.record):
        return False
    return plan_key(case.plan) == plan_key(other.plan) if plan else case.name == other.name


def _add_group(table: RichTable, group: Mapping[str, Case], present: Sequence[str]) -> None:
    """A line with the name and the work, then a line a figure; figures that no case has are left out."""
    first = next(iter(group.values()))
    if table.row_count:
        table.add_row()
    table.add_row(Text(first.name, style="bold"))
    for title, text, value in _FIGURES:
        cells = [text(group[source]) if source in group else GAP for source in present]
        if any(cell != GAP for cell in cells):
            error = [_error_text(group, value)] if len(present) > 1 else []
            table.add_row(f"  {title}", *map(Text, [*cells, *error]))


def _error_text(group: Mapping[str, Case], value: Callable[[Case], float] | None) -> str:
    """The prediction's error against the strongest evidence; nothing where one of them is missing."""
    found = group.get("measured") or group.get("rehearsed")
    predicted = group.get("simulated")
    if found is None or predicted is None or value is None or not value(found):
        return ""
    return percent(value(predicted) / value(found) - 1)


def _epoch_text(case: Case) -> str:
    """`14 min 13 s (1,281,167 images)`."""
    if not case.epochs_s:
        return GAP
    return f"{seconds(median(case.epochs_s))} ({case.record.epoch_images:,} images)"
