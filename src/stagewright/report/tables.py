"""The tables of a report, made once and shown on the page, in Markdown and in a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Literal, NamedTuple

from rich.table import Table as RichTable
from rich.text import Text

from stagewright.policy import RULES
from stagewright.record import DeviceUse
from stagewright.report.cases import Case, Failure, Results, Work, log_of, remarks, strategy, work_key
from stagewright.report.comparison import Pair, differences, families, find_base, work_sign, work_text, works
from stagewright.report.figures import GAP, percent, rate, rows_of, seconds, size, span_of, times

SOURCE_MARKS: Mapping[str, str] = {"measured": "●", "rehearsed": "◐", "simulated": "◇", "failed": "✕"}
"""A shape beside the word, so that no one has to tell rows apart by colour."""


class _Cell(NamedTuple):
    """One figure or word, what it sorts by, and what stands small beneath it."""

    text: str
    sort: float | str = ""
    note: str = ""
    href: str = ""


class _Row(NamedTuple):
    """The cells of one case; `kind` is its source, or `failed`, and then there is a reason."""

    kind: str
    cells: tuple[_Cell, ...]
    reason: str = ""


class _Column(NamedTuple):
    """A heading, and the side its cells lean to."""

    title: str
    align: Literal["left", "right"] = "left"


def _columns(titles: str) -> tuple[_Column, ...]:
    """The columns of `case | step>`, where > marks figures."""
    return tuple(
        _Column(title.rstrip(">"), "right" if title.endswith(">") else "left") for title in titles.split(" | ")
    )


@dataclass(frozen=True, kw_only=True)
class Table:
    """Headings and rows, with the sentences that must be read with them."""

    title: str
    columns: tuple[_Column, ...]
    rows: tuple[_Row, ...]
    notes: tuple[str, ...] = ()


_EMPTY = _Cell(GAP, -1.0)


def _number(value: float, text: str, note: str = "") -> _Cell:
    """A cell that sorts by its value."""
    return _Cell(text, value, note)


def _word(text: str, note: str = "") -> _Cell:
    """A cell that sorts by its text."""
    return _Cell(text or GAP, text.lower(), note)


def _source_cell(kind: str) -> _Cell:
    """`● measured`: a mark and a word."""
    return _word(f"{SOURCE_MARKS[kind]} {kind}")


_CASE_COLUMNS = _columns(
    "case | source | work | type | data | stages | "
    "static order | samples/s> | step> | memory first / last stage> | epoch time> | limited by | log"
)


def case_table(results: Results, folder: Path | None = None) -> Table:
    """Every case a row: type, data, stages, order, throughput with its spread, memory, epoch, log."""
    known = works(results.cases)
    signs = {work: work_sign(index) for index, work in enumerate(known)}
    rows = [_case_row(case, signs[work_key(case.record)], folder) for case in results.cases]
    rows += [_failure_row(failure, _CASE_COLUMNS) for failure in results.failures]
    return Table(title="All cases", columns=_CASE_COLUMNS, rows=tuple(rows), notes=_work_notes(known, signs))


_EPOCH_NOTE = "An epoch's time is that of the samples named beneath it, computed from the median step."


def _work_notes(known: Sequence[Work], signs: Mapping[Work, str]) -> tuple[str, ...]:
    """The warning that rows of different letters are not to be set against one another, and what the letters mean."""
    if len(known) < 2:
        return tuple(f"All rows do the same work: {work_text(work)}. {_EPOCH_NOTE}" for work in known)
    head = "These rows do different work. Compare samples/s and times only among rows of the same letter:"
    return head, *(f"{signs[work]}: {work_text(work)}" for work in known), _EPOCH_NOTE


def _case_row(case: Case, sign: str, folder: Path | None) -> _Row:
    """One case as a row."""
    plan, record = case.plan, case.record
    cells = (
        _word(case.name, "; ".join(remarks(record))),
        _source_cell(case.source),
        _word(sign),
        _word(strategy(plan), f"K = {', '.join(map(str, plan.versions))}" if not plan.is_synchronous else ""),
        _word(record.data),
        _word("-".join(map(str, plan.replicas)), plan.placement),
        _word("no" if RULES[plan.policy].by_arrival else "yes", plan.policy),
        _number(case.samples_per_s, rate(case.samples_per_s), _spread_text(case)),
        _number(case.step_s, seconds(case.step_s)),
        _memory_cell(case),
        _epoch_cell(case),
        _word(record.limit),
        _log_cell(case, folder),
    )
    return _Row(case.source, cells)


def _spread_text(case: Case) -> str:
    """`1,466–1,495 in 7 runs`, or how many steps a single run has."""
    if len(case.records) > 1:
        return f"{span_of(case.rates)} in {len(case.records)} runs"
    steps = len(case.record.step_s)
    return f"1 run, {steps:,} step{'s' * (steps != 1)}"


def _memory_cell(case: Case) -> _Cell:
    """The peaks of the fullest device of the first and the last stage, and what was seen of them from outside."""
    uses = [use for use in _outer_uses(case) if use is not None]
    if not uses:
        return _EMPTY
    driver = [use.driver_bytes for use in uses if use.driver_bytes]
    shares = [f"{use.driver_share:.0%}" for use in uses if use.driver_share is not None]
    seen = [_short_sizes(driver)] * bool(driver) + [f"{' / '.join(shares)} busy"] * bool(shares)
    return _number(uses[0].peak_bytes, _memory_text(case), f"driver {', '.join(seen)}" if seen else "")


def _epoch_cell(case: Case) -> _Cell:
    """Up to three repetitions' epochs, or their median and range; always with the samples that an epoch covers."""
    times_s = case.epochs_s
    if not times_s:
        return _EMPTY
    covers = f"{case.record.epoch_samples:,} samples"
    middle = sorted(times_s)[len(times_s) // 2]
    if len(times_s) <= 3:
        return _number(middle, " · ".join(map(seconds, times_s)), covers)
    return _number(middle, seconds(middle), f"{seconds(min(times_s))} to {seconds(max(times_s))}; {covers}")


def _log_cell(case: Case, folder: Path | None) -> _Cell:
    """A link to the log of the repetition that stands for the case."""
    path = log_of(case.files[case.records.index(case.record)])
    if path is None:
        return _word("")
    shown = relpath(path, folder) if folder else str(path)
    # Beside the case's name, only what the file's own name adds to it is worth the room.
    return _Cell(path.name.removeprefix(f"{case.name}."), path.name, href=Path(shown).as_posix())


def _failure_row(failure: Failure, columns: Sequence[_Column]) -> _Row:
    """A case that failed, with its reason where the figures would stand."""
    told = {"case": _word(failure.name), "source": _Cell("✕ failed", "failed", f"was to be {failure.source}")}
    told |= {"stages": _word(failure.placement), "limited by": _word(failure.reason), "model": _word(failure.model)}
    told |= {"against": _word(failure.reason)}
    return _Row("failed", tuple(told.get(column.title, _EMPTY) for column in columns), failure.reason)


_SCALING_COLUMNS = _columns(
    "case | source | model | num_nodes> | gpu_num_per_node> | "
    "batch_size_per_device> | precision | throughput> | speedup> | against"
)


def scaling_table(results: Results) -> Table:
    """Hosts, devices, rows a device, throughput, and speedup against the smallest run of the same kind."""
    rows = [_scaling_row(case, family) for family in families(results.cases) for case in family]
    rows += [_failure_row(failure, _SCALING_COLUMNS) for failure in results.failures]
    notes = (
        "Throughput is samples really processed, over the median step. A speedup is told only against a run with the "
        "same model, data, precision and source; what else differs stands beneath it.",
    )
    return Table(title="Scaling", columns=_SCALING_COLUMNS, rows=tuple(rows), notes=notes)


def _scaling_row(case: Case, family: Sequence[Case]) -> _Row:
    """One case as a row of the scaling table."""
    hosts = _per_host(case)
    even = str(hosts[0]) if len(set(hosts)) == 1 else ", ".join(map(str, hosts))
    base = find_base(case, family)
    cells = (
        _word(case.name),
        _source_cell(case.source),
        _word(case.plan.model),
        _number(len(hosts), str(len(hosts))),
        _number(max(hosts), even),
        _number(case.rows_per_device, rows_of(case.rows_per_device), f"batch {case.plan.batch:,}"),
        _word(case.record.precision),
        _number(case.samples_per_s, case.speed()),
        _EMPTY if base is None else _number(speedup(case, base), times(speedup(case, base))),
        _word("")
        if base is None
        else _word("itself" if base is case else base.name, "; ".join(differences(case, base))),
    )
    return _Row(case.source, cells)


def _per_host(case: Case) -> tuple[int, ...]:
    """How many devices of each host the plan uses."""
    hosts = [device.host for device in case.plan.devices]
    return tuple(hosts.count(host) for host in sorted(set(hosts)))


def speedup(case: Case, base: Case) -> float:
    """How many times as fast a case is as its base."""
    return case.samples_per_s / base.samples_per_s


_PAIR_COLUMNS = _columns(
    "case | held against | predicted> | found> | error> | memory predicted> | memory found> | memory error>"
)


def pair_table(pairs: Sequence[Pair]) -> Table:
    """Each prediction beside what a rehearsal or a measurement found."""
    notes = ("The error is (predicted − found) / found. Memory is first / last stage, its error that of the peak.",)
    rows = tuple(_Row(pair.found.source, _pair_cells(pair)) for pair in pairs)
    return Table(title="Predicted against measured", columns=_PAIR_COLUMNS, rows=rows, notes=notes)


def _pair_cells(pair: Pair) -> tuple[_Cell, ...]:
    """A pair's figures; what makes it less than fair stands beneath the name."""
    predicted, found, memory = pair.predicted, pair.found, pair.memory_error
    doubts = [] if pair.same_cluster else [f"predicted for {predicted.record.cluster}, run on {found.record.cluster}"]
    doubts += [] if pair.same_plan else ["the two plans differ"]
    return (
        _word(found.name, "; ".join(doubts)),
        _source_cell(found.source),
        _number(predicted.samples_per_s, found.speed(predicted.samples_per_s), seconds(predicted.step_s)),
        _number(found.samples_per_s, found.speed(), seconds(found.step_s)),
        _number(pair.rate_error, percent(pair.rate_error)),
        _word(_memory_text(predicted)),
        _word(_memory_text(found)),
        _EMPTY if memory is None else _number(memory, percent(memory)),
    )


def _memory_text(case: Case) -> str:
    """`6.9 / 3.1 GiB`: the first and the last stage, or one figure for one stage."""
    return _short_sizes([use.peak_bytes for use in _outer_uses(case) if use is not None]) or GAP


def _short_sizes(values: Sequence[int]) -> str:
    """Sizes with their unit once, where they share it: `6.9 / 3.1 GiB`."""
    texts = [size(value).split(" ") for value in values]
    if len({unit for _, unit in texts}) == 1:
        return " / ".join(figure for figure, _ in texts) + f" {texts[0][1]}"
    return " / ".join(" ".join(text) for text in texts)


def _outer_uses(case: Case) -> tuple[DeviceUse | None, ...]:
    """What the fullest devices of the first and the last stage held; one where there is one stage."""
    return (case.stage_uses[0], case.stage_uses[-1])[: len(case.plan.stages)]


def terminal_table(table: Table) -> RichTable:
    """The table for a terminal, which is narrow: a column a row of it, a line a figure, notes beneath."""
    shown = RichTable(box=None, pad_edge=False, show_header=False)
    for _ in (table.title, *table.rows):
        shown.add_column()
    for column, *cells in zip(table.columns, *(row.cells for row in table.rows)):
        shown.add_row(column.title, *(Text(f"{cell.text}\n{cell.note}".rstrip()) for cell in cells))
    return shown


def markdown_table(table: Table) -> str:
    """The table in Markdown; notes stand in brackets behind their figure, and nothing in a cell breaks the row."""
    heads = " | ".join(markdown_text(column.title) for column in table.columns)
    rules = " | ".join("---:" if column.align == "right" else "---" for column in table.columns)
    lines = [f"| {heads} |", f"| {rules} |"]
    lines += ("| " + " | ".join(map(_markdown_cell, row.cells)) + " |" for row in table.rows)
    return "\n".join(lines) + "\n"


def _markdown_cell(cell: _Cell) -> str:
    """`1,488 (1,466–1,495 in 7 runs)`."""
    text = markdown_text(cell.text)
    if cell.href:
        text = f"[{text}](<{cell.href.replace('<', '%3C').replace('>', '%3E').replace('|', '%7C')}>)"
    return f"{text} ({markdown_text(cell.note)})" if cell.note else text


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is: no HTML, no links, no new cells or lines."""
    escaped = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
