"""Adding up one tensor over the replicas of a stage, in the background.

replicas on                       add up
cards of their own                by NCCL
CPUs of several hosts             by gloo
CPUs of one host                  in memory that they have in common: nothing travels
a card that they share            by their hosts, so that no multiprocessor is kept from computing: in common
                                  memory, or by gloo where they stand for several hosts

Where replicas share out the optimizer's states, each gets only its share of the sum, and gives out the weights that it
made of it: half of the way there, half of it back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.errors import RunError
from stagewright.runtime.background import BackgroundThread, Pending, Several, new_event, new_stream
from stagewright.runtime.common_memory import Common, Spans, is_common, meet
from stagewright.runtime.world import World, gather_json

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

    @abstractmethod
    def scatter(self, tensor: Tensor, edges: Sequence[int]) -> Pending:
        """Starts to add up such a tensor, each replica only the numbers between its edges."""

    @abstractmethod
    def gather(self, tensor: Tensor, edges: Sequence[int]) -> Pending:
        """Starts to give every replica what each has between its edges, in `gathered(tensor)`."""

    def gathered(self, tensor: Tensor) -> Tensor:
        """Where `gather` takes the numbers of this replica, and leaves those of the others."""
        return tensor

    def close(self) -> None:  # noqa: B027  only some run anything in the background
        """Ends what runs in the background."""


class _CollectiveAllReduce(AllReduce):
    """The group's own all-reduce."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, tensor: Tensor) -> Pending:
        return _own(dist.all_reduce(tensor, group=self._group, async_op=True))

    def scatter(self, tensor: Tensor, edges: Sequence[int]) -> Pending:
        parts = [tensor[start:stop] for start, stop in pairwise(edges)]
        return _own(dist.reduce_scatter(parts[dist.get_rank(self._group)], parts, group=self._group, async_op=True))

    def gather(self, tensor: Tensor, edges: Sequence[int]) -> Pending:
        parts = [tensor[start:stop] for start, stop in pairwise(edges)]
        return _own(dist.all_gather(parts, parts[dist.get_rank(self._group)], group=self._group, async_op=True))


def _own(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RunError("this worker is no member of the group that it adds up with")
    return work


class _SocketAllReduce(_CollectiveAllReduce):
    """Adds up tensors of CPUs over sockets; shares go straight to whose they are."""

    def __init__(self, group: dist.ProcessGroup, shares: dist.ProcessGroup, timeout_s: float) -> None:
        super().__init__(group)
        self._shares, self._thread = shares, BackgroundThread("shares", timeout_s)

    def scatter(self, tensor: Tensor, edges: Sequence[int]) -> Pending:
        return self._thread.promise(partial(_scatter, tensor, list(pairwise(edges)), self._shares))

    def gather(self, tensor: Tensor, edges: Sequence[int]) -> Pending:
        return self._thread.promise(partial(_gather, tensor, list(pairwise(edges)), self._shares))

    def close(self) -> None:
        self._thread.close()


def _scatter(tensor: Tensor, spans: Spans, group: dist.ProcessGroup) -> None:
    """Adds up this replica's span over all replicas: each sends every other one its numbers of that one's span."""
    sizes, replica = [stop - start for start, stop in spans], dist.get_rank(group)
    start, stop = spans[replica]
    sent = torch.cat([tensor[first:last] for first, last in spans])
    taken = tensor.new_empty(len(sizes) * sizes[replica])
    dist.all_to_all_single(taken, sent, [sizes[replica]] * len(sizes), sizes, group=group)
    torch.sum(taken.view(len(sizes), sizes[replica]), 0, out=tensor[start:stop])


def _gather(tensor: Tensor, spans: Spans, group: dist.ProcessGroup) -> None:
    """Fills the other replicas' spans with their numbers."""
    sizes, replica = [stop - start for start, stop in spans], dist.get_rank(group)
    start, stop = spans[replica]
    taken = tensor.new_empty(sum(sizes))
    sent = tensor[start:stop].repeat(len(sizes))
    dist.all_to_all_single(taken, sent, sizes, [sizes[replica]] * len(sizes), group=group)
    for (first, last), part in zip(spans, torch.split(taken, sizes)):
        tensor[first:last] = part


class _CommonAllReduce(AllReduce):
    """Adds up tensors of the CPUs of one host, which lie in memory that they have in common."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, common: dict[int, Common]) -> None:
        self._group, self._thread = group, BackgroundThread("sums", timeout_s)
        self.places = common
        """By the address of a tensor."""

    def memory(self, numel: int, like: Tensor) -> Tensor:
        common = Common(numel, like.dtype, self._group)
        self.places[common.own.data_ptr()] = common
        return common.own

    def start(self, tensor: Tensor) -> Pending:
        common = self.places[tensor.data_ptr()]

        def add_up() -> None:
            common.add_up(0, tensor.numel(), self._group)
            tensor.copy_(common.sum)  # whoever comes to the next sum has copied this one

        return self._thread.promise(add_up)

    def scatter(self, tensor: Tensor, edges: Sequence[int]) -> Pending:
        common, spans = self.places[tensor.data_ptr()], list(pairwise(edges))
        start, stop = spans[dist.get_rank(self._group)]

        def add_up() -> None:
            common.scatter(spans, self._group)
            tensor[start:stop] = common.sum[start:stop]

        return self._thread.promise(add_up)

    def gather(self, tensor: Tensor, edges: Sequence[int]) -> Pending:
        common = self.places[tensor.data_ptr()]
        return self._thread.promise(partial(common.gather, list(pairwise(edges)), self._group))

    def gathered(self, tensor: Tensor) -> Tensor:
        return self.places[tensor.data_ptr()].sum

    def close(self) -> None:
        self._thread.close()


class _Travelling:
    """A tensor of a card in the memory of its host, added up over sockets."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.own = self.sum = torch.zeros(numel, dtype=dtype, pin_memory=True)

    def add_up(self, start: int, stop: int, group: dist.ProcessGroup) -> None:
        dist.all_reduce(self.own[start:stop], group=group)

    def scatter(self, spans: Spans, group: dist.ProcessGroup) -> None:
        _scatter(self.own, spans, group)

    def gather(self, spans: Spans, group: dist.ProcessGroup) -> None:
        _gather(self.sum, spans, group)

    def close(self) -> None:
        return None


class _StagedAllReduce(AllReduce):
    """Adds up tensors of cards by way of the hosts' memory, piece by piece, several at once."""

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], timeout_s: float, mirrors: dict[int, tuple[Tensor, Any]], *,
        in_common: bool,
    ) -> None:  # fmt: skip
        self._group, self.in_common = groups[0], in_common
        self._threads = [BackgroundThread(f"sum {number}", timeout_s) for number in range(len(groups))]
        self._strands = cycle([(*each, new_stream(), new_stream()) for each in zip(groups, self._threads)])
        """Sockets, a thread and streams for each of the pieces that are added up at once."""
        self.places: dict[int, tuple[Tensor, Common | _Travelling]] = mirrors
        """Each tensor, by its address, and its memory in the host."""
        self.peers: dict[int, list[Tensor | None]] = {}
        """The same tensor of every other replica, where they lie on one card and nothing stands for several hosts."""

    def memory(self, numel: int, like: Tensor) -> Tensor:
        tensor = super().memory(numel, like)
        if numel:
            own = Common(numel, like.dtype, self._group, pinned=True) if self.in_common else None
            self.places[tensor.data_ptr()] = (tensor, own or _Travelling(numel, like.dtype))
        return tensor

    def gathered(self, tensor: Tensor) -> Tensor:
        if self.in_common and tensor.data_ptr() not in self.peers:
            seen = _tensors_of_all(tensor, self._group)
            self.peers |= {tensor.data_ptr(): seen} if seen else {}
        return tensor

    def start(self, tensor: Tensor) -> Pending:
        _, mirror = self.places[tensor.data_ptr()]
        numel, size = tensor.numel(), _PIECE_BYTES // tensor.element_size()
        pieces = [[(at, min(at + size, numel))] for at in range(0, numel, size)]
        steps = ((each, mirror.own, partial(mirror.add_up, *each[0]), each) for each in pieces)
        return self._start(tensor, mirror.sum, steps)

    def scatter(self, tensor: Tensor, edges: Sequence[int]) -> Pending:
        _, mirror = self.places[tensor.data_ptr()]
        replica, size = dist.get_rank(self._group), _PIECE_BYTES // tensor.element_size()
        pieces = _pieces(edges, size)
        steps = ((each, mirror.own, partial(mirror.scatter, each), each[replica : replica + 1]) for each in pieces)
        return self._start(tensor, mirror.sum, steps)

    def gather(self, tensor: Tensor, edges: Sequence[int]) -> Pending:
        if tensor.data_ptr() in self.peers:
            return self._take(tensor, list(pairwise(edges)))
        _, mirror = self.places[tensor.data_ptr()]
        replica, size = dist.get_rank(self._group), _PIECE_BYTES // tensor.element_size()
        pieces = _pieces(edges, size)
        others = ([*each[:replica], *each[replica + 1 :]] for each in pieces)
        steps = (
            (each[replica : replica + 1], mirror.sum, partial(mirror.gather, each), back)
            for each, back in zip(pieces, others)
        )
        return self._start(tensor, mirror.sum, steps)

    def _take(self, tensor: Tensor, spans: Spans) -> Pending:
        """Copies the others' spans inside the card, between two meetings: all have written, all have taken."""
        made, here, (group, thread, _, homeward) = new_event(), new_event(), next(self._strands)
        made.record()

        def take() -> None:
            made.synchronize()
            meet(group)
            with torch.cuda.stream(homeward):
                for (start, stop), peer in zip(spans, self.peers[tensor.data_ptr()]):
                    if peer is not None:
                        tensor[start:stop].copy_(peer[start:stop], non_blocking=True)
                here.record()
            here.synchronize()
            meet(group)

        return thread.promise(take, here)

    def _start(self, tensor: Tensor, back: Tensor, steps: Iterator[_Step]) -> Pending:
        """Starts what each step says, once what was issued before has made the tensor."""
        made = new_event()
        made.record()
        return Several([self._exchange(tensor, made, back, *step) for step in steps])

    def _exchange(
        self, tensor: Tensor, made: torch.cuda.Event, source: Tensor, out: Spans, to: Tensor,
        meet: Callable[[dist.ProcessGroup], None], back: Spans,
    ) -> Pending:  # fmt: skip
        """Copies a piece to the host once it is made, and leaves the rest to the thread whose turn it is."""
        group, thread, outward, homeward = next(self._strands)
        copied, here = new_event(), new_event()
        with torch.cuda.stream(outward):
            outward.wait_event(made)
            for start, stop in _joined(out):
                to[start:stop].copy_(tensor[start:stop], non_blocking=True)
            copied.record()

        def exchange() -> None:
            copied.synchronize()
            meet(group)
            with torch.cuda.stream(homeward):
                for start, stop in _joined(back):
                    tensor[start:stop].copy_(source[start:stop], non_blocking=True)
                here.record()

        return thread.promise(exchange, here)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()
        torch.cuda.synchronize()
        for _, mirror in self.places.values():
            mirror.close()
        self.places.clear()
        self.peers.clear()


def _tensors_of_all(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor | None]:
    """A tensor of every other replica, where all lie on one card and can be seen; nothing if any cannot."""
    size, replica = dist.get_world_size(group), dist.get_rank(group)
    told: list[list[Any]] = []
    with suppress(RuntimeError):  # one for each that opens it
        told = [_plain(tensor.untyped_storage()._share_cuda_()) for _ in range(size)]  # type: ignore[no-untyped-call]
    every = gather_json([str(torch.cuda.get_device_properties(tensor.device).uuid), told], group, size)
    works = all(told and card == every[0][0] for card, told in every)
    found: list[Tensor | None] = [None] * size
    for number, (_, handles) in enumerate(every if works else ()):
        try:
            found[number] = _opened(handles[replica], tensor) if number != replica else None
        except RuntimeError:
            works = False
    return found if all(gather_json(works, group, size)) else []


def _plain(handle: Sequence[Any]) -> list[Any]:
    """What others need to open a tensor of this card, without the number that the card has here."""
    return [each.hex() if isinstance(each, bytes) else each for each in handle[1:]]


def _opened(handle: Sequence[Any], like: Tensor) -> Tensor:
    """Another process's tensor, as large as one of this process's."""
    parts = [bytes.fromhex(each) if isinstance(each, str) else each for each in handle]
    storage = torch.UntypedStorage._new_shared_cuda(like.device.index, *parts)
    return torch.empty_like(like[:0]).set_(storage, 0, like.size(), like.stride())


_Step = tuple[Spans, Tensor, Callable[[dist.ProcessGroup], None], Spans]
"""What a strand does with a piece: copy these spans to the host, there; meet the other replicas; copy these back."""


def _joined(spans: Spans) -> list[tuple[int, int]]:
    """The same numbers in as few spans as there can be."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found


def _pieces(edges: Sequence[int], size: int) -> list[Spans]:
    """A tensor in pieces of about a size: the first part of every share, the second of every one …"""
    step = max(1, size // (len(edges) - 1))
    widest = max(stop - start for start, stop in pairwise(edges))
    return [
        [(min(start + at, stop), min(start + at + step, stop)) for start, stop in pairwise(edges)]
        for at in range(0, widest, step)
    ]


def make_all_reduce(
    world: World, purpose: str, members: tuple[int, ...], *, staged: bool, channel: str = "reduce",
    like: AllReduce | None = None,
) -> AllReduce | None:  # fmt: skip
    """How some workers add up; None for who is not one of several. All workers must ask, in one order.

    With a channel of its own it may work in the memory of another one, which is `like` it, beside that one.
    """
    timeout_s, is_member = world.timeout.total_seconds(), world.worker in members
    if len(members) < 2:
        return None
    places = getattr(like, "places", {})
    # Threads of two stages must not meet each other, so that their groups are not the same where their members are.
    if staged:
        # Four sums at once, each on sockets of its own: one waits while another adds.
        strands = [world.group(f"sum {number} of {purpose}", members, "gloo") for number in range(4)]
        groups = [group for group in strands if group is not None]
        if not is_member:
            return None
        return _StagedAllReduce(groups, timeout_s, places, in_common=is_common(groups[0], len(members)))
    group = world.group(channel, members)
    adding = world.group(f"sums of {purpose}", members) if world.device.type == "cpu" else None
    if group is None or not is_member:
        return None
    if adding is None:
        return _CollectiveAllReduce(group)
    if is_common(adding, len(members)):
        return _CommonAllReduce(adding, timeout_s, places)
    return _SocketAllReduce(group, adding, timeout_s)
