"""A suite from its first run to its last: repetitions interleaved, each counted once, failures as rows.

case     a  b  c   a  b  c   a  b  c          so that a machine that grows slower does so for all cases alike
number   1  1  1   2  2  2   3  3  3

out/
  bench.json                      the suite, each case's command, and the machine and commit it was begun on
  titan-v-8.cluster.yaml          the hardware of simulations
  vgg16-dp8/
    vgg16-dp8.1.record.json       ┐ a repetition is done once its record or its failure lies here,
    vgg16-dp8.2.failure.json      ┘ which appears whole or not at all
    vgg16-dp8.1.log               what the run printed, after its command
    vgg16-dp8.1.environment.json
    vgg16-dp8.1.samples.csv       memory and utilisation of its devices, seen from outside
    vgg16-dp8.1/                  the run's own files: events, summary.csv, logs of the workers
    vgg16-dp8.zip                 all of these
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import time
import traceback
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import mean
from typing import ClassVar, NamedTuple

from pydantic import Field

from stagewright.bench.machine import Watch, look_at_cards, look_at_workers
from stagewright.bench.task import Task
from stagewright.errors import FileError, StagewrightError, UsageError
from stagewright.record import Record
from stagewright.report.cases import FAILURE_END, RECORD_END, Case, Failure
from stagewright.report.figures import speed, too_full
from stagewright.runtime.launch.process import check_server, start_process
from stagewright.schema import Saved, dump_json, schema
from stagewright.simulation.run import IMAGENET_IMAGES
from stagewright.simulation.whatif import Scenario

_DOES_NOT_FIT = "does not fit"
_IDENTITY = ("host", "cpu", "gpu", "driver", "commit", "stagewright", "torch", "numpy")
"""What makes two sessions one and the same measurement."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all runs of one `stagewright bench` share."""

    facts: Mapping[str, str]
    num_cards: int = 0
    program: tuple[str, ...] = (sys.executable, "-m", "stagewright")


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
    runs = [(task, _Place(folder, task.case.name, number)) for number in range(1, repetitions + 1) for task in tasks]
    took: list[tuple[Task, float]] = []
    with _locked(folder):
        _begin(folder, suite, tasks, repetitions, session.facts)
        for _, place in runs if retry else ():
            place.path(FAILURE_END).unlink(missing_ok=True)
        for task, place in runs:
            if not _is_due(task, place):
                continue
            started = time.monotonic()
            result, seconds = _run_once(task, place, session), time.monotonic() - started
            took.append((task, seconds))
            left = [other for other, at in runs if _is_due(other, at)]
            done = sum(at.is_done for _, at in runs)
            yield Progress(task, place.number, result, seconds, done, done + len(left), _seconds_left(left, took))
        for task in tasks:
            _pack(folder, task.case.name)


def _is_due(task: Task, place: _Place) -> bool:
    """Whether a repetition is still to be run: not what is counted, nothing twice that cannot vary, no failed case."""
    if place.is_done or (place.number > 1 and (task.skipped or task.mode == "simulate")):
        return False
    earlier = [_Place(place.folder, place.case, number) for number in range(1, place.number)]
    # A case that has only failed will fail again: its time is better spent on the others.
    return not any(one.has_failed for one in earlier) or any(one.is_done and not one.has_failed for one in earlier)


def _seconds_left(left: Sequence[Task], took: Sequence[tuple[Task, float]]) -> float | None:
    """How long the rest takes: a case's own mean, or for a case not run yet that of the others of its mode."""
    total = 0.0
    for task in left:
        own = [each_s for other, each_s in took if other.case.name == task.case.name]
        alike = own or [each_s for other, each_s in took if other.mode == task.mode]
        if not alike:
            return None
        total += mean(alike)
    return total


class Row(NamedTuple):
    """A case of a suite in figures; what `--json` prints."""

    name: str
    source: str
    model: str
    placement: str
    repetitions: int = 0
    unit: str = "samples/s"
    images_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    step_images: int | None = None
    step_s: float | None = None
    peak_bytes: int | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()


def rows_of(tasks: Sequence[Task], folder: Path) -> list[Row]:
    """Every case with what its repetitions came to, in the suite's order."""
    rows = []
    for task in tasks:
        home = folder / task.case.name
        records = [Record.load(path) for path in sorted(home.glob(f"*{RECORD_END}"))]
        failures = [Failure.load(path) for path in sorted(home.glob(f"*{FAILURE_END}"))]
        reason = failures[0].reason if failures else "" if records else "not run"
        row = Row(task.case.name, task.source, task.case.model, task.case.placement, reason=reason)
        if records:
            case = Case(records=tuple(records), files=())
            does_not_fit = (note for note in records[0].notes if note.startswith(_DOES_NOT_FIT))
            row = row._replace(
                repetitions=len(records), unit=f"{records[0].sample_name}/s", images_per_s=case.samples_per_s,
                low=min(case.rates), high=max(case.rates),
                step_images=records[0].step_samples, step_s=case.step_s, peak_bytes=case.peak_bytes or None,
                reason=f"{len(failures)} more failed: {reason}" if failures else "", notes=(*task.notes, *does_not_fit),
            )  # fmt: skip
        rows.append(row)
    return rows


# ── one run ─────────────────────────────────────────────────────────────────────────────────────────────


def _run_once(task: Task, place: _Place, session: Session) -> Record | Failure:
    run = place.clear()
    facts = {**session.facts, "command": task.command}
    place.path(".environment.json").write_text(dump_json(facts), encoding="utf-8")
    try:
        if task.skipped:
            result: Record | Failure = _failure(task, task.skipped)
        elif task.mode == "simulate":
            result = _simulate(task, place, session)
        else:
            result = _run_process(task, place, run, session)
    except StagewrightError as fault:
        result = _failure(task, f"{fault.what}: {fault.todo}" if fault.todo else fault.what)
    # After this line it is done, before it it is not.
    result.save(place.path(RECORD_END if isinstance(result, Record) else FAILURE_END))
    return result


def _failure(task: Task, reason: str) -> Failure:
    case = task.case
    return Failure(
        name=case.name, reason=reason[:600], model=case.model, placement=case.placement, source=task.source,
        command=task.command,
    )  # fmt: skip


def _simulate(task: Task, place: _Place, session: Session) -> Record | Failure:
    """The simulation of a case, here and now: it has no start-up to share with others."""
    assert task.cluster is not None
    case, log = task.case, place.path(".log")
    setting = Scenario(
        model=case.model, precision=case.precision, data=case.data, epoch_images=case.epoch_images or IMAGENET_IMAGES
    )
    options = replace(case.plan, placement=case.placement)
    try:
        record = setting.record(task.cluster, options, name=case.name)
    except Exception as fault:
        log.write_text(f"$ {task.command}\n{traceback.format_exc()}", encoding="utf-8")
        if isinstance(fault, StagewrightError):
            raise
        return _failure(task, f"{type(fault).__name__}: {fault}")
    figures = f"step {record.median_step_s:.6f} s, {speed(record.samples_per_s, record)}, limited by {record.limit}"
    log.write_text("\n".join((f"$ {task.command}", figures, *task.notes, *record.notes, "")), encoding="utf-8")
    # A simulation says nothing of the machine it was worked out on.
    facts = {key: session.facts[key] for key in ("stagewright", "commit") if key in session.facts}
    short = too_full(record, task.cluster)
    notes = (*task.notes, *([f"{_DOES_NOT_FIT}: {short}"] if short else []), *record.notes)
    return replace(record, command=task.command, environment=facts, notes=notes)


def _run_process(task: Task, place: _Place, run: Path, session: Session) -> Record | Failure:
    """The case as a process of its own, watched from outside while it runs; none outlives who started it."""
    seed = ["--seed", str(place.number)] if task.case.seeds else []
    words, log = [*session.program, *task.words, *seed, "-o", str(run), "--json"], place.path(".log")
    log.write_text(f"$ {task.command}\n", encoding="utf-8")
    process = start_process("run", words, os.environ, log)
    uses_cards = session.num_cards > 0 and task.case.device != "cpu" and task.mode == "train"
    look = look_at_cards() if uses_cards else look_at_workers(process.pid or 0, alone=task.num_workers == 1)
    with Watch(look) as watch:
        status = _ended(process, task.case.limit_s)
    check_server([process])
    place.path(".samples.csv").write_text(watch.table(), encoding="utf-8")
    saved = run / "record.json"
    if status == 0 and saved.exists():
        return _finish(Record.load(saved), task, session, watch.seen())
    said = log.read_text(encoding="utf-8", errors="replace")
    return _failure(task, _reason_of(status, task.case.limit_s, said.partition("\n")[2], run))


def _ended(process: BaseProcess, limit_s: float) -> int | None:
    """The exit status; None for a run that was ended because it took too long."""
    status = None
    try:
        process.join(limit_s)
        status = process.exitcode
    finally:
        for end in (process.terminate, process.kill):
            if process.exitcode is None:
                end()
                process.join(10)
    return status


def _reason_of(status: int | None, limit_s: float, said: str, run: Path) -> str:
    """Why a run gave no record, in its own words where it has any."""
    if status is None:
        return f"it did not end within {limit_s:g} s (limit_s)"
    if status == 0:
        return "it ended well but left no record.json: with --nodes its folder must be one that all hosts share"
    words = _own_words(said, run)
    ended = f"signal {-status} ended it" if status < 0 else f"it ended with status {status}"
    return words if words and status > 0 else f"{ended}{f': {words}' if words else ''}"


def _own_words(said: str, run: Path) -> str:
    """The last `error: …` of a log with the lines that belong to it, or its last line."""
    blocks = re.findall(r"^error: .*(?:\n {7}.*)*", said, re.MULTILINE)
    if not blocks:
        return said.rstrip().rpartition("\n")[2].strip()
    lines = [line.strip() for line in blocks[-1].removeprefix("error: ").splitlines()]
    # Where its files lay while it ran says nothing to who reads the row.
    return "; ".join(line for line in lines if str(run) not in line)


def _finish(record: Record, task: Task, session: Session, seen: Mapping[int, tuple[int, float | None]]) -> Record:
    """The record under the case's name, with what was seen from outside and where it ran."""
    cards = session.num_cards if task.case.device != "cpu" else 0
    devices = []
    for worker, use in enumerate(record.devices):
        peak_bytes, share = seen.get(_card_of(worker, cards), (None, None))
        if peak_bytes is not None:
            use = replace(use, driver_bytes=max(peak_bytes, use.driver_bytes or 0), driver_share=share)
        devices.append(use)
    shared = f"{record.cluster}, {task.num_workers} workers on {cards}" if task.notes and cards else record.cluster
    facts = {**record.environment, **{key: value for key, value in session.facts.items() if key != "host"}}
    return replace(
        record, name=task.case.name, source=task.source, cluster=shared, command=task.command, environment=facts,
        devices=tuple(devices), notes=(*task.notes, *record.notes),
    )  # fmt: skip


def _card_of(worker: int, num_cards: int) -> int:
    """The card that a worker of one host uses, as the driver numbers them; without cards, the worker itself."""
    if not num_cards:
        return worker
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    own = worker % num_cards
    return int(visible[own]) if own < len(visible) and visible[own].isdecimal() else own


# ── the folder ──────────────────────────────────────────────────────────────────────────────────────────


@schema(error=UsageError)
class _Begun(Saved):
    """What a folder of results was begun with."""

    FORMAT: ClassVar[str] = "stagewright.bench"
    ERROR: ClassVar[type[StagewrightError]] = UsageError

    suite: str
    repetitions: int = Field(ge=1)
    commands: Mapping[str, str]
    """Of each case."""
    identity: Mapping[str, str]


@dataclass(frozen=True)
class _Place:
    """The files of one repetition."""

    folder: Path
    case: str
    number: int

    def path(self, end: str) -> Path:
        """The file with this ending."""
        return self.folder / self.case / f"{self.case}.{self.number}{end}"

    @property
    def is_done(self) -> bool:
        return self.path(RECORD_END).exists() or self.has_failed

    @property
    def has_failed(self) -> bool:
        return self.path(FAILURE_END).exists()

    def clear(self) -> Path:
        """Removes what an interrupted attempt left; the new folder of the run."""
        run = self.path("")
        shutil.rmtree(run, ignore_errors=True)
        for end in (".log", ".environment.json", ".samples.csv"):
            self.path(end).unlink(missing_ok=True)
        run.mkdir(parents=True)
        return run


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder, so that no other process counts there meanwhile; the kernel lets go of it with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as fault:
        raise FileError(f"{folder}: {fault.strerror}", "give a folder that can be written with -o") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            busy = f"another `stagewright bench` is at work in {folder}"
            raise UsageError(busy, "wait for it, or use another folder with -o") from None
        yield


def _begin(folder: Path, suite: str, tasks: Sequence[Task], repetitions: int, facts: Mapping[str, str]) -> None:
    """Writes down what is measured here; refuses to add to results of other settings, machines or commits."""
    path, commands = folder / "bench.json", {task.case.name: task.command for task in tasks}
    identity = {key: facts[key] for key in _IDENTITY if key in facts}
    if path.exists():
        before = _Begun.load(path)
        if other := _difference(before, suite, commands, identity):
            todo = "use another folder with -o; `stagewright bench compare` sets the two against one another"
            raise UsageError(f"{folder} {other}", todo)
        commands = {**before.commands, **commands}
        repetitions = max(repetitions, before.repetitions)
    _Begun(suite=suite, repetitions=repetitions, commands=commands, identity=identity).save(path)
    for cluster in {task.cluster.name: task.cluster for task in tasks if task.cluster is not None}.values():
        cluster.save(folder / f"{cluster.name}.cluster.yaml")


def _difference(before: _Begun, suite: str, commands: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What a folder has that is not of the same suite, cases, machine and commit."""
    if before.suite != suite:
        return f"holds results of the suite {before.suite}, not of {suite}"
    for key in dict.fromkeys((*before.identity, *now)):
        then, this = before.identity.get(key, "none"), now.get(key, "none")
        if then != this:
            return f"was begun with {key} {then}, and here it is {this}"
    for name in before.commands.keys() & commands.keys():
        # A case that could not run then has no results that another command would spoil.
        if before.commands[name] not in ("", commands[name]):
            return f"holds results of {name} as `{before.commands[name]}`, which is now `{commands[name]}`"
    return ""


def _pack(folder: Path, case: str) -> Path:
    home = folder / case
    path, part = home / f"{case}.zip", home / f".{case}.zip.part"
    files = sorted(file for file in home.rglob("*") if file.is_file() and file not in (path, part))
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.relative_to(folder))
    return part.replace(path)
