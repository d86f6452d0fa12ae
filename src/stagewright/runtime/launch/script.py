"""What a script has done: workers run it again from its beginning, and take that from here instead of doing it again.

the script          run 0 ───────────── run 1 ─────────────
workers of run 0    works, ends at ───▶ ┆
workers of run 1    takes its record    works
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from torch import nn

from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.record import Record
from stagewright.runtime.checkpoint.resuming import give_back
from stagewright.runtime.launch.environment import RUN_FOLDER
from stagewright.runtime.run_folder import RECORD, SCRIPT
from stagewright.schema import Saved

_BEFORE = "STAGEWRIGHT_BEFORE"
"""The variable that tells workers of the runs that their script has been through."""
_Made = TypeVar("_Made", bound=Saved)


class Before(NamedTuple):
    """A run that the script has been through: its folder, which may be gone, and its record, or how it failed."""

    folder: Path | None = None
    record: Record | None = None
    fault: str = ""

    def given_to(self, model: nn.Module) -> Record:
        """The record of the run, and its weights in the caller's model."""
        if self.folder is not None:
            give_back(model, self.folder)
        return cast(Record, self.record)


@dataclass
class Script:
    """The runs of this process's script so far, and what was made for them once."""

    runs: list[Before] = field(default_factory=list)
    made: dict[str, Saved] = field(default_factory=dict)
    num_met: int = 0
    """Runs that a worker has come to."""

    def meet(self) -> Before | None:
        """A run that was done before this worker was started, as it comes to it; None where it is to be done now.

        Ends a worker that comes to a later run: its script goes on without it.
        """
        if _BEFORE not in os.environ:
            return None
        known, number = json.loads(os.environ[_BEFORE]), self.num_met
        self.num_met += 1
        if number > len(known):
            raise SystemExit(0)
        if number == len(known):
            return None
        folder, fault = known[number]
        if fault:
            raise RunError(fault)
        return Before(Path(folder), Record.load(_kept() / f"{number}-{RECORD}"))

    @contextmanager
    def doing(self) -> Iterator[Callable[[Path, Record], None]]:
        """While the block runs, the next run is under way; the block says what it came to."""
        number = len(self.runs)
        self.runs.append(Before(fault="it was not finished"))

        def done(folder: Path, record: Record) -> None:
            self.runs[number] = Before(folder, record)

        try:
            yield done
        except StagewrightError as fault:
            self.runs[number] = Before(fault=str(fault))
            raise

    def once(self, name: str, cls: type[_Made], make: Callable[[], _Made]) -> _Made:
        """What is made here under a name; in a worker what the one that started it has made."""
        path = _kept() / f"{name}.json"
        if _BEFORE in os.environ and path.exists():
            return cls.load(path)
        made = self.made[name] = make()
        return made

    def leave(self, folder: Path) -> Mapping[str, str]:
        """Leaves what was done so far in the folder of a run; the variables that tell its workers."""
        told = [(str(before.folder or ""), before.fault) for before in self.runs[:-1]]
        for number, (path, record, _) in enumerate(self.runs[:-1]):
            if record is not None and record.step_s and not (path is not None and path.exists()):
                raise UsageError(
                    f"workers run the script again, and what its run {number} has trained is gone with {path}",
                    "save it (save_final), or train in a script of its own",
                )
            if record is not None:
                record.save(folder / SCRIPT / f"{number}-{RECORD}")
        for name, made in self.made.items():
            made.save(folder / SCRIPT / f"{name}.json")
        return {_BEFORE: json.dumps(told)}


def _kept() -> Path:
    """Where the one that started this worker has left what it made."""
    return Path(os.environ.get(RUN_FOLDER, os.curdir)) / SCRIPT


SCRIPT_SO_FAR = Script()
"""Of this process."""
