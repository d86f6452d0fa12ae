"""Adding up one tensor over the replicas of a stage, in the background.

Replicas on cards of their own, or on CPUs of several hosts, leave that to NCCL or gloo. Replicas that share a card
leave it to their hosts, so that no multiprocessor is kept from computing:

    card ──copy──▶ pinned memory ──▶ gloo's all-reduce ──▶ pinned memory ──copy──▶ card

Replicas on the CPUs of one host add up in memory that they have in common. Nothing travels:

    replica 0   a0 b0 c0        a0+a1+a2   ·        ·               all of it, copied
    replica 1   a1 b1 c1   ──▶     ·    b0+b1+b2    ·       ──▶     from those
    replica 2   a2 b2 c2           ·       ·     c0+c1+c2           who added
              all are there     all have added                 all have copied
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.errors import RunError
from stagewright.runtime.common_memory import common_parts, is_common
from stagewright.runtime.transport.channel import Errands, Promise
from stagewright.runtime.transport.staged import Copied, new_event, new_stream
from stagewright.runtime.world import World

STRANDS = 4
"""Sums that are made at once, each on sockets of its own: one waits while another adds."""

PIECE_BYTES = 16 << 20
"""What a strand adds up at a time."""

CACHED = 1 << 16
"""Numbers that are added up at a time where memory is common."""


class Pending(Protocol):
    """A sum on its way."""

    def wait(self) -> object:
        """Returns when what follows on this worker (or on its stream) may read the sum."""


class Sum(Protocol):
    """A way to add up tensors over a stage's replicas."""

    def start(self, tensor: Tensor) -> Pending:
        """Starts to add up a tensor, in place."""

    def memory(self, numel: int, like: Tensor) -> Tensor:
        """A flat tensor of zeros to add up, of the type and on the device of another. All replicas must ask."""

    def close(self) -> None:
        """Ends what runs in the background."""


class AnyMemory:
    """What adds up wherever tensors are."""

    def memory(self, numel: int, like: Tensor) -> Tensor:
        return torch.zeros(numel, dtype=like.dtype, device=like.device)


class CollectiveSum(AnyMemory):
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


class CommonSum:
    """Adds up tensors in memory that the replicas have in common: each adds one part of all, and copies the others."""

    def __init__(self, world: World, members: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self._group, self._size, self._own = group, len(members), members.index(world.worker)
        self._timeout_s = world.timeout.total_seconds()
        self._errands = Errands("sums")
        self._all: dict[int, list[tuple[Tensor, ...]]] = {}
        """For each tensor, by its address, that of every replica in parts, one for each replica to add."""

    def memory(self, numel: int, like: Tensor) -> Tensor:
        whole = common_parts(max(numel, 1) * like.element_size(), self._group, self._size)
        tensors = [bytes_.view(like.dtype)[:numel] for bytes_ in whole]
        own = tensors[self._own]
        self._all[own.data_ptr()] = [tensor.tensor_split(self._size) for tensor in tensors]
        return own

    def start(self, tensor: Tensor) -> Pending:
        replicas = self._all[tensor.data_ptr()]
        return Promise(self._errands, lambda: self._add_up(replicas), self._timeout_s)

    def _add_up(self, replicas: list[tuple[Tensor, ...]]) -> None:
        own = replicas[self._own]
        others = [torch.split(each[self._own], CACHED) for each in replicas if each is not own]
        self._meet()
        for number, piece in enumerate(torch.split(own[self._own], CACHED)):
            for other in others:  # a piece stays in a cache until all are added to it
                piece.add_(other[number])
        self._meet()
        for part, replica in enumerate(replicas):
            if replica is not own:
                own[part].copy_(replica[part])
        self._meet()

    def _meet(self) -> None:
        """Waits until all replicas are here."""
        dist.all_reduce(torch.zeros(1), group=self._group)

    def close(self) -> None:
        self._errands.close(self._timeout_s)


class StagedSum(AnyMemory):
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


def make_sum(world: World, stage: int, members: tuple[int, ...], *, staged: bool) -> Sum | None:
    """How the replicas of a stage add up; None for who is not one of several. All workers must ask, in one order."""
    if len(members) < 2:
        return None
    if staged:
        return StagedSum(world, members)
    group = world.group("reduce", members)
    # Threads of two stages must not meet each other, so that their groups are not the same where their members are.
    adding = world.group(f"sums of stage {stage}", members) if world.device.type == "cpu" else None
    if group is None or world.worker not in members:
        return None
    if adding is not None and is_common(adding, len(members)):
        return CommonSum(world, members, adding)
    return CollectiveSum(group)
