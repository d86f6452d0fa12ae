"""`stagewright bench`: runs a suite of cases, or sets two folders of results against one another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from stagewright.bench.task import Choices
from stagewright.cli.options import Given, read_section, takes
from stagewright.cluster import count
from stagewright.errors import UsageError
from stagewright.record import Record
from stagewright.report.figures import GAP, percent, rate, seconds, size
from stagewright.report.tables import SOURCE_MARKS

if TYPE_CHECKING:
    from stagewright.bench.compare import Comparison
    from stagewright.bench.harness import Progress, Row
    from stagewright.bench.suite import Suite
    from stagewright.bench.task import Task

_WIDTH = 140
"""Of a table that goes into a file."""


@takes({"bench": Choices})
def bench(
    what: Annotated[
        list[str], typer.Argument(metavar="SUITE | compare A B", help="A suite's name or file; or two result folders.")
    ],
    /,
    *,
    given: Given,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the results; goes on there.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Show the cases and how they would run.")] = False,
    repetitions: Annotated[int | None, typer.Option(help="Runs of each case; 7 if the suite does not say.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Run a suite of benchmarks: repeated, interleaved, kept with logs; an interrupted one goes on where it stopped.

    `stagewright bench compare A B` tells noise from change.

    Example: stagewright bench resnet50-amp --simulate --only '*-synthetic' -o bench
    """
    if what[0] == "compare":
        _compare(what[1:], as_json)
        return
    if len(what) > 1:
        raise UsageError(f"one suite at a time, not {', '.join(what)}", "or: stagewright bench compare A B")
    suite, tasks = _load(what[0], read_section(Choices, given["bench"]))
    if list_only:
        _show_list(suite, tasks, as_json)
        return
    if out is None:
        raise UsageError("the folder for the results is not given", "add -o DIR, or --list to look first")
    if repetitions is not None and repetitions < 1:
        raise UsageError(f"--repetitions is {repetitions}: expected 1 or more")
    _run(suite, tasks, out, repetitions or suite.repetitions, retry, as_json)


def _load(name: str, choices: Choices) -> tuple[Suite, tuple[Task, ...]]:
    """The suite and its tasks, checked."""
    from stagewright.bench.suite import load_suite
    from stagewright.bench.task import look_here, make_tasks
    from stagewright.cli import VERBS
    from stagewright.profiling.detect import ask

    suite = load_suite(name)
    return suite, make_tasks(suite, choices, look_here(tuple(VERBS), ask), _check_words)


def _check_words(words: Sequence[str]) -> None:
    """Refuses a command that its verb would not understand, without running it."""
    from stagewright.cli import VERBS, Verb

    verb, *rest = words
    try:
        Verb(name=verb, help=VERBS[verb], callback=None).make_context(verb, list(rest))
    except Exception as fault:
        if not hasattr(fault, "format_message"):
            raise
        raise UsageError(f"`stagewright {verb}` would not take it: {fault.format_message().rstrip('.')}") from None


def _run(suite: Suite, tasks: Sequence[Task], out: Path, repetitions: int, retry: bool, as_json: bool) -> None:
    """Runs what is left, a line a run, and shows the rows."""
    from stagewright.bench.environment import capture
    from stagewright.bench.harness import rows_of, run_suite
    from stagewright.bench.run import Session
    from stagewright.bench.task import look_here
    from stagewright.profiling.detect import ask

    console = Console(stderr=True, highlight=False, markup=False)
    session = Session(facts=capture(), num_cards=look_here((), ask).num_cards)
    progress = None
    try:
        for progress in run_suite(suite.name, tasks, out, repetitions, session, retry=retry):
            console.print(_progress_line(progress), soft_wrap=True)
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on from here")
        raise
    if progress is None:
        console.print(f"nothing was left to run: {out} holds it all")
    rows = rows_of(tasks, out)
    if as_json:
        typer.echo(json.dumps([row.summary() for row in rows], ensure_ascii=False))
    else:
        _show_rows(suite, rows, out)


def _progress_line(progress: Progress) -> str:
    """` 7/40  vgg16-ssp, 2nd run: 1,014 images/s in 12.3 s · about 8 min 20 s left`."""
    result, task = progress.result, progress.task
    told = f"{rate(result.samples_per_s)} images/s" if isinstance(result, Record) else f"failed: {result.reason}"
    mark = SOURCE_MARKS[task.source if isinstance(result, Record) else "failed"]
    is_last = progress.num_done == progress.num_runs
    left = "" if progress.left_s is None or is_last else f" · about {_whole_seconds(progress.left_s)} left"
    place = f"{progress.num_done:>{len(str(progress.num_runs))}}/{progress.num_runs}"
    return f"{place}  {mark} {task.case.name} · run {progress.number}: {told} in {progress.seconds:.1f} s{left}"


def _whole_seconds(value_s: float) -> str:
    """`41 s`, `3 min 02 s`: an estimate has no hundredths."""
    return seconds(value_s) if value_s >= 60 else f"{max(round(value_s), 1)} s"


def _make_table(*heads: str, right: Sequence[str] = ()) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", overflow="fold")
    return table


def _show_table(table: Table, *lines: str) -> None:
    """A table and what is to be read with it."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_WIDTH)
    console.print()
    console.print(table)
    console.print()
    for line in lines:
        console.print(f"  {line}", soft_wrap=True)


def _show_list(suite: Suite, tasks: Sequence[Task], as_json: bool) -> None:
    """The cases, and how they would run here."""
    if as_json:
        rows = [
            {"name": task.case.name, "source": task.source, "command": task.command, "skipped": task.skipped,
             "notes": list(task.notes)}
            for task in tasks
        ]  # fmt: skip
        typer.echo(json.dumps(rows, ensure_ascii=False))
        return
    table = _make_table("case", "how", "on", "placement", "data", "precision")
    for task in tasks:
        case = task.case
        how = f"{SOURCE_MARKS['failed']} not here" if task.skipped else f"{SOURCE_MARKS[task.source]} {task.mode}"
        where = task.cluster.name if task.cluster else case.device or "this machine"
        table.add_row(case.name, how, where, case.placement or "every device", case.data, case.precision)
    told = dict.fromkeys(text for task in tasks for text in (task.skipped, *task.notes) if text)
    about = f"{suite.name}: {suite.about}" if suite.about else suite.name
    _show_table(table, about, f"{count(len(tasks), 'case')}, {suite.repetitions} runs each unless simulated", *told)


def _show_rows(suite: Suite, rows: Sequence[Row], out: Path) -> None:
    """The cases with their medians and spreads; different work is told apart by the images of a step."""
    table = _make_table("case", "source", "runs", "images/s", "spread", "images a step", "peak",
                       right=("runs", "images/s", "spread", "images a step", "peak"))  # fmt: skip
    for row in rows:
        if row.images_per_s is None:
            table.add_row(row.name, f"{SOURCE_MARKS['failed']} failed", GAP, GAP, GAP, GAP, GAP)
            continue
        spread = (row.high - row.low) / row.images_per_s if row.high is not None and row.low is not None else 0.0
        table.add_row(
            row.name, f"{SOURCE_MARKS[row.source]} {row.source}", str(row.repetitions), rate(row.images_per_s),
            f"{spread:.1%}" if row.repetitions > 1 else GAP, f"{row.step_images:,}", size(row.peak_bytes or 0),
        )  # fmt: skip
    failed = [f"{SOURCE_MARKS['failed']} {row.name}: {row.reason}" for row in rows if row.reason]
    notes = list(
        dict.fromkeys(note if " fit: " not in note else f"{row.name} {note}" for row in rows for note in row.notes)
    )
    _show_table(table, *failed, *notes, f"saved {out} · next: stagewright report {out}")


def _compare(folders: Sequence[str], as_json: bool) -> None:
    """Shows what changed between two folders, and what only wavered."""
    if len(folders) != 2:
        raise UsageError(f"compare takes two folders, not {len(folders)}", "stagewright bench compare A B")
    from stagewright.bench.compare import changed_facts
    from stagewright.bench.compare import compare as compare_folders

    before, after = map(Path, folders)
    found, facts = compare_folders(before, after), changed_facts(before, after)
    if as_json:
        plain = {"cases": [one.summary() for one in found], "environment": [list(fact) for fact in facts]}
        typer.echo(json.dumps(plain, ensure_ascii=False))
    else:
        _show_comparison(found, facts, before, after)


def _show_comparison(
    found: Sequence[Comparison], facts: Sequence[tuple[str, str, str]], before: Path, after: Path
) -> None:
    """The verdicts as a table, and what differs between the two environments."""
    table = _make_table("case", "source", "A", "B", "change", "95 % of the time", "p", "runs", "verdict",
                       right=("A", "B", "change", "95 % of the time", "p", "runs"))  # fmt: skip
    for one in found:
        table.add_row(
            one.name, f"{SOURCE_MARKS[one.source]} {one.source}",
            GAP if one.before is None else rate(one.before), GAP if one.after is None else rate(one.after),
            GAP if one.ratio is None else percent(one.ratio - 1),
            GAP if one.low is None or one.high is None else f"{percent(one.low - 1)} to {percent(one.high - 1)}",
            GAP if one.p is None else f"{one.p:.4f}", f"{one.runs[0]}, {one.runs[1]}",
            f"{one.verdict}: {one.why}" if one.why else one.verdict,
        )  # fmt: skip
    told = [f"{key}: {_brief(then)} → {_brief(now)}" for key, then, now in facts]
    _show_table(table, f"A {before}, B {after}; images/s, medians of the runs", *told)


def _brief(text: str) -> str:
    """A fact on one line."""
    flat = " ".join(text.split())
    return (flat if len(flat) <= 60 else flat[:57] + "...") or "none"
