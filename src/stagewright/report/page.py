"""One page that carries everything: text, tables, charts and the library that draws them; and the same in Markdown."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from stagewright.cluster import Cluster, count
from stagewright.errors import StagewrightError, UsageError
from stagewright.record import MEMORY_KINDS, DeviceUse, Record
from stagewright.report import tables as _tables
from stagewright.report.cases import (
    Case,
    Failure,
    Pair,
    Results,
    families,
    find_base,
    find_pairs,
    make_cases,
    read_results,
    strategy,
)  # fmt: skip
from stagewright.report.figures import amount, rate_unit, size, span_of, times
from stagewright.report.map import draw_map
from stagewright.report.summary import find_hero, sentences
from stagewright.report.timeline import PAGE_WORDS, run_data, stride
from stagewright.schema import write_whole

_Plain = dict[str, Any]
_SCRIPTS = ("base.js", "tables.js", "charts.js", "runs.js", "timeline.js")
_OTHER = "not told apart"
"""Memory that a record does not divide by kind."""


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
    folder, failed = Path(out), tuple(failures)
    if isinstance(results, str | Path):
        read = read_results(Path(results), clusters)
        found = Results(cases=read.cases, failures=read.failures + failed, clusters=read.clusters)
    else:
        found = Results(cases=make_cases(results), failures=failed, clusters=tuple(clusters))
    if not found.cases and not found.failures:
        raise UsageError("a report needs at least one record or one failure, and none was given")
    page = write_whole(folder / "report.html", _render_page(found, folder))
    markdown = write_whole(folder / "report.md", _render_markdown(found, folder))
    return ReportPaths(page, markdown, sentences(found)[0])


def _render_page(results: Results, folder: Path) -> str:
    """The report as one HTML file that needs nothing else and asks for nothing from anywhere."""
    library = _read_part("vendor/echarts.min.js")
    # As one function: nothing is left lying about in the window.
    parts = "\n".join(_read_part(f"page/{name}") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}\n}})();'
    told = sentences(results)
    # Every value is escaped unless it is marked as safe here.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.from_string(_read_part("page/page.html")).render(
        title=", ".join(dict.fromkeys(case.plan.model for case in results.cases)) or "no results",
        policy=_security_policy(library, script), style=Markup(_read_part("page/page.css")), library=Markup(library),
        script=Markup(script), headline=told[0], further=told[1:], facts=_facts_of(results),
        marks=_tables.SOURCE_MARKS, tables=_tables_of(results, folder), runs=_runs_of(results.cases),
        drawings=_drawings_of(results), environments=_environments_of(results.cases), commands=_commands_of(results),
        failures=results.failures, charts=_as_json(_chart_data(results.cases, find_pairs(results.cases))),
    )  # fmt: skip
    return page


def live_page(folder: str) -> str:
    """A page that asks whoever serves it how the runs in a folder are getting on."""
    library, told = _read_part("vendor/echarts.min.js"), _as_json({**PAGE_WORDS, "memory_kinds": []})
    script = f'(() => {{\n"use strict";\n{_read_part("page/base.js")}\n{_read_part("page/live.js")}\n}})();'
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.from_string(_read_part("page/live.html")).render(
        folder=folder, policy=f"{_security_policy(library, script)}; connect-src 'self'", charts=told,
        style=Markup(_read_part("page/page.css")), library=Markup(library), script=Markup(script),
    )  # fmt: skip
    return page


@cache
def _read_part(name: str) -> str:
    return files("stagewright.report").joinpath(name).read_text(encoding="utf-8")


def _security_policy(*scripts: str) -> str:
    """A policy under which only these scripts run, and no request leaves the page."""
    digests = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"


def _as_json(plain: object) -> Markup:
    """JSON that no text inside it can end early."""
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _facts_of(results: Results) -> tuple[str, ...]:
    """`● 4 measured cases`, `✕ 1 failed`: what the page is made from."""
    sources = [case.source for case in results.cases]
    told = [
        f"{mark} {sources.count(source)} {source}" for source, mark in _tables.SOURCE_MARKS.items() if source in sources
    ]
    if results.failures:
        told.append(f"{_tables.SOURCE_MARKS['failed']} {len(results.failures)} failed")
    runs = sum(len(case.records) for case in results.cases)
    clusters = dict.fromkeys(case.record.cluster for case in results.cases)
    return (count(runs, "run"), *told, *(f"on {name}" for name in clusters))


def _tables_of(results: Results, folder: Path) -> dict[str, _tables.Table]:
    """The page's tables, by the section that they stand in; those without rows are left out."""
    found = {"cases": _tables.case_table(results, folder), "scaling": _tables.scaling_table(results)}
    pairs, reach = find_pairs(results.cases), _tables.reach_table(results)
    found |= {"pairs": _tables.pair_table(pairs)} if pairs else {}
    return found | ({"reach": reach} if reach is not None else {})


def _runs_of(cases: Sequence[Case]) -> list[_Plain]:
    """A run for each case, the one that the summary is about first; each with its own block of data."""
    hero = find_hero(cases) if cases else None
    num_drawn = sum(1 for case in cases if case.record.spans)
    # More spans of a run than 20,000, or 200,000 in all, make the page slow to open.
    limit = max(min(20_000, 200_000 // max(num_drawn, 1)), 1_000)
    return [
        {
            "label": f"{_tables.SOURCE_MARKS[case.source]} {case.name} ({case.source})",
            "cluster": case.record.cluster,
            "data": _as_json(run_data(case, limit)),
        }
        for case in sorted(cases, key=lambda case: (not case.record.spans, case is not hero))
    ]


def _drawings_of(results: Results) -> list[_Plain]:
    known = {cluster.name: cluster for cluster in results.clusters}
    drawings = []
    for name in dict.fromkeys(case.record.cluster for case in results.cases):
        # A drawing is a courtesy: a report must not fail because a cluster file is of another version.
        with suppress(KeyError, StagewrightError):
            drawings.append(draw_map(known.get(name) or Cluster.load(Cluster.ready_made()[name])))
    return drawings


def _environments_of(cases: Sequence[Case]) -> list[_Plain]:
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for case in cases:
        for record in case.records:
            names = groups.setdefault(tuple(sorted(record.environment.items())), [])
            label = f"{_tables.SOURCE_MARKS[case.source]} {case.name}"
            names.extend([label] if label not in names else [])
    return [{"facts": facts, "cases": names} for facts, names in groups.items() if facts]


def _commands_of(results: Results) -> list[Mapping[str, str]]:
    pairs = [(f"{_tables.SOURCE_MARKS[case.source]} {case.name}", case.record.command) for case in results.cases]
    pairs += [(f"{_tables.SOURCE_MARKS['failed']} {failure.name}", failure.command) for failure in results.failures]
    return [{"name": name, "command": command} for name, command in pairs if command]


# ── charts: plain values; how they look is the page's own business ──────────────────────────────────────


def _chart_data(cases: Sequence[Case], pairs: Sequence[Pair]) -> _Plain:
    """Everything that the charts draw, family by family, so that no chart mixes models, data or precisions."""
    groups = [("{0.model}, {0.precision}, {0.data} data".format(one[0].workload), one) for one in families(cases)]
    return {
        "families": [_family_charts(title, family) for title, family in groups],
        "curves": [chart for title, family in groups for chart in _curve_charts(title, family)],
        "errors": [_error_bar(pair) for pair in pairs],
        "memory_kinds": [*MEMORY_KINDS, _OTHER],
        **PAGE_WORDS,
    }


def _family_charts(title: str, family: Sequence[Case]) -> _Plain:
    batches = {case.plan.batch for case in family}
    return {
        "title": title,
        "same_batch": len(batches) == 1,
        "throughput": [_throughput_bar(case, len(batches) > 1) for case in family],
        "speedup": _speedup_lines(family),
        "memory": [bar for case in family for bar in _memory_bars(case)],
    }


def _throughput_bar(case: Case, tell_batch: bool) -> _Plain:
    limit, tokens = case.limit_samples_per_s, case.record.sample_tokens or 1.0
    return {
        "name": case.name + (f" · batch {case.plan.batch:,}" if tell_batch else ""), "case": case.name,
        "source": case.source, "value": case.samples_per_s * tokens, "text": amount(case.samples_per_s, case.record),
        "unit": rate_unit(case.record),
        "spread": f"{span_of(case.rates)} in {len(case.records)} runs" if len(case.records) > 1 else "one run",
        "limit": limit and limit * tokens,
        "limit_text": f"{case.speed(limit)} if the busiest device never waited" if limit else "",
        "limited_by": case.record.limit, "low": min(case.rates) * tokens, "high": max(case.rates) * tokens,
    }  # fmt: skip


def _speedup_lines(family: Sequence[Case]) -> list[_Plain]:
    """A line for each type and source, over the number of devices; none where all cases have as many."""
    bases = [(case, find_base(case, family)) for case in sorted(family, key=lambda case: case.num_devices)]
    smallest = min(case.num_devices for case in family)
    found: dict[tuple[str, str], list[_Plain]] = {}
    for case, base in bases:
        # One ideal line holds for all points only if their bases have as many devices.
        if base is not None and base.num_devices == smallest:
            told = "data parallel" if strategy(case.plan) == "one device" else strategy(case.plan)
            ratio, devices = case.gain(base), case.num_devices
            point = {
                "devices": devices,
                "value": ratio,
                "ideal": devices / base.num_devices,  # as many times as the base has devices
                "name": case.name,
                "case": case.name,
                "text": f"{times(ratio)} against {base.name}, on {devices} devices, batch {case.plan.batch:,}",
            }
            found.setdefault((told, case.source), []).append(point)
    # A line goes through the fastest case of each number of devices; others of as many are not drawn above it.
    lines = {key: {point["devices"]: point for point in sorted(points, key=_gain)} for key, points in found.items()}
    if len({devices for points in lines.values() for devices in points}) < 2:
        return []
    return [
        {"type": told, "source": source, "points": [points[devices] for devices in sorted(points)]}
        for (told, source), points in lines.items()
    ]


def _gain(point: _Plain) -> float:
    return float(point["value"])


def _memory_bars(case: Case) -> list[_Plain]:
    names = [case.name] if len(case.outer_uses) == 1 else [
        f"{case.name} · stage {stage}" for stage in (0, len(case.plan.stages) - 1)
    ]  # fmt: skip
    return [
        {
            "name": name,
            "case": case.name,
            "source": case.source,
            "device": use.device,
            "text": size(use.peak_bytes),
            "parts": _parts_of(use),
        }
        for name, use in zip(names, case.outer_uses)
        if use is not None
    ]


def _parts_of(use: DeviceUse) -> dict[str, int]:
    """The peak by kind; what the kinds leave over, beyond rounding, is shown as such."""
    parts = {kind: use.peak_parts[kind] for kind in MEMORY_KINDS if use.peak_parts.get(kind)}
    rest = use.peak_bytes - sum(parts.values())
    return {**parts, _OTHER: rest} if rest > use.peak_bytes / 200 else parts


def _curve_charts(title: str, family: Sequence[Case]) -> list[_Plain]:
    """A chart for each curve (loss, top1 …) over steps, for losses over samples and over seconds, a line a case.

    A point is its place, value and epoch; lines are evenly thinned.
    """
    charts: dict[tuple[str, str], list[_Plain]] = {}
    for case in family:
        record = case.record
        units = {"samples": record.step_samples, "seconds": record.median_step_s}
        for name in dict.fromkeys(point.name for point in record.points):
            for unit, each in units.items() if name.endswith("loss") else (("step", 1),):
                points = [
                    [point.step * each, point.value, point.epoch] for point in record.points if point.name == name
                ]
                kept = [*points[: -1 : stride(len(points))], points[-1]]
                line = {
                    "name": case.name, "case": case.name, "source": case.source, "batch": case.plan.batch,
                    "points": kept,
                }  # fmt: skip
                charts.setdefault((name, unit), []).append(line)
    return [
        {
            "title": f"{name} over {unit}{'s' * (unit == 'step')} · {title}",
            "unit": unit,
            "lines": lines,
            "coincide": _coinciding(lines),
        }
        for (name, unit), lines in charts.items()
    ]


def _coinciding(lines: Sequence[_Plain]) -> list[list[int]]:
    """The lines that lie on one another: nowhere apart by more than a hundredth of what the chart shows."""
    values = [value for line in lines for _, value, _ in line["points"]]
    width = (max(values) - min(values)) / 100
    curves = [{step: value for step, value, _ in line["points"]} for line in lines]
    groups: list[list[int]] = []
    for number, curve in enumerate(curves):
        for group in groups:
            first = curves[group[0]]
            both = first.keys() & curve.keys()
            if len(both) > 1 and all(abs(first[step] - curve[step]) <= width for step in both):
                group.append(number)
                break
        else:
            groups.append([number])
    return [group for group in groups if len(group) > 1]


def _error_bar(pair: Pair) -> _Plain:
    memory = pair.memory_error
    return {
        "name": pair.found.name + ("" if pair.same_cluster else " (other cluster)"),
        "source": pair.found.source,
        "rate": pair.rate_error * 100,
        "memory": None if memory is None else memory * 100,
        "text": f"{pair.found.speed(pair.predicted.samples_per_s)} predicted, {pair.found.speed()} found",
    }


# ── Markdown ────────────────────────────────────────────────────────────────────────────────────────────


def _render_markdown(results: Results, folder: Path) -> str:
    first, *further = map(_tables.markdown_text, sentences(results))
    parts = ["# Report\n", f"{first}\n", *(f"- {line}" for line in further), ""]
    for table in _tables_of(results, folder).values():
        notes = [_tables.markdown_text(note) for note in table.notes]
        listed = [*notes[:1], "", *(f"- {note}" for note in notes[1:]), ""] if notes else []
        parts += [f"## {table.title}\n", *listed, _tables.markdown_table(table)]
    parts += ["## How it was measured\n", *_environment_lines(results)]
    return "\n".join(parts).rstrip() + "\n"


def _environment_lines(results: Results) -> list[str]:
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
        return [f"- {_tables.markdown_text(key)}: {_tables.markdown_text(value)}"]
    return [f"- {_tables.markdown_text(key)}:", "", *("  " + line for line in _fenced(value.splitlines())), ""]


def _fenced(lines: Iterable[str]) -> list[str]:
    """Lines as a block of code that none of them can end; nothing for no lines."""
    held = list(lines)
    longest = max((len(run) for line in held for run in re.findall("`+", line)), default=0)
    fence = "`" * max(longest + 1, 3)
    return [fence, *held, fence] if held else []
