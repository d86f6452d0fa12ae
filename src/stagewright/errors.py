"""What can go wrong, as a tree; every error says what, which value, and what to do.

StagewrightError
├── UsageError          an option or a combination of options that means nothing
├── FileError           a file that is missing, damaged, or of another format or version
├── ClusterError        hardware that cannot be
│   └── PlacementError  a placement or ratio string that cannot be read or does not fit
├── ModelError          a model that cannot be ordered into layers, cut or built
├── ProfileError        impossible or missing measurements
├── PlanError           no plan fits, or a plan contradicts itself
├── ScheduleError       a schedule that is wrong, or a request for one that cannot work
├── SimulationError     a schedule, profile and cluster that do not belong together
├── RecordError         a record that contradicts itself
├── DataError           records, images or labels that cannot be read
├── CheckpointError     a checkpoint that is torn, damaged or of another model
└── RunError            a run that ended early: a dead worker, a timeout, a NaN
"""

from __future__ import annotations

import re

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys instead of showing it: control codes, and marks that turn the direction of writing."""


def visible(text: str) -> str:
    """Text from a file or a program as a terminal may show it: codes that would move its cursor are written out."""
    return _HIDDEN.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class StagewrightError(Exception):
    """A mistake or failure with a sentence on what happened and, where there is one, a way out."""

    status = 2
    """What the command ends with: what was asked for cannot be done as it stands."""
    schema, key = "", ""
    """Whose value is wrong, where that is what happened; then `what` begins with `schema: key key`."""

    def __init__(self, what: str, todo: str | None = None) -> None:
        super().__init__(what, todo)
        self.what = what
        self.todo = todo

    def __str__(self) -> str:
        return self.what if self.todo is None else f"{self.what}\n{self.todo}"


class UsageError(StagewrightError):
    """An option or a combination of options that means nothing."""


class FileError(StagewrightError):
    """A file that is missing, damaged, or of another format or version."""


class ClusterError(StagewrightError):
    """Hardware that cannot be."""


class PlacementError(ClusterError):
    """A placement or ratio string that cannot be read or does not fit."""


class ModelError(StagewrightError):
    """A model that cannot be ordered into layers, cut or built."""


class ProfileError(StagewrightError):
    """Impossible or missing measurements."""


class PlanError(StagewrightError):
    """No plan fits, or a plan contradicts itself."""


class ScheduleError(StagewrightError):
    """A schedule that is wrong, or a request for one that cannot work."""


class SimulationError(StagewrightError):
    """A schedule, profile and cluster that do not belong together."""


class RecordError(StagewrightError):
    """A record that contradicts itself."""


class DataError(StagewrightError):
    """Records, images or labels that cannot be read."""


class CheckpointError(StagewrightError):
    """A checkpoint that is torn, damaged or of another model."""


class RunError(StagewrightError):
    """A run that ended early: a dead worker, a timeout, a NaN."""

    status = 3
    """It may be gone on with."""
    worker: int | None = None
    """The worker that is to blame by a fault of its own, where that is known."""
    hosts: tuple[int, ...] = ()
    """The hosts that are lost."""
    cause: str
    """What happened and why, in a line."""

    def __init__(self, what: str, todo: str | None = None, *, cause: str | None = None) -> None:
        super().__init__(what, todo)
        self.cause = cause or what
