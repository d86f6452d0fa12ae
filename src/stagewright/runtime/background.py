"""What runs beside a worker's own thread, and the streams and events by which a card is told of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from stagewright.errors import RunError


class Pending(Protocol):
    """Something on its way, as torch's own `Work` is."""

    def wait(self) -> object:
        """Returns when what follows on this worker (or on its stream) may read it."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""


class Several:
    """Several things on their way."""

    def __init__(self, parts: Iterable[Pending | None]) -> None:
        self._parts = [part for part in parts if part is not None]

    def wait(self) -> None:
        for part in self._parts:
            part.wait()

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)


class BackgroundThread:
    """A thread that does small jobs in their order, most of them waiting, so that the worker itself never has to."""

    def __init__(self, name: str, timeout_s: float, wake: threading.Event | None = None) -> None:
        self.timeout_s = timeout_s
        self._failure: BaseException | None = None
        self._wake = wake
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Callable[[], None]) -> None:
        """Does this next; what the job refers to lives until it is done."""
        self.check()
        self._jobs.put(job)

    def promise(self, job: Callable[[], None], copied: torch.cuda.Event | None = None) -> Pending:
        """Does this next, and tells when it is done; `copied` is recorded in the job, behind copies to the card."""
        done = threading.Event()

        def finish() -> None:
            try:
                job()
            finally:
                done.set()

        self.add(finish)
        return _Promise(self, done, copied)

    def check(self) -> None:
        """Raises what went wrong."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as failure:  # it is shown by the worker, which is another thread
                self._failure = self._failure or failure
            if self._wake is not None:
                self._wake.set()
            del job

    def close(self) -> None:
        """Waits until all is done."""
        self._jobs.put(None)
        self._thread.join(self.timeout_s)
        if self._thread.is_alive():
            raise RunError(f"sent rows were not taken within {self.timeout_s:g} s", "look for the worker that stopped")
        self.check()


class _Promise:
    """The receipt of what a thread does."""

    def __init__(self, thread: BackgroundThread, done: threading.Event, copied: torch.cuda.Event | None) -> None:
        self._thread, self._done, self._copied = thread, done, copied

    def wait(self) -> None:
        if not self._done.wait(self._thread.timeout_s):
            raise RunError(f"no rows came within {self._thread.timeout_s:g} s", "look for the worker that stopped")
        self._thread.check()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def is_completed(self) -> bool:
        return self._done.is_set()


def new_stream() -> torch.cuda.Stream:
    """A stream beside the one that computes, and before it: one of its own kind would queue behind what it issued."""
    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    """An event that a thread waits for asleep, not spinning."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
