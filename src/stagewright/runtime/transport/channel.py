"""What every transport offers, and what they share."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stagewright.errors import RunError


class Channel(NamedTuple):
    """The boundary after `stage`, forward or backward."""

    stage: int
    is_forward: bool


Parts = Sequence[tuple[int, Sequence[Tensor]]]
"""For each peer the tensors that go to it, or that its rows go into."""


class Receipt(Protocol):
    """A transfer on its way to this worker."""

    def wait(self) -> None:
        """Returns when what follows on this worker (or on its stream) may read the rows."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""


class Transport(Protocol):
    """A way to move rows."""

    name: str
    """What the log calls it."""
    lookahead: int
    """How many compute actions ahead of their place receives are posted."""
    arrived: threading.Event
    """Set whenever something arrives, where anyone waits for that."""

    def check(self) -> None:
        """Raises what went wrong behind the worker's back."""

    def send(self, channel: Channel, parts: Parts) -> None:
        """Sends to each worker its tensors; returns at once."""

    def receive(self, channel: Channel, parts: Parts) -> Receipt:
        """Receives from each worker into its tensors; returns at once."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
        """A tensor to receive into."""

    def close(self) -> None:
        """Waits until everything sent has left."""


def on_the_wire(tensor: Tensor) -> Tensor:
    """A view whose memory runs straight on: rows of a channels-last tensor as they lie."""
    if tensor.is_contiguous():
        return tensor
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1)
    return tensor.contiguous()


def new_tensor(shape: Sequence[int], dtype: torch.dtype, channels_last: bool, device: torch.device) -> Tensor:
    """An uninitialised tensor in the wanted layout."""
    layout = torch.channels_last if channels_last and len(shape) == 4 else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=layout)


class BackgroundThread:
    """A thread that does small jobs in their order, most of them waiting, so that the worker itself never has to."""

    def __init__(self, name: str, wake: threading.Event | None = None) -> None:
        self.failure: BaseException | None = None
        self._wake = wake
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Callable[[], None]) -> None:
        """Does this next; what the job refers to lives until it is done."""
        self.check()
        self._jobs.put(job)

    def check(self) -> None:
        """Raises what went wrong."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as failure:  # it is shown by the worker, which is another thread
                self.failure = self.failure or failure
            if self._wake is not None:
                self._wake.set()
            del job

    def close(self, timeout_s: float) -> None:
        """Waits until all is done."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RunError(f"sent rows were not taken within {timeout_s:g} s", "look for the worker that stopped")
        self.check()


class Promise:
    """The receipt of what a thread waits for."""

    def __init__(self, thread: BackgroundThread, wait: Callable[[], None], timeout_s: float) -> None:
        self._done, self._thread, self._timeout_s = threading.Event(), thread, timeout_s

        def job() -> None:
            try:
                wait()
            finally:
                self._done.set()

        thread.add(job)

    def wait(self) -> None:
        if not self._done.wait(self._timeout_s):
            raise RunError(f"no rows came within {self._timeout_s:g} s", "look for the worker that stopped")
        self._thread.check()

    def is_done(self) -> bool:
        return self._done.is_set()
