"""Adding up one tensor over the replicas of a stage, in the background.

Replicas on cards of their own, or on CPUs, leave that to NCCL or gloo. Replicas that share a card exchange rows by way
of pinned memory, and the host of each adds up one:

    replica 0   a0 b0 c0      a0 + a1 + a2  ─┐
    replica 1   a1 b1 c1  ▶   b0 + b1 + b2  ─┼▶  every replica has all three sums
    replica 2   a2 b2 c2      c0 + c1 + c2  ─┘

As many bytes cross the wires as in a ring, in two steps instead of 2(n − 1), and no multiprocessor is kept from
computing. A row is added up in one place, so all have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.errors import RunError
from stagewright.runtime.transport.channel import Errands, Promise
from stagewright.runtime.transport.gloo import wait_for
from stagewright.runtime.transport.staged import Copied, new_event, new_stream
from stagewright.runtime.world import World

STRANDS = 2
"""Exchanges that go on at once, each on sockets of its own: one waits while the other adds."""

PIECE_BYTES = 16 << 20
"""What a strand exchanges at a time."""


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
    """Adds up tensors of cards that exchange pieces by way of pinned memory, several at once."""

    def __init__(self, world: World, members: tuple[int, ...]) -> None:
        strands = [_Strand(world, members, number) for number in range(STRANDS)]
        self._strands = strands if world.worker in members else []
        self._started = 0

    def start(self, tensor: Tensor) -> Pending:
        made = new_event()
        made.record()
        return _All([self._start(piece, made) for piece in torch.split(tensor, PIECE_BYTES // tensor.element_size())])

    def _start(self, piece: Tensor, made: torch.cuda.Event) -> Copied:
        """Starts the exchange of one piece, in the strand whose turn it is."""
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
    """Exchanges one piece after the other, on sockets and streams of its own."""

    def __init__(self, world: World, members: tuple[int, ...], number: int) -> None:
        self._group = world.group(f"sum {number}", members, "gloo")
        if world.worker not in members:
            return
        self._members, self._own = members, members.index(world.worker)
        self._timeout_s = world.timeout.total_seconds()
        self._out, self._in = new_stream(), new_stream()
        self._errands = Errands(f"sum {number}")
        self._mirrors: dict[tuple[int, int], Tensor] = {}
        self._room: dict[tuple[int, torch.dtype], Tensor] = {}

    def start(self, piece: Tensor, made: torch.cuda.Event) -> Copied:
        """Copies a piece to the host once it is made, and leaves the rest to a thread."""
        host, copied, here = self._mirror(piece), new_event(), new_event()
        with torch.cuda.stream(self._out):
            self._out.wait_event(made)
            host.view(-1)[: piece.numel()].copy_(piece, non_blocking=True)
            copied.record()

        def exchange() -> None:
            copied.synchronize()
            add_up(host, self._shares(host), self._own, self._members, self._group)
            with torch.cuda.stream(self._in):
                piece.copy_(host.view(-1)[: piece.numel()], non_blocking=True)
                here.record()

        return Copied(Promise(self._errands, exchange, self._timeout_s), here)

    def close(self) -> None:
        """Ends the thread."""
        self._errands.close(self._timeout_s)

    def _mirror(self, piece: Tensor) -> Tensor:
        """Pinned memory for a piece: a row for each member to add up."""
        key, num_members = (piece.data_ptr(), piece.numel()), len(self._members)
        if key not in self._mirrors:
            shape = (num_members, -(-piece.numel() // num_members))
            self._mirrors[key] = torch.zeros(shape, dtype=piece.dtype, pin_memory=True)
        return self._mirrors[key]

    def _shares(self, rows: Tensor) -> Tensor:
        """Memory for all members' shares of one row."""
        key = (rows.numel(), rows.dtype)
        if key not in self._room:
            self._room[key] = torch.empty_like(rows, pin_memory=False)
        return self._room[key]


def add_up(rows: Tensor, shares: Tensor, own: int, members: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Replaces every member's rows by their sums: each adds up the row that is its own. `shares` is room for that."""
    peers = [each for each in range(len(members)) if each != own]
    coming = [dist.irecv(shares[peer], members[peer], group, tag=0) for peer in peers]
    leaving = [dist.isend(rows[peer], members[peer], group, tag=0) for peer in peers]
    shares[own].copy_(rows[own])
    wait_for([*coming, *leaving])
    torch.sum(shares, 0, out=rows[own])
    coming = [dist.irecv(rows[peer], members[peer], group, tag=1) for peer in peers]
    leaving = [dist.isend(rows[own], members[peer], group, tag=1) for peer in peers]
    wait_for([*coming, *leaving])
