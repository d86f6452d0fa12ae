"""Ending a run early at the same batch on every worker: on SIGTERM, Ctrl-C, SLURM's warning, or the launcher's word.

A worker may be blocked in a transfer for a long time, so the agreement is made by a thread of each, over the store:

    someone wants to stop          all hear of it
    each promises its own X        "I begin no batch after X until we have agreed"
    all stop after max X           nobody has begun a later batch, everybody can finish that one
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from stagewright.runtime.launch.environment import RUN_FOLDER
from stagewright.runtime.run_folder import STOP_FILE
from stagewright.runtime.world import Words, World
from stagewright.schedule import Action


class Gate:
    """Lets a worker's actions pass until an agreement has been made on the last batch."""

    def __init__(self, first_batch: int = 0) -> None:
        self.last: int | None = None
        """The last batch of the run, once all have agreed on it."""
        self._furthest = first_batch - 1
        self._promise: int | None = None
        self._changed = threading.Condition()

    def passing(self, order: Iterator[Action], reach: int) -> Iterator[Action]:
        """The actions of an order up to the last batch; `reach` is how far apart the batches of a turn are."""
        for action in order:
            if action.batch <= self._furthest or self._may_begin(action.batch):
                yield action
            elif self.last is not None and action.batch > self.last + reach:
                return

    def _may_begin(self, batch: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._promise is None or batch <= self._promise or self.last is not None)
            may_begin = self.last is None or batch <= self.last
            if may_begin:
                self._furthest = max(self._furthest, batch)
            return may_begin

    def promise(self) -> int:
        """Begins no batch after the one that comes back, until `agree`."""
        with self._changed:
            self._promise = self._furthest + 1
            return self._promise

    def agree(self, last: int) -> None:
        """Makes a batch the last one."""
        with self._changed:
            self.last = last
            self._changed.notify_all()


class Stopper:
    """Listens for the wish to stop, and agrees with the other workers on the last batch."""

    def __init__(
        self, gate: Gate, world: World, folder: Path, words: Words | None, signals: Sequence[signal.Signals]
    ) -> None:
        self.gate, self.world, self.folder, self.words = gate, world, folder, words
        self.cause: str | None = None
        """Why the run ends early, once somebody wants that."""
        self._signals, self._heard = signals, list[str]()
        self._thread = threading.Thread(target=self._listen, name="stopping", daemon=True)
        self._closed = threading.Event()

    @contextmanager
    def listening(self) -> Iterator[Stopper]:
        """Listens while the block runs."""

        def hear(number: int, frame: FrameType | None) -> None:
            self._heard.append(signal.Signals(number).name)

        before = {number: signal.signal(number, hear) for number in self._signals}
        self._thread.start()
        try:
            yield self
        finally:
            self._closed.set()
            self._thread.join(2.0)  # it may be stuck in a store that is cut off
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait_for_own_signal(self, limit_s: float) -> None:
        """Waits a while for torchrun to ask this worker too, if another one was asked.

        When hosts come, each agent ends its workers to start them anew. One whose workers have ended by themselves
        takes the run for finished, and leaves.
        """
        deadline = time.monotonic() + limit_s
        while self.cause is not None and not self._heard and time.monotonic() < deadline:
            time.sleep(0.05)

    def _listen(self) -> None:
        while not self._closed.wait(0.2):
            wish = self._wish()
            if wish is not None:
                self.cause = wish
                self._agree(wish)
                return

    def _wish(self) -> str | None:
        """Why the run should end, as soon as there is a reason."""
        if self._heard:
            return self._heard[0]
        try:
            return (self.folder / STOP_FILE).read_text(encoding="utf-8") or "a signal to the launcher"
        except OSError:
            with suppress(RuntimeError):  # a store that is gone: the watchdog ends this worker
                return self.words.get("stop/wish") if self.words is not None else None
        return None

    def _agree(self, wish: str) -> None:
        words, own = self.words, self.gate.promise()
        if words is None:
            self.gate.agree(own)
            return
        words.put("stop/wish", wish)
        words.put(f"stop/{self.world.worker}", str(own))
        promises: list[str | None] = [None]
        deadline = time.monotonic() + 20.0  # one that is gone never answers
        while None in promises and not self._closed.is_set():
            if time.monotonic() > deadline:
                os._exit(128 + signal.SIGTERM)
            time.sleep(0.02)
            promises = [words.get(f"stop/{worker}") for worker in range(self.world.size)]
        if not self._closed.is_set():
            self.gate.agree(max(int(promise or 0) for promise in promises))


def signals_heard() -> tuple[signal.Signals, ...]:
    """The signals that mean "save and stop" to this process.

    A worker of our own launcher dies of SIGTERM as it always did: that is how the launcher ends the others when one has
    failed, and it asks for an orderly end by the file. A run of one worker is its own launcher.
    """
    if threading.current_thread() is not threading.main_thread() or "RANK" not in os.environ:
        return ()
    if RUN_FOLDER in os.environ:
        return (signal.SIGUSR1,)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
