"""Adding up one tensor over the replicas of a stage, in the background.

replicas on                       add up
cards of their own                by NCCL
CPUs of several hosts             by gloo
CPUs of one host                  in memory that they have in common: nothing travels
a card that they share            by their hosts, so that no multiprocessor is kept from computing: in common
                                  memory, or by gloo where they stand for several hosts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.errors import RunError
from stagewright.runtime.background import BackgroundThread, Pending, Several, new_event, new_stream
from stagewright.runtime.common_memory import Common, is_common
from stagewright.runtime.world import World

_PIECE_BYTES = 16 << 20
"""What a strand adds up at a time."""


class AllReduce(ABC):
    """A way to add up tensors over a stage's replicas."""

    def memory(self, numel: int, like: Tensor) -> Tensor:
        """A flat tensor of zeros to add up, of the type and on the device of another. All replicas must ask."""
        return torch.zeros(numel, dtype=like.dtype, device=like.device)

    @abstractmethod
    def start(self, tensor: Tensor) -> Pending:
        """Starts to add up a tensor that `memory` gave, in place."""

    def close(self) -> None:  # noqa: B027  only some run anything in the background
        """Ends what runs in the background."""


class _CollectiveAllReduce(AllReduce):
    """The group's own all-reduce."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, tensor: Tensor) -> Pending:
        work: dist.Work | None = dist.all_reduce(tensor, group=self._group, async_op=True)
        if work is None:
            raise RunError("this worker is no member of the group that it adds up with")
        return work


class _CommonAllReduce(AllReduce):
    """Adds up tensors of the CPUs of one host, which lie in memory that they have in common."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group, self._thread = group, BackgroundThread("sums", timeout_s)
        self._common: dict[int, Common] = {}
        """By the address of a tensor."""

    def memory(self, numel: int, like: Tensor) -> Tensor:
        common = Common(numel, like.dtype, self._group)
        self._common[common.own.data_ptr()] = common
        return common.own

    def start(self, tensor: Tensor) -> Pending:
        common = self._common[tensor.data_ptr()]

        def add_up() -> None:
            common.add_up(0, tensor.numel(), self._group)
            tensor.copy_(common.sum)  # whoever comes to the next sum has copied this one

        return self._thread.promise(add_up)

    def close(self) -> None:
        self._thread.close()


class _Travelling:
    """A tensor of a card in the memory of its host, added up over sockets."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.own = self.sum = torch.zeros(numel, dtype=dtype, pin_memory=True)

    def add_up(self, start: int, stop: int, group: dist.ProcessGroup) -> None:
        dist.all_reduce(self.own[start:stop], group=group)

    def close(self) -> None:
        return None


class _StagedAllReduce(AllReduce):
    """Adds up tensors of cards by way of the hosts' memory, piece by piece, several at once."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], timeout_s: float, *, in_common: bool) -> None:
        self._group, self.in_common = groups[0], in_common
        self._threads = [BackgroundThread(f"sum {number}", timeout_s) for number in range(len(groups))]
        self._strands = cycle([(*each, new_stream(), new_stream()) for each in zip(groups, self._threads)])
        """Sockets, a thread and streams for each of the pieces that are added up at once."""
        self._mirrors: dict[int, tuple[Tensor, Common | _Travelling]] = {}
        """Each tensor, by its address, and its memory in the host."""

    def memory(self, numel: int, like: Tensor) -> Tensor:
        tensor = super().memory(numel, like)
        if numel:
            own = Common(numel, like.dtype, self._group, pinned=True) if self.in_common else None
            self._mirrors[tensor.data_ptr()] = (tensor, own or _Travelling(numel, like.dtype))
        return tensor

    def start(self, tensor: Tensor) -> Pending:
        made = new_event()
        made.record()
        numel, size = tensor.numel(), _PIECE_BYTES // tensor.element_size()
        return Several([self._start(tensor, at, min(at + size, numel), made) for at in range(0, numel, size)])

    def _start(self, tensor: Tensor, start: int, stop: int, made: torch.cuda.Event) -> Pending:
        """Copies a piece to the host once it is made, and leaves the rest to the thread whose turn it is."""
        group, thread, outward, back = next(self._strands)
        _, mirror = self._mirrors[tensor.data_ptr()]
        piece, copied, here = tensor[start:stop], new_event(), new_event()
        with torch.cuda.stream(outward):
            outward.wait_event(made)
            mirror.own[start:stop].copy_(piece, non_blocking=True)
            copied.record()

        def add_up() -> None:
            copied.synchronize()
            mirror.add_up(start, stop, group)
            with torch.cuda.stream(back):
                piece.copy_(mirror.sum[start:stop], non_blocking=True)
                here.record()

        return thread.promise(add_up, here)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()
        torch.cuda.synchronize()
        for _, mirror in self._mirrors.values():
            mirror.close()
        self._mirrors.clear()


def make_all_reduce(world: World, purpose: str, members: tuple[int, ...], *, staged: bool) -> AllReduce | None:
    """How some workers add up; None for who is not one of several. All workers must ask, in one order."""
    timeout_s, is_member = world.timeout.total_seconds(), world.worker in members
    if len(members) < 2:
        return None
    # Threads of two stages must not meet each other, so that their groups are not the same where their members are.
    if staged:
        # Four sums at once, each on sockets of its own: one waits while another adds.
        strands = [world.group(f"sum {number} of {purpose}", members, "gloo") for number in range(4)]
        groups = [group for group in strands if group is not None]
        return _StagedAllReduce(groups, timeout_s, in_common=is_common(groups[0], len(members))) if is_member else None
    group = world.group("reduce", members)
    adding = world.group(f"sums of {purpose}", members) if world.device.type == "cpu" else None
    if group is None or not is_member:
        return None
    if adding is not None and is_common(adding, len(members)):
        return _CommonAllReduce(adding, timeout_s)
    return _CollectiveAllReduce(group)
