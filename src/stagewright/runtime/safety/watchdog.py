"""The watchdog: a worker that does not get on ends itself, and says where it stood and for whom it waited.

It is the one clock of a worker: transfers and collectives wait as long as they must, and this ends the process when no
action begins for the timeout. Who waits for the disk may take longer, and says so to those who wait for it:

    worker 0   waits for rows of worker 3 … its time is up … worker 3 is saving, and alive … goes on waiting
    worker 3   waits for the disk, and counts in the store
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import stagewright
from stagewright.errors import RunError, StagewrightError
from stagewright.runtime.launch.meeting import Place, lost_hosts
from stagewright.runtime.safety.diagnosis import Scene
from stagewright.runtime.safety.flight import Confession, Flight
from stagewright.runtime.safety.links import bad_links
from stagewright.runtime.safety.memory import out_of_memory
from stagewright.runtime.world import Words
from stagewright.schedule import Schedule

_T = TypeVar("_T")
_ECHOES = (
    "closed by peer", "reset by peer", "timed out", "timeout", "broken pipe", "connection refused", "gloo", "nccl",
    "waited", "sent rows were not taken", "no rows came within", "did not start within", "socket", "process group",
)  # fmt: skip
"""Words in the fault of a worker that only suffered from another one's."""
_OWN_FOLDER = str(Path(stagewright.__file__).parent)
_OTHERS_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Where Python's modules and installed packages are: what is nowhere there is the user's."""


class Watchdog:
    """Ends this process when it does not get on. All that runs in a thread of its own."""

    def __init__(self, timeout_s: float, start_s: float, last_words: Callable[[], str], *, is_on: bool = True) -> None:
        self._timeout_s, self._limit_s, self._last_words = timeout_s, max(start_s, timeout_s), last_words
        self.flight: Flight | None = None
        self.words: Words | None = None
        self.worker, self.size = 0, 1
        self._busy = 0
        self._beats = 0
        self._since = time.monotonic()
        self._is_over = threading.Event()
        if is_on:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self, flight: Flight, words: Words | None, worker: int, size: int) -> None:
        """Watches a worker's actions from now on, and listens to the other workers."""
        self.flight, self.words, self.worker, self.size = flight, words, worker, size

    def get_on(self, limit_s: float | None = None) -> None:
        """Notes that something was achieved; from now on the next thing may take so long, by default the timeout."""
        self._since, self._limit_s = time.monotonic(), limit_s or self._timeout_s

    @contextmanager
    def patience(self, limit_s: float) -> Iterator[None]:
        """While the block runs, this worker may take so long, and those who wait for it know that it is alive."""
        before, self._busy = self._limit_s, self._busy + 1
        self.get_on(limit_s + self._timeout_s)
        try:
            yield
        finally:
            self._busy -= 1
            self.get_on(before)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *fault: object) -> None:
        """Watches no longer, or after a failure until the process has ended, which gets a last while for that."""
        if fault == (None, None, None):
            self._is_over.set()
            return
        self._busy, self._last_words = 0, lambda: ""
        self.get_on(self._timeout_s / 4)
        self.words = self.flight = None

    def _watch(self) -> None:
        count = 0
        while not self._is_over.wait(min(1.0, self._timeout_s / 20)):
            flight = self.flight
            if flight is not None:
                flight.beat()
                if flight.count != count:
                    count = flight.count
                    self.get_on(self._limit_s)
            if self._busy:
                self._beats += 1
                self._ask(lambda words: words.put(f"busy/{self.worker}", str(self._beats)))
            if time.monotonic() - self._since > self._limit_s and not self._someone_is_busy():
                text = _in_time(self._last_words, 1.0)  # they go to a disk that may be cut off too
                if text:
                    with suppress(OSError, ValueError):
                        print(text, file=sys.stderr, flush=True)
                os._exit(1)

    def _ask(self, ask: Callable[[Words], _T]) -> _T | None:
        """What the store answers in time: it may be cut off, and then it never does."""
        words = self.words
        return _in_time(lambda: ask(words), self._timeout_s / 20) if words is not None else None

    def _someone_is_busy(self) -> bool:
        """Whether another worker says that it is busy, now."""
        others = [f"busy/{worker}" for worker in range(self.size) if worker != self.worker]
        before = self._ask(lambda words: [words.get(key) for key in others])
        if before is None or self._busy or not any(before):
            return False
        time.sleep(self._timeout_s / 8)  # one that is busy is heard of in that time
        after = self._ask(lambda words: [words.get(key) for key in others])
        if after is None or after == before:
            return False
        self.get_on(self._limit_s)
        return True


def _in_time(do: Callable[[], _T], limit_s: float) -> _T | None:
    """What a function gives within so many seconds; it goes on alone when it takes longer."""
    made: list[Any] = []

    def run() -> None:
        with suppress(Exception):
            made.append(do())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return made[0] if made else None


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
        fault = out_of_memory(fault, self.schedule, self.folder, self.worker) or fault
        place = _users_place(fault)
        if isinstance(fault, StagewrightError):
            what, todo = fault.what, fault.todo or ""
        else:
            lines = str(fault).strip().splitlines() or [""]
            what, todo = f"{type(fault).__name__}: {lines[0]}", ""
        was_ended = isinstance(fault, SystemExit) and fault.code == 128 + signal.SIGTERM  # by a handler of the script's
        if not was_ended and (place is not None or not any(word in what.lower() for word in _ECHOES)):
            Confession(f"{what} ({place})" if place else what, todo).write(self.folder, self.worker)
            return fault
        confession = self._waited(what)
        confession.write(self.folder, self.worker)
        return RunError(confession.what, what)

    def when_stuck(self) -> str:
        """Writes down and returns what there is to say when nothing gets on."""
        confession = self._waited()
        if self.folder is not None and not self.is_said:
            confession.write(self.folder, self.worker)
        return f"error: {confession.what}"

    def _waited(self, saw: str = "") -> Confession:
        """For whom this worker waited, which hosts do not answer, and which do not confirm what they are sent."""
        links = bad_links(self.places, self.worker) if self.places else []
        lost = lost_hosts(self.places, self.worker, min(0.5, self.timeout_s / 20)) if self.places else []
        said = "the workers did not start"
        if self.folder is not None:
            said = Scene.read(self.schedule, self.folder).verdict(self.worker, self.timeout_s)
        if lost:
            said = f"host {', '.join(lost)} does not answer; {said}"
        elif links:
            said = f"host {', '.join(links)} does not confirm what it is sent; {said}"
        return Confession(said, saw, own=False, lost=tuple(lost), links=tuple(links))


def _users_place(fault: BaseException) -> str | None:
    """The line of the user's own code, called by ours, in which a fault was raised; None where it was not there."""
    frames = traceback.extract_tb(fault.__traceback__)
    ours = [number for number, frame in enumerate(frames) if frame.filename.startswith(_OWN_FOLDER)]
    inside = frames[ours[-1] + 1 :] if ours else []
    packages = (*_OTHERS_FOLDERS, "<")
    theirs = [
        each for each in inside if not each.filename.startswith(packages) and "site-packages" not in each.filename
    ]
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}, in {theirs[-1].name}" if theirs else None
