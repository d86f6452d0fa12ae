"""Results → files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from stagewright.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.record import Record
from stagewright.report.cases import Failure, Results, in_order, make_cases, read_results
from stagewright.report.page import commands_of, environments_of, render_page, tables_of
from stagewright.report.summary import sentences
from stagewright.report.tables import Table, markdown_table, markdown_text
from stagewright.schema import write_whole


class ReportPaths(NamedTuple):
    """Where a report lies, and what it says first."""

    page: Path
    markdown: Path
    headline: str


def make_report(
    results: Iterable[Record] | str | Path,
    out: str | Path,
    *,
    failures: Sequence[Failure] = (),
    clusters: Sequence[Cluster] = (),
) -> ReportPaths:
    """Writes `report.html` and `report.md` into the folder `out`, from records or from a folder of them."""
    folder = Path(out)
    found = _gather(results, tuple(failures), tuple(clusters))
    page = write_whole(folder / "report.html", render_page(found, folder))
    markdown = write_whole(folder / "report.md", _render_markdown(found, folder))
    return ReportPaths(page, markdown, sentences(found)[0])


def _gather(
    results: Iterable[Record] | str | Path, failures: tuple[Failure, ...], clusters: Sequence[Cluster]
) -> Results:
    """Cases, failures and clusters, wherever they come from."""
    if isinstance(results, (str, Path)):
        read = read_results(Path(results), clusters)
        return Results(cases=read.cases, failures=read.failures + failures, clusters=read.clusters)
    cases = in_order(make_cases(results))
    if not cases and not failures:
        raise UsageError("a report needs at least one record or one failure, and none was given")
    return Results(cases=cases, failures=failures, clusters=tuple(clusters))


def _render_markdown(results: Results, folder: Path | None = None) -> str:
    """The sentence, the tables of the series, the failures, and how it was measured."""
    first, *further = map(markdown_text, sentences(results))
    parts = ["# Report\n", f"{first}\n", *(f"- {line}" for line in further), ""]
    for table in tables_of(results, folder).values():
        parts += [f"## {table.title}\n", *_notes_lines(table), markdown_table(table)]
    parts += ["## How it was measured\n", *_environment_lines(results)]
    return "\n".join(parts).rstrip() + "\n"


def _notes_lines(table: Table) -> list[str]:
    """The sentences above a table: the first as a paragraph, the others as a list."""
    if not table.notes:
        return []
    return [markdown_text(table.notes[0]), "", *(f"- {markdown_text(note)}" for note in table.notes[1:]), ""]


def _environment_lines(results: Results) -> list[str]:
    """The environments and the commands, as lists."""
    lines = [
        "Samples a second are samples really processed, over the median of the steady steps. ● was measured on real "
        "devices, ◐ rehearsed on emulated hosts, ◇ simulated: nothing ran. ✕ failed.\n"
    ]
    for environment in environments_of(results.cases):
        lines += [line for key, value in environment["facts"] for line in _fact_lines(key, value)] + [""]
    return [*lines, *_fenced(dict.fromkeys(" ".join(each["command"].split()) for each in commands_of(results)))]


def _fact_lines(key: str, value: str) -> list[str]:
    """A fact as an entry of a list; text of several lines, such as a table, keeps them."""
    if "\n" not in value.strip():
        return [f"- {markdown_text(key)}: {markdown_text(value)}"]
    return [f"- {markdown_text(key)}:", "", *("  " + line for line in _fenced(value.splitlines())), ""]


def _fenced(lines: Iterable[str]) -> list[str]:
    """Lines as a block of code that none of them can end; nothing for no lines."""
    held = list(lines)
    longest = max((len(run) for line in held for run in re.findall("`+", line)), default=0)
    fence = "`" * max(longest + 1, 3)
    return [fence, *held, fence] if held else []
