"""What a device tells without being waited for: when each action ran, and numbers once they have arrived."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stagewright.record import Span
from stagewright.schedule import Action


class Stopwatch:
    """Notes when actions start and stop while it is on; costs nothing while it is off."""

    def __init__(self, worker: int, device: torch.device) -> None:
        self.worker, self._device = worker, device
        self.on = False
        self._spans: list[tuple[Action, Any, Any]] = []
        self._marks: list[Any] = []
        self._zero: tuple[Any, float] | None = None
        """One moment of the device, and the same of the host."""

    def _now(self) -> Any:
        """A moment on the host, or on the card's stream."""
        return time.perf_counter() if self._device.type == "cpu" else _recorded()

    def start(self) -> None:
        """Begins to note spans."""
        self.on = True
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        zero = self._now()
        if self._device.type == "cuda":
            zero.synchronize()
        self._zero = (zero, time.perf_counter())

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Notes the time between entering and leaving, on the card for a card."""
        if not self.on:
            yield
            return
        first = self._now()
        yield
        self._spans.append((action, first, self._now()))

    def mark(self) -> None:
        """Notes that a step is over."""
        self._marks.append(self._now())

    def step_s(self) -> list[float]:
        """Seconds between the marks."""
        return [self._elapsed_s(before, later) for before, later in pairwise(self._marks)]

    def spans(self) -> list[Span]:
        """All spans noted, in the order they started."""
        if self._zero is None:
            return []
        found, (zero, host_s) = [], self._zero
        for action, *moments in self._spans:
            start_s, stop_s = (host_s + self._elapsed_s(zero, moment) for moment in moments)
            kind, stage, batch, microbatch, peer = action
            found.append(Span(self.worker, kind.value, stage, batch, microbatch, start_s, stop_s, peer))
        return sorted(found, key=lambda span: span.start_s)

    def stop(self) -> float:
        """Notes no more, and returns the seconds of all spans together, which are forgotten."""
        total_s = sum(self._elapsed_s(*moments) for _, *moments in self._spans)
        self.on, self._spans = False, []
        return total_s

    def _elapsed_s(self, before: Any, later: Any) -> float:
        if self._device.type == "cpu":
            return float(later - before)
        later.synchronize()
        return float(before.elapsed_time(later)) / 1e3


def _recorded() -> torch.cuda.Event:
    """An event that keeps the time, recorded on the card's stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


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
        self._coming: deque[tuple[torch.cuda.Event, Tensor, Callable[[Sequence[float]], None]]] = deque()

    def read(self, numbers: Tensor, reader: Callable[[Sequence[float]], None]) -> None:
        """Calls `reader` with the numbers, now or from a later `poll` or `drain`."""
        if self.device.type != "cuda":
            reader(numbers.tolist())
            return
        copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copy.copy_(numbers, non_blocking=True)
        self._coming.append((_recorded(), copy, reader))

    def poll(self, *, waits: bool = False) -> None:
        """Reads what has arrived, or waits for everything."""
        while self._coming and (waits or self._coming[0][0].query()):  # type: ignore[no-untyped-call]
            arrived, copy, reader = self._coming.popleft()
            arrived.synchronize()
            reader(copy.tolist())

    def drain(self) -> None:
        """Waits for everything, and reads it."""
        self.poll(waits=True)
