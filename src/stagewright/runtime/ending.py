"""How a worker ends that cannot go on: it says why, for the launcher and for whoever looks at its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stagewright.errors import RunError
from stagewright.runtime.confession import confess, write_confession
from stagewright.runtime.diagnosis import verdict
from stagewright.runtime.meeting import Place, lost_hosts
from stagewright.schedule import Schedule


@dataclass
class LastWords:
    """What a worker says at its end, as far as it has come to know where it is."""

    schedule: Schedule
    timeout_s: float
    worker: int
    folder: Path | None = None
    places: Sequence[Place] = ()
    is_said: bool = False

    def of(self, fault: BaseException) -> BaseException:
        """Writes down why this worker ends, once; returns the fault, or in its place what is known of another's."""
        if self.is_said or self.folder is None:
            return fault
        self.is_said = True
        told = confess(self.folder, self.worker, fault, self._waited)
        return fault if told is None else RunError(*told)

    def when_stuck(self) -> str:
        """Writes down and returns what there is to say when nothing gets on."""
        what, lost = self._waited()
        if self.folder is not None and not self.is_said:
            write_confession(self.folder, self.worker, what, is_own=False, lost=lost)
        return f"error: {what}"

    def _waited(self) -> tuple[str, list[str]]:
        """For whom this worker waited, and which hosts do not answer."""
        lost = lost_hosts(self.places, self.worker, min(0.5, self.timeout_s / 20)) if self.places else []
        folder = self.folder
        said = verdict(self.schedule, folder, self.worker, self.timeout_s) if folder else "the workers did not start"
        return (f"host {', '.join(lost)} does not answer; {said}" if lost else said), lost
