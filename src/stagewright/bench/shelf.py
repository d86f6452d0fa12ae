"""The folder of a suite's results: what is done, what is next, and nothing counted twice.

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
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from stagewright.bench.environment import identity
from stagewright.bench.task import Task
from stagewright.errors import FileError, StagewrightError, UsageError
from stagewright.record import Record
from stagewright.report.cases import FAILURE_END, RECORD_END, Failure
from stagewright.schema import Saved, schema

_BEGUN, _LOCK = "bench.json", ".lock"


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
class Place:
    """The files of one repetition."""

    folder: Path
    case: str
    number: int

    def path(self, end: str) -> Path:
        """The file with this ending."""
        return self.folder / self.case / f"{self.case}.{self.number}{end}"

    @property
    def is_done(self) -> bool:
        """Whether the repetition has been counted, well or badly ended."""
        return self.path(RECORD_END).exists() or self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether it ended badly."""
        return self.path(FAILURE_END).exists()

    def clear(self) -> Path:
        """Removes what an interrupted attempt left; the new folder of the run."""
        run = self.path("")
        shutil.rmtree(run, ignore_errors=True)
        for end in (".log", ".environment.json", ".samples.csv"):
            self.path(end).unlink(missing_ok=True)
        run.mkdir(parents=True)
        return run

    def forget_failure(self) -> None:
        """Lets the repetition be run again if it ended badly."""
        self.path(FAILURE_END).unlink(missing_ok=True)

    def keep(self, result: Record | Failure) -> None:
        """Counts the repetition: after this line it is done, before it it is not."""
        result.save(self.path(RECORD_END if isinstance(result, Record) else FAILURE_END))

    def result(self) -> Record | Failure | None:
        """How the repetition ended, if it has."""
        if self.path(RECORD_END).exists():
            return Record.load(self.path(RECORD_END))
        return Failure.load(self.path(FAILURE_END)) if self.has_failed else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder, so that no other process counts there meanwhile; the kernel lets go of it with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("w")
    except OSError as fault:
        raise FileError(f"{folder}: {fault.strerror}", "give a folder that can be written with -o") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            busy = f"another `stagewright bench` is at work in {folder}"
            raise UsageError(busy, "wait for it, or use another folder with -o") from None
        yield


def begin(folder: Path, suite: str, tasks: Sequence[Task], repetitions: int, facts: Mapping[str, str]) -> None:
    """Writes down what is measured here; refuses to add to results of other settings, machines or commits."""
    commands = {task.case.name: task.command for task in tasks}
    path = folder / _BEGUN
    before = _Begun.load(path) if path.exists() else None
    if before is not None:
        _check_same(folder, before, suite, commands, identity(facts))
        commands = {**before.commands, **commands}
        repetitions = max(repetitions, before.repetitions)
    _Begun(suite=suite, repetitions=repetitions, commands=commands, identity=identity(facts)).save(path)
    for cluster in {task.cluster.name: task.cluster for task in tasks if task.cluster is not None}.values():
        cluster.save(folder / f"{cluster.name}.cluster.yaml")


def _check_same(folder: Path, before: _Begun, suite: str, commands: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuses a folder whose results are not of the same suite, cases, machine and commit."""
    todo = "use another folder with -o; `stagewright bench compare` sets the two against one another"
    if before.suite != suite:
        raise UsageError(f"{folder} holds results of the suite {before.suite}, not of {suite}", todo)
    for key in dict.fromkeys((*before.identity, *now)):
        then, this = before.identity.get(key, "none"), now.get(key, "none")
        if then != this:
            raise UsageError(f"{folder} was begun with {key} {then}, and here it is {this}", todo)
    for name in before.commands.keys() & commands.keys():
        # A case that could not run then has no results that another command would spoil.
        if before.commands[name] not in ("", commands[name]):
            raise UsageError(
                f"{folder} holds results of {name} as `{before.commands[name]}`, which is now `{commands[name]}`", todo
            )


def pack(folder: Path, case: str) -> Path:
    """One archive of everything that a case left, written whole or not at all."""
    home = folder / case
    path, part = home / f"{case}.zip", home / f".{case}.zip.part"
    files = sorted(file for file in home.rglob("*") if file.is_file() and file not in (path, part))
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.relative_to(folder))
    return part.replace(path)
