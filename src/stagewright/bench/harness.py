"""A suite from its first run to its last: repetitions interleaved, each counted once, failures as rows.

case     a  b  c   a  b  c   a  b  c          so that a machine that grows slower does so for all cases alike
number   1  1  1   2  2  2   3  3  3
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from stagewright.bench.run import DOES_NOT_FIT, Session, run_once
from stagewright.bench.shelf import Place, begin, locked, pack
from stagewright.bench.task import Task
from stagewright.record import Record
from stagewright.report.cases import FAILURE_END, RECORD_END, Failure


class Progress(NamedTuple):
    """How far a suite is after a run."""

    task: Task
    number: int
    result: Record | Failure
    seconds: float
    num_done: int
    num_runs: int
    left_s: float | None
    """None while nothing tells how long the others take."""


def run_suite(
    suite: str, tasks: Sequence[Task], folder: Path, repetitions: int, session: Session, *, retry: bool = False
) -> Iterator[Progress]:
    """Runs what is left of a suite, with `retry` also what failed, and tells of every run as it ends."""
    with locked(folder):
        begin(folder, suite, tasks, repetitions, session.facts)
        clock = _Clock(tasks, folder, repetitions)
        for place in clock.places() if retry else ():
            place.forget_failure()
        for number in range(1, repetitions + 1):
            for task in tasks:
                place = Place(folder, task.case.name, number)
                if _is_due(task, place):
                    started = time.monotonic()
                    result = run_once(task, place, session)
                    yield clock.told(task, number, result, time.monotonic() - started)
        for task in tasks:
            pack(folder, task.case.name)


def _is_due(task: Task, place: Place) -> bool:
    """Whether a repetition is still to be run: not what is counted, nothing twice that cannot vary, no failed case."""
    if place.is_done or (place.number > 1 and (task.skipped or task.mode == "simulate")):
        return False
    earlier = [Place(place.folder, place.case, number) for number in range(1, place.number)]
    # A case that has only failed will fail again: its time is better spent on the others.
    has_failed = any(one.has_failed for one in earlier)
    return not has_failed or any(one.is_done and not one.has_failed for one in earlier)


class _Clock:
    """What is done, and how long the rest will take by what the same cases have taken so far."""

    def __init__(self, tasks: Sequence[Task], folder: Path, repetitions: int) -> None:
        self._tasks, self._folder, self._repetitions = tasks, folder, repetitions
        self._seconds: dict[str, list[float]] = {}

    def told(self, task: Task, number: int, result: Record | Failure, seconds: float) -> Progress:
        """Takes note of a run, and says how far the suite is."""
        self._seconds.setdefault(task.case.name, []).append(seconds)
        left = list(self.left())
        done = sum(1 for place in self.places() if place.is_done)
        return Progress(task, number, result, seconds, done, done + len(left), self.estimate(left))

    def left(self) -> Iterator[Task]:
        """The task of every repetition that is still to be run."""
        each = (task for _ in range(self._repetitions) for task in self._tasks)
        return (task for task, place in zip(each, self.places()) if _is_due(task, place))

    def estimate(self, left: Sequence[Task]) -> float | None:
        """Seconds for the rest: a case's own mean, or for a case not run yet that of the others of its mode."""
        modes: dict[str, list[float]] = {}
        for task in self._tasks:
            modes.setdefault(task.mode, []).extend(self._seconds.get(task.case.name, []))
        each = [self._seconds.get(task.case.name) or modes[task.mode] for task in left]
        return sum(map(mean, each)) if all(each) else None

    def places(self) -> Iterator[Place]:
        """Every repetition of every task, in the order in which they run."""
        for number in range(1, self._repetitions + 1):
            for task in self._tasks:
                yield Place(self._folder, task.case.name, number)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case of a suite in figures."""

    name: str
    source: str
    model: str
    placement: str
    repetitions: int = 0
    images_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    step_images: int | None = None
    step_s: float | None = None
    peak_bytes: int | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()

    def summary(self) -> Mapping[str, Any]:
        """The figures that `--json` prints."""
        return {**vars(self), "notes": list(self.notes)}


def rows_of(tasks: Sequence[Task], folder: Path) -> list[Row]:
    """Every case with what its repetitions came to, in the suite's order."""
    return [_row_of(task, folder / task.case.name) for task in tasks]


def _row_of(task: Task, home: Path) -> Row:
    """The row of one case."""
    records = [Record.load(path) for path in sorted(home.glob(f"*{RECORD_END}"))]
    failures = [Failure.load(path) for path in sorted(home.glob(f"*{FAILURE_END}"))]
    told: dict[str, Any] = {
        "name": task.case.name,
        "source": task.source,
        "model": task.case.model,
        "placement": task.case.placement,
    }
    reason = failures[0].reason if failures else "" if records else "not run"
    if not records:
        return Row(**told, reason=reason)
    rates = [record.samples_per_s for record in records]
    return Row(
        **told, repetitions=len(records), images_per_s=median(rates), low=min(rates), high=max(rates),
        step_images=records[0].step_samples, step_s=median(record.median_step_s for record in records),
        peak_bytes=max((use.peak_bytes for record in records for use in record.devices), default=None),
        reason=f"{len(failures)} more failed: {reason}" if failures else "", notes=(*task.notes, *_too_full(records)),
    )  # fmt: skip


def _too_full(records: Sequence[Record]) -> list[str]:
    """What the records say of memory that no device has."""
    return [note for note in records[0].notes if note.startswith(DOES_NOT_FIT)]
