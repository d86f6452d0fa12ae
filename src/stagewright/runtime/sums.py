"""Adding up one tensor over the replicas of a stage, in the background.

Replicas on cards of their own, or on CPUs, leave that to NCCL or gloo. Replicas that share a card leave it to their
hosts, so that no multiprocessor is kept from computing:

    card ──copy──▶ pinned memory ──▶ gloo's all-reduce ──▶ pinned memory ──copy──▶ card
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.errors import RunError
from stagewright.runtime.transport.channel import Errands, Promise
from stagewright.runtime.transport.staged import Copied, new_event, new_stream
from stagewright.runtime.world import World

STRANDS = 4
"""Sums that are made at once, each on sockets of its own: one waits while another adds."""

PIECE_BYTES = 16 << 20
"""What a strand adds up at a time."""


class Pending(Protocol):
    """A sum on its way."""

    def wait(self) -> object:
        """Returns when what follows on this worker (or on its stream) may read the sum."""


class Sum(Protocol):
    """A way to add up tensors over a stage's replicas."""

    def start(self, tensor: Tensor) -> Pending:
        """Starts to add up a tensor, in place."""

    def close(self) -> None:
        """Ends what runs in the background."""


class CollectiveSum:
    """The group's own all-reduce."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, tensor: Tensor) -> Pending:
        work: dist.Work | None = dist.all_reduce(tensor, group=self._group, async_op=True)
        if work is None:
            raise RunError("this worker is no member of the group that it adds up with")
        return work

    def close(self) -> None:
        return None


class StagedSum:
    """Adds up tensors of cards by way of pinned memory, several pieces at once."""

    def __init__(self, world: World, members: tuple[int, ...]) -> None:
        strands = [_Strand(world, members, number) for number in range(STRANDS)]
        self._strands = strands if world.worker in members else []
        self._started = 0

    def start(self, tensor: Tensor) -> Pending:
        made = new_event()
        made.record()
        return _All([self._start(piece, made) for piece in torch.split(tensor, PIECE_BYTES // tensor.element_size())])

    def _start(self, piece: Tensor, made: torch.cuda.Event) -> Copied:
        """Starts the sum of one piece, in the strand whose turn it is."""
        strand, self._started = self._strands[self._started % STRANDS], self._started + 1
        return strand.start(piece, made)

    def close(self) -> None:
        for strand in self._strands:
            strand.close()


class _All:
    """Several pieces on their way."""

    def __init__(self, pieces: Sequence[Copied]) -> None:
        self._pieces = pieces

    def wait(self) -> None:
        for piece in self._pieces:
            piece.wait()


class _Strand:
    """Adds up one piece after the other, on sockets and streams of its own."""

    def __init__(self, world: World, members: tuple[int, ...], number: int) -> None:
        self._group = world.group(f"sum {number}", members, "gloo")
        if world.worker not in members:
            return
        self._timeout_s = world.timeout.total_seconds()
        self._out, self._in = new_stream(), new_stream()
        self._errands = Errands(f"sum {number}")
        self._mirrors: dict[tuple[int, int], Tensor] = {}

    def start(self, piece: Tensor, made: torch.cuda.Event) -> Copied:
        """Copies a piece to the host once it is made, and leaves the rest to a thread."""
        host, copied, here = self._mirror(piece), new_event(), new_event()
        with torch.cuda.stream(self._out):
            self._out.wait_event(made)
            host.copy_(piece, non_blocking=True)
            copied.record()

        def add_up() -> None:
            copied.synchronize()
            dist.all_reduce(host, group=self._group)
            with torch.cuda.stream(self._in):
                piece.copy_(host, non_blocking=True)
                here.record()

        return Copied(Promise(self._errands, add_up, self._timeout_s), here)

    def close(self) -> None:
        """Ends the thread."""
        self._errands.close(self._timeout_s)

    def _mirror(self, piece: Tensor) -> Tensor:
        """Pinned memory for a piece."""
        key = (piece.data_ptr(), piece.numel())
        if key not in self._mirrors:
            self._mirrors[key] = torch.empty_like(piece, device="cpu", pin_memory=True)
        return self._mirrors[key]
