"""`stagewright bench`: runs a suite of cases, or sets two folders of results against one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field
from rich.console import Console

from stagewright.bench.task import Choices
from stagewright.cli.options import takes
from stagewright.cli.show import fitted, show, show_json, table
from stagewright.cluster import count
from stagewright.errors import UsageError
from stagewright.record import Record
from stagewright.report.figures import GAP, percent, rate, seconds, size, speed
from stagewright.report.tables import SOURCE_MARKS
from stagewright.schema import schema

if TYPE_CHECKING:
    from stagewright.bench.compare import Comparison
    from stagewright.bench.harness import Progress, Row
    from stagewright.bench.suite import Suite
    from stagewright.bench.task import Task


@schema(error=UsageError)
class _Benching:
    out: Path | None = None
    """folder for the results; goes on there"""
    list: bool = False
    """show the cases and how they would run"""
    repetitions: int | None = Field(default=None, ge=1)
    """runs of each case; 7 if the suite does not say"""
    retry: bool = False
    """run again what failed"""
    json: bool = False
    """print the rows as JSON"""


@takes()
def bench(
    what: Annotated[
        list[str], typer.Argument(metavar="SUITE | compare A B", help="a suite's name or file; or two result folders")
    ],
    *, choices: Choices, own: _Benching,
) -> None:  # fmt: skip
    """Run a suite of benchmarks: repeated, interleaved, kept with logs; an interrupted one goes on where it stopped.

    `stagewright bench compare A B` tells noise from change.

    Example: stagewright bench resnet50-amp --simulate --only '*-synthetic' -o bench
    """
    if what[0] == "compare":
        _compare(what[1:], own.json)
        return
    if len(what) > 1:
        raise UsageError(f"one suite at a time, not {', '.join(what)}", "or: stagewright bench compare A B")
    from stagewright.bench.machine import look_here
    from stagewright.bench.suite import load_suite
    from stagewright.bench.task import make_tasks

    suite = load_suite(what[0])
    tasks = make_tasks(suite, choices, look_here(), _check_words)
    if own.list:
        _show_list(suite, tasks, own.json)
    elif own.out is None:
        raise UsageError("the folder for the results is not given", "add -o DIR, or --list to look first")
    else:
        _run(suite, tasks, own.out, own)


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


def _run(suite: Suite, tasks: Sequence[Task], out: Path, own: _Benching) -> None:
    """Runs what is left, a line a run, and shows the rows."""
    from stagewright.bench.harness import Session, rows_of, run_suite
    from stagewright.bench.machine import capture, look_here

    console = Console(stderr=True, highlight=False, markup=False)
    session = Session(facts=capture(), num_cards=look_here().num_cards)
    progress = None
    try:
        for progress in run_suite(
            suite.name, tasks, out, own.repetitions or suite.repetitions, session, retry=own.retry
        ):
            console.print(*fitted(_progress_line(progress), console), sep="\n", soft_wrap=True)
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on from here")
        raise
    if progress is None:
        console.print(f"nothing was left to run: {out} holds it all")
    rows = rows_of(tasks, out)
    if own.json:
        show_json([row._asdict() for row in rows])
    else:
        _show_rows(rows, out)


def _progress_line(progress: Progress) -> str:
    """` 7/40  vgg16-ssp, 2nd run: 1,014 images/s in 12.3 s · about 8 min 20 s left`."""
    result, task, left_s = progress.result, progress.task, progress.left_s
    told = speed(result.samples_per_s, result) if isinstance(result, Record) else f"failed: {result.reason}"
    mark, left = SOURCE_MARKS[task.source if isinstance(result, Record) else "failed"], ""
    if left_s is not None and progress.num_done < progress.num_runs:  # an estimate has no hundredths
        left = f" · about {seconds(left_s) if left_s >= 60 else f'{max(round(left_s), 1)} s'} left"
    place = f"{progress.num_done:>{len(str(progress.num_runs))}}/{progress.num_runs}"
    return f"{place}  {mark} {task.case.name} · run {progress.number}: {told} in {progress.seconds:.1f} s{left}"


def _show_list(suite: Suite, tasks: Sequence[Task], as_json: bool) -> None:
    """The cases, and how they would run here."""
    if as_json:
        names = ("source", "command", "skipped", "notes")
        show_json([{"name": task.case.name, **{name: getattr(task, name) for name in names}} for task in tasks])
        return
    rows = []
    for task in tasks:
        case = task.case
        how = f"{SOURCE_MARKS['failed']} not here" if task.skipped else f"{SOURCE_MARKS[task.source]} {task.mode}"
        where = task.cluster.name if task.cluster else case.device or "this machine"
        rows.append((case.name, how, where, case.placement or "every device", case.data, case.precision))
    told = dict.fromkeys(text for task in tasks for text in (task.skipped, *task.notes) if text)
    about = f"{suite.name}: {suite.about}" if suite.about else suite.name
    many = f"{count(len(tasks), 'case')}, {suite.repetitions} runs each unless simulated"
    show(table("case | how | on | placement | data | precision", rows), [about, many, *told])


def _show_rows(rows: Sequence[Row], out: Path) -> None:
    """The cases with their medians and spreads; different work is told apart by the samples of a step."""
    failed = [f"{SOURCE_MARKS['failed']} {row.name}: {row.reason}" for row in rows if row.reason]
    notes = dict.fromkeys(note if " fit: " not in note else f"{row.name} {note}" for row in rows for note in row.notes)
    lines = []
    for row in rows:
        source, figures = f"{SOURCE_MARKS['failed']} failed", [GAP] * 5
        if row.images_per_s is not None and row.low is not None and row.high is not None:
            spread = f"{(row.high - row.low) / row.images_per_s:.1%}" if row.repetitions > 1 else GAP
            work = (f"{row.step_images:,}", size(row.peak_bytes or 0))
            source = f"{SOURCE_MARKS[row.source]} {row.source}"
            figures = [str(row.repetitions), rate(row.images_per_s), spread, *work]
        lines.append((row.name, source, *figures))
    units = {row.unit for row in rows if row.images_per_s is not None}
    unit = units.pop() if len(units) == 1 else "samples/s"
    titles = f"case | source | runs> | {unit}> | spread> | samples a step> | peak>"
    show(table(titles, lines), [*failed, *notes, f"saved {out} · next: stagewright report {out}"])


def _compare(folders: Sequence[str], as_json: bool) -> None:
    """Shows what changed between two folders, and what only wavered: the verdicts, and what differs around them."""
    if len(folders) != 2:
        raise UsageError(f"compare takes two folders, not {len(folders)}", "stagewright bench compare A B")
    from stagewright.bench.compare import changed_facts, compare

    before, after = map(Path, folders)
    found, facts = compare(before, after), changed_facts(before, after)
    if as_json:
        show_json({"cases": [one._asdict() for one in found], "environment": facts})
        return

    def brief(text: str) -> str:
        flat = " ".join(text.split())
        return (flat if len(flat) <= 60 else flat[:57] + "...") or "none"

    titles = "case | source | A> | B> | change> | 95 % of the time> | p> | runs> | verdict"
    told = [f"{key}: {brief(then)} → {brief(now)}" for key, then, now in facts]
    head = f"A {before}, B {after}; samples/s, medians of the runs"
    show(table(titles, map(_comparison_cells, found)), [head, *told])


def _comparison_cells(one: Comparison) -> tuple[str, ...]:
    return (
        one.name, f"{SOURCE_MARKS[one.source]} {one.source}",
        GAP if one.before is None else rate(one.before), GAP if one.after is None else rate(one.after),
        GAP if one.ratio is None else percent(one.ratio - 1),
        GAP if one.low is None or one.high is None else f"{percent(one.low - 1)} to {percent(one.high - 1)}",
        GAP if one.p is None else f"{one.p:.4f}", f"{one.runs[0]}, {one.runs[1]}",
        f"{one.verdict}: {one.why}" if one.why else one.verdict,
    )  # fmt: skip
