"""Numbers of a device that the host reads once they have arrived, so that a card never waits for whoever reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_Reader = Callable[[Sequence[float]], None]


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
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
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
