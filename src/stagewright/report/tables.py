"""The tables of a report, made once and shown on the page and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from stagewright.report.cases import Case, Failure, Pair, Results, differences, families, find_base, plan_key, strategy
from stagewright.report.figures import GAP, percent, rate, row_count, seconds, shared_unit, size, span_of, times
from stagewright.report.reaching import final_losses, find_goals, times_to_loss

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
    extra: bool = False
    """Whether the page shows it on demand."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Headings and rows, with the sentences that must be read with them."""

    title: str
    columns: tuple[_Column, ...]
    rows: tuple[_Row, ...]
    notes: tuple[str, ...] = ()


_EMPTY = _Cell(GAP, -1.0)


def _word(text: str, note: str = "") -> _Cell:
    """A cell that sorts by its text."""
    return _Cell(text or GAP, text.lower(), note)


def _source_cell(kind: str) -> _Cell:
    return _word(f"{SOURCE_MARKS[kind]} {kind}")


def _columns(titles: str) -> tuple[_Column, ...]:
    """The columns of `case | step> | log+`, where > marks figures, and + what is shown on demand."""
    return tuple(
        _Column(title.rstrip(">+"), "right" if ">" in title else "left", title.endswith("+"))
        for title in titles.split(" | ")
    )


def _failed(failures: Sequence[Failure], columns: Sequence[_Column]) -> list[_Row]:
    """The cases that failed, with the reason where the figures would stand."""
    rows = []
    for failure in failures:
        told = {"case": _word(failure.name), "source": _Cell("✕ failed", "failed", f"was to be {failure.source}")}
        told |= {"stages": _word(failure.placement), "model": _word(failure.model)}
        told |= dict.fromkeys(("limited by", "against"), _word(failure.reason))
        rows.append(_Row("failed", tuple(told.get(column.title, _EMPTY) for column in columns), failure.reason))
    return rows


# ── all cases ───────────────────────────────────────────────────────────────────────────────────────────

_CASE_COLUMNS = _columns(
    "case | samples/s> | source | work | type | stages | step> | memory first / last stage> | limited by | "
    "model+ | data+ | schedule+ | epoch time>+ | log+"
)


def case_table(results: Results, folder: Path | None = None) -> Table:
    """Every case a row: type, data, stages, order, throughput with its spread, memory, epoch, log."""
    known = dict.fromkeys(case.workload for case in results.cases)
    # `A` … `Z`, then `A2` …
    signs = {
        one: chr(ord("A") + number % 26) + (str(number // 26 + 1) if number >= 26 else "")
        for number, one in enumerate(known)
    }
    notes = _workload_notes({sign: str(one) for one, sign in signs.items()})
    unit = shared_unit(case.record for case in results.cases)
    rows = [_case_row(case, signs[case.workload], unit, folder) for case in results.cases]
    rows += _failed(results.failures, _CASE_COLUMNS)
    one_work = len(known) < 2
    columns = (each._replace(extra=each.extra or (each.title == "work" and one_work)) for each in _CASE_COLUMNS)
    return Table(title="All cases", columns=_in_unit(columns, unit), rows=tuple(rows), notes=notes)


def _in_unit(columns: Iterable[_Column], unit: str) -> tuple[_Column, ...]:
    """The columns with rates in a unit."""
    return tuple(each._replace(title=unit) if each.title == "samples/s" else each for each in columns)


def _rate_cell(case: Case, unit: str, note: str = "") -> _Cell:
    """A case's rate in a unit: tokens where all cases have some."""
    return _Cell(
        rate(case.samples_per_s * ((unit == "tokens/s" and case.record.sample_tokens) or 1.0)), case.samples_per_s, note
    )


def _workload_notes(told: Mapping[str, str]) -> tuple[str, ...]:
    """The warning that rows of different letters are not to be set against one another, and what the letters mean."""
    epoch = "An epoch's time is that of the samples named beneath it, computed from the median step."
    if len(told) < 2:
        return tuple(f"All rows do the same work: {text}. {epoch}" for text in told.values())
    head = "These rows do different work. Compare samples/s and times only among rows of the same letter:"
    return head, *(f"{sign}: {text}" for sign, text in told.items()), epoch


def _case_row(case: Case, sign: str, unit: str, folder: Path | None) -> _Row:
    plan, record, steps = case.plan, case.record, len(case.record.step_s)
    spread = f"1 run, {steps:,} step{'s' * (steps != 1)}"
    if len(case.records) > 1:
        spread = f"{span_of(case.rates)} in {len(case.records)} runs"
    cells = (
        _word(case.name, "; ".join(case.notes(on_time=False))),
        _rate_cell(case, unit, spread),
        _source_cell(case.source),
        _word(sign),
        _word(strategy(plan), f"versions {', '.join(map(str, plan.versions))}" if not plan.is_synchronous else ""),
        _word("-".join(map(str, plan.replicas)), plan.placement),
        _Cell(seconds(case.step_s), case.step_s),
        _memory_cell(case),
        _word(record.limit),
        _word(plan.model, record.precision),
        _word(record.data),
        _word(plan.policy),
        _epoch_cell(case),
        _log_cell(case, folder),
    )
    return _Row(case.source, cells)


def _memory_cell(case: Case) -> _Cell:
    """The peaks of the fullest device of the first and the last stage, and what was seen of them from outside."""
    uses = [use for use in case.outer_uses if use is not None]
    if not uses:
        return _EMPTY
    driver = [use.driver_bytes for use in uses if use.driver_bytes]
    shares = [f"{use.driver_share:.0%}" for use in uses if use.driver_share is not None]
    seen = [_short_sizes(driver)] * bool(driver) + [f"{' / '.join(shares)} busy"] * bool(shares)
    return _Cell(_memory_text(case), uses[0].peak_bytes, f"driver {', '.join(seen)}" if seen else "")


def _memory_text(case: Case) -> str:
    """`6.9 / 3.1 GiB`: the first and the last stage, or one figure for one stage."""
    return _short_sizes([use.peak_bytes for use in case.outer_uses if use is not None]) or GAP


def _short_sizes(values: Sequence[int]) -> str:
    """Sizes with their unit once, where they share it: `6.9 / 3.1 GiB`."""
    texts = [size(value).split(" ") for value in values]
    if len({unit for _, unit in texts}) == 1:
        return " / ".join(figure for figure, _ in texts) + f" {texts[0][1]}"
    return " / ".join(" ".join(text) for text in texts)


def _epoch_cell(case: Case) -> _Cell:
    """Up to three repetitions' epochs, or their median and range; always with the samples that an epoch covers."""
    times_s = [record.epoch_s for record in case.records if record.epoch_s is not None]
    if not times_s:
        return _EMPTY
    covers = f"{case.record.epoch_samples:,} samples"
    middle = sorted(times_s)[len(times_s) // 2]
    if len(times_s) <= 3:
        return _Cell(" · ".join(map(seconds, times_s)), middle, covers)
    return _Cell(seconds(middle), middle, f"{seconds(min(times_s))} to {seconds(max(times_s))}; {covers}")


def _log_cell(case: Case, folder: Path | None) -> _Cell:
    path = case.log
    if path is None:
        return _word("")
    shown = relpath(path, folder) if folder else str(path)
    # Beside the case's name, only what the file's own name adds to it is worth the room.
    return _Cell(path.name.removeprefix(f"{case.name}."), path.name, href=Path(shown).as_posix())


# ── scaling ─────────────────────────────────────────────────────────────────────────────────────────────

_SCALING_COLUMNS = _columns(
    "case | throughput> | source | speedup> | against | model | hosts> | devices a host> | rows a device> | precision"
)


def scaling_table(results: Results) -> Table:
    """Hosts, devices, rows a device, throughput, and speedup against the smallest run of the same kind."""
    rows = [_scaling_row(case, find_base(case, family)) for family in families(results.cases) for case in family]
    rows += _failed(results.failures, _SCALING_COLUMNS)
    notes = (
        "Throughput is samples really processed, over the median step. A speedup is told only against a run with the "
        "same model, data, precision and source; what else differs stands beneath it.",
    )
    return Table(title="Scaling", columns=_SCALING_COLUMNS, rows=tuple(rows), notes=notes)


def _scaling_row(case: Case, base: Case | None) -> _Row:
    hosts = [device.host for device in case.plan.devices]
    each = [hosts.count(host) for host in sorted(set(hosts))]
    even = str(each[0]) if len(set(each)) == 1 else ", ".join(map(str, each))
    against = (_EMPTY, _word(""))
    if base is not None:
        name = "itself" if base is case else base.name
        against = _Cell(times(case.gain(base)), case.gain(base)), _word(name, "; ".join(differences(case, base)))
    cells = (
        _word(case.name),
        _Cell(case.speed(), case.samples_per_s),
        _source_cell(case.source),
        *against,
        _word(case.plan.model),
        _Cell(str(len(each)), len(each)),
        _Cell(even, max(each)),
        _Cell(row_count(case.rows_per_device), case.rows_per_device, f"batch {case.plan.batch:,}"),
        _word(case.record.precision),
    )
    return _Row(case.source, cells)


# ── predictions ─────────────────────────────────────────────────────────────────────────────────────────

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
    doubts += [] if plan_key(predicted.plan) == plan_key(found.plan) else ["the two plans differ"]
    return (
        _word(found.name, "; ".join(doubts)),
        _source_cell(found.source),
        _Cell(found.speed(predicted.samples_per_s), predicted.samples_per_s, seconds(predicted.step_s)),
        _Cell(found.speed(), found.samples_per_s, seconds(found.step_s)),
        _Cell(percent(pair.rate_error), pair.rate_error),
        _word(_memory_text(predicted)),
        _word(_memory_text(found)),
        _EMPTY if memory is None else _Cell(percent(memory), memory),
    )


# ── time to a loss ──────────────────────────────────────────────────────────────────────────────────────

_REACH_COLUMNS = _columns("case | source | samples/s> | final loss> | time to the loss> | against>")


def reach_table(results: Results) -> Table | None:
    """How soon each case comes to the final loss of the fastest exact one; None where there is nothing to compare."""
    goals = find_goals(results.cases)
    notes = (
        "Time is that of the steps until a loss is reached, at the median step; evaluations are left out.",
        *(
            f"{base.plan.model}: to a loss of {target:.4g}, with which {base.name} ends in the median"
            for base, target, _ in goals
        ),
    )
    unit = shared_unit(case.record for case in results.cases)
    rows = tuple(_reach_row(case, base, target, unit) for base, target, cases in goals for case in cases)
    return Table(title="Time to loss", columns=_in_unit(_REACH_COLUMNS, unit), rows=rows, notes=notes) if rows else None


def _reach_row(case: Case, base: Case, target: float, unit: str) -> _Row:
    """A case's losses and times, with their spread over repetitions, and the share of the exact case's time."""
    finals, found, others = final_losses(case), times_to_loss(case, target), times_to_loss(base, target)
    missed = len(case.records) - len(found)
    told = [f"{seconds(min(found))} to {seconds(max(found))}"] if len(found) > 1 else []
    told += [f"{missed} of {len(case.records)} runs never come to it"] if missed else []
    spread = f"{min(finals):.4f} to {max(finals):.4f}" if len(finals) > 1 else ""
    share = median(found) / median(others) if found and others else -1.0
    cells = (
        _word(case.name), _source_cell(case.source), _rate_cell(case, unit),
        _Cell(f"{median(finals):.4f}", median(finals), spread),
        _Cell(seconds(median(found)) if found else GAP, median(found) if found else -1.0, "; ".join(told)),
        _EMPTY if share < 0 else _Cell(times(share), share, "itself" if case is base else base.name),
    )  # fmt: skip
    return _Row(case.source, cells)


# ── Markdown ────────────────────────────────────────────────────────────────────────────────────────────


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
