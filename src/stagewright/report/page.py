"""One page that carries everything: text, tables, figures, charts and the library that draws them."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from stagewright.cluster import Cluster, count, ready_made_clusters
from stagewright.errors import StagewrightError, UsageError
from stagewright.record import Record
from stagewright.report.cases import Case, Failure, Results, in_order, make_cases, read_results
from stagewright.report.charts import chart_data, run_data, span_limit
from stagewright.report.comparison import find_pairs
from stagewright.report.map import draw_cluster, link_facts
from stagewright.report.summary import find_hero, sentences
from stagewright.report.tables import (
    SOURCE_MARKS,
    Table,
    case_table,
    markdown_table,
    markdown_text,
    pair_table,
    scaling_table,
)
from stagewright.schema import write_whole

_SCRIPTS = ("base.js", "tables.js", "charts.js", "runs.js", "timeline.js")


def _render_page(results: Results, folder: Path | None = None) -> str:
    """The report as one HTML file that needs nothing else and asks for nothing from anywhere."""
    library, script = (
        _read_part("vendor/echarts.min.js"),
        _wrap_script([_read_part(f"page/{name}") for name in _SCRIPTS]),
    )
    told = sentences(results)
    page: str = _page_template().render(
        title=_title_of(results),
        policy=_security_policy(library, script),
        style=Markup(_read_part("page/page.css")),
        library=Markup(library),
        script=Markup(script),
        headline=told[0],
        further=told[1:],
        facts=_facts_of(results),
        marks=SOURCE_MARKS,
        tables=_tables_of(results, folder),
        runs=_runs_of(results.cases),
        drawings=_drawings_of(results),
        environments=_environments_of(results.cases),
        commands=_commands_of(results),
        failures=results.failures,
        charts=_as_json(chart_data(results.cases, find_pairs(results.cases))),
    )
    return page


@cache
def _read_part(name: str) -> str:
    """A file that comes with this package."""
    return files("stagewright.report").joinpath(name).read_text(encoding="utf-8")


def _page_template() -> Any:
    """The page's template; every value is escaped unless it is marked as safe here."""
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        _read_part("page/page.html")
    )


def _wrap_script(parts: Sequence[str]) -> str:
    """The page's scripts as one, with nothing left lying about in the window."""
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();"


def _security_policy(*scripts: str) -> str:
    """A policy under which only these scripts run, and no request leaves the page."""
    digests = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"


def _as_json(plain: object) -> Markup:
    """JSON that no text inside it can end early."""
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _title_of(results: Results) -> str:
    """The models, in the order of their appearance."""
    models = [*dict.fromkeys(case.plan.model for case in results.cases)] or ["no results"]
    return ", ".join(models)


def _facts_of(results: Results) -> tuple[str, ...]:
    """`● 4 measured cases`, `✕ 1 failed`: what the page is made from."""
    sources = [case.source for case in results.cases]
    told = [f"{mark} {sources.count(source)} {source}" for source, mark in SOURCE_MARKS.items() if source in sources]
    if results.failures:
        told.append(f"{SOURCE_MARKS['failed']} {len(results.failures)} failed")
    runs = sum(len(case.records) for case in results.cases)
    clusters = dict.fromkeys(case.record.cluster for case in results.cases)
    return (count(runs, "run"), *told, *(f"on {name}" for name in clusters))


def _tables_of(results: Results, folder: Path | None) -> dict[str, Table]:
    """The page's tables, by the section that they stand in; those without rows are left out."""
    found = {"cases": case_table(results, folder), "scaling": scaling_table(results)}
    pairs = find_pairs(results.cases)
    return {**found, "pairs": pair_table(pairs)} if pairs else found


def _runs_of(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """A run for each case, the one that the summary is about first; each with its own block of data."""
    hero = find_hero(cases) if cases else None
    limit = span_limit(cases)
    ranked = sorted(cases, key=lambda case: case is not hero)
    drawn = [case for case in ranked if case.record.spans] + [case for case in ranked if not case.record.spans]
    return [
        {
            "label": f"{SOURCE_MARKS[case.source]} {case.name} ({case.source})",
            "cluster": case.record.cluster,
            "data": _as_json(run_data(case, limit)),
        }
        for case in drawn
    ]


def _drawings_of(results: Results) -> list[dict[str, Any]]:
    """The clusters that the cases ran on, as far as their files are known."""
    wanted = dict.fromkeys(case.record.cluster for case in results.cases)
    given = {cluster.name: cluster for cluster in results.clusters}
    found = (given.get(name) or _ready_made(name) for name in wanted)
    return [
        {"name": cluster.name, "hosts": _safe_hosts(cluster), "links": link_facts(cluster), "notes": cluster.notes}
        for cluster in found
        if cluster is not None
    ]


def _ready_made(name: str) -> Cluster | None:
    """The cluster of this name that comes with the package, if there is one and it can be read."""
    path = ready_made_clusters().get(name)
    try:
        return Cluster.load(path) if path else None
    except StagewrightError:
        # A drawing is a courtesy: a report must not fail because a cluster file is of another version.
        return None


def _safe_hosts(cluster: Cluster) -> list[dict[str, Any]]:
    """The hosts' drawings, which are made here and escape what they hold."""
    drawings = draw_cluster(cluster)
    return [{"title": drawn.title, "svg": Markup(drawn.svg), "facts": drawn.facts} for drawn in drawings]


def _environments_of(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Each environment once, with the cases that ran in it."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for case in cases:
        for record in case.records:
            names = groups.setdefault(tuple(sorted(record.environment.items())), [])
            label = f"{SOURCE_MARKS[case.source]} {case.name}"
            names.extend([label] if label not in names else [])
    return [{"facts": facts, "cases": names} for facts, names in groups.items() if facts]


def _commands_of(results: Results) -> list[Mapping[str, str]]:
    """The command of each case, failed ones included."""
    pairs = [(f"{SOURCE_MARKS[case.source]} {case.name}", case.record.command) for case in results.cases]
    pairs += [(f"{SOURCE_MARKS['failed']} {failure.name}", failure.command) for failure in results.failures]
    return [{"name": name, "command": command} for name, command in pairs if command]


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
    page = write_whole(folder / "report.html", _render_page(found, folder))
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
    for table in _tables_of(results, folder).values():
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
    for environment in _environments_of(results.cases):
        lines += [line for key, value in environment["facts"] for line in _fact_lines(key, value)] + [""]
    return [*lines, *_fenced(dict.fromkeys(" ".join(each["command"].split()) for each in _commands_of(results)))]


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
