"""What a card tells without being waited for: when each action ran, and numbers once they have arrived."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from stagewright.record import Span
from stagewright.schedule import Action

_Reader = Callable[[Sequence[float]], None]


class Clock:
    """Notes when actions start and stop while it is on; costs nothing while it is off."""

    def __init__(self, worker: int, device: torch.device) -> None:
        self.worker = worker
        self.on = False
        self._spans: list[Span] = []
        self._events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []
        self._is_cuda = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []
        self._zero: tuple[torch.cuda.Event, float] | None = None

    def start(self) -> None:
        """Begins to note spans."""
        self.on = True
        if self._is_cuda:
            torch.cuda.synchronize()
            event = _new_event()
            event.record()
            event.synchronize()
            self._zero = (event, time.perf_counter())

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Notes the time between entering and leaving, on the card for a card."""
        if not self.on:
            yield
            return
        if self._is_cuda:
            first, last = (_new_event() for _ in range(2))
            first.record()
            yield
            last.record()
            self._events.append((action, first, last))
            return
        start = time.perf_counter()
        yield
        self.add(action, start, time.perf_counter())

    def mark(self) -> None:
        """Notes that a step is over: a moment on the host, or on the card's stream."""
        if self._is_cuda:
            event = _new_event()
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def step_s(self) -> list[float]:
        """Seconds between the marks."""
        if not self._is_cuda:
            stamps = [mark for mark in self._marks if isinstance(mark, float)]
            return [later - before for before, later in pairwise(stamps)]
        torch.cuda.synchronize()
        events = [mark for mark in self._marks if not isinstance(mark, float)]
        return [before.elapsed_time(later) / 1e3 for before, later in pairwise(events)]

    def add(self, action: Action, start_s: float, stop_s: float) -> None:
        """Notes an action whose times are known."""
        kind, stage, batch, microbatch, peer = action
        self._spans.append(Span(self.worker, kind.value, stage, batch, microbatch, start_s, stop_s, peer))

    def spans(self) -> list[Span]:
        """All spans noted, in the order they started."""
        if self._events and self._zero is not None:
            torch.cuda.synchronize()
            zero, host_s = self._zero
            for action, first, last in self._events:
                start, stop = (host_s + zero.elapsed_time(event) / 1e3 for event in (first, last))
                self.add(action, start, stop)
            self._events.clear()
        return sorted(self._spans, key=lambda span: span.start_s)


def _new_event() -> torch.cuda.Event:
    """An event that keeps the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class AsyncScalars:
    """Tensors on their way to the host, each with what to do with its numbers, in order.

        step 10   read(loss)        copied behind the step's work
        step 11   poll()            not there yet
        step 12   poll()            there: its reader is called
        the end   drain()           waits for all that are left

    On a CPU numbers are there at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._coming: deque[tuple[torch.cuda.Event, Tensor, _Reader]] = deque()

    def read(self, numbers: Tensor, reader: _Reader) -> None:
        """Calls `reader` with the numbers, now or from a later `poll` or `drain`."""
        if self.device.type != "cuda":
            reader(numbers.tolist())
            return
        copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copy.copy_(numbers, non_blocking=True)
        arrived = _new_event()
        arrived.record()
        self._coming.append((arrived, copy, reader))

    def poll(self) -> None:
        """Reads what has arrived."""
        while self._coming and self._coming[0][0].query():  # type: ignore[no-untyped-call]
            self._read_first()

    def drain(self) -> None:
        """Waits for everything, and reads it."""
        while self._coming:
            self._coming[0][0].synchronize()
            self._read_first()

    def _read_first(self) -> None:
        _, copy, reader = self._coming.popleft()
        reader(copy.tolist())
