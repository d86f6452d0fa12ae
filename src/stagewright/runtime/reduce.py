"""Gradient reduction: a stage's gradients in buckets, summed over its replicas while backward goes on.

backward   conv5 ── conv4 ── conv3 ── conv2 ── conv1
bucket       0 ───────┘└──────── 1 ──────┘└──── 2
reduce                [ 0 ]            [ 1 ]       [ 2 ]

Where the replicas share out the optimizer's states, each gets the sum of its share of a bucket, and after the update
all get the weights of the others. The bucket's memory carries those back, the first layers' first, and a layer waits
only for its own:

update     U
gather       [ 2 ][ 1 ][ 0 ]
forward           conv1 ── conv2 ── conv3 …
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagewright.errors import RunError
from stagewright.runtime.all_reduce import AllReduce
from stagewright.runtime.background import Pending
from stagewright.runtime.sharing import Piece, Sharing, pieces_of


class _Share(NamedTuple):
    """A piece of a parameter in one slot."""

    piece: Piece
    gradient: Tensor
    """Its place in the bucket."""
    weight: Tensor
    given: Tensor
    """Where its new weights are on their way from replica to replica."""


@dataclass
class _Bucket:
    """Some parameters of one slot, and the flat tensor that their gradients travel in."""

    members: list[int]
    """Indices into the stage's parameters."""
    flat: Tensor
    views: list[Tensor]
    """The piece of `flat` that belongs to each member, laid out as it is: copies and steps run straight through."""
    waiting: set[int] = field(default_factory=set)
    """Members whose gradient the running backward has yet to finish."""
    work: Pending | None = None
    edges: tuple[int, ...] = ()
    """Of the replicas' shares in `flat`, where they share."""
    own: list[_Share] = field(default_factory=list)
    others: list[_Share] = field(default_factory=list)
    coming: Pending | None = None
    """The others' new weights on their way."""


def _make_buckets(
    parameters: Sequence[nn.Parameter], num_buckets: int, add_up: AllReduce, sharing: Sharing | None,
    give_out: AllReduce | None,
) -> list[_Bucket]:  # fmt: skip
    """The buckets of one slot, of about the same size; bucket 0 has the last layers, which backward finishes first.

    Parameters of another type than the first are an error of the model's.
    """
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    pieces: list[list[int]] = [[] for _ in range(num_buckets)]
    passed, total = 0, sum(sizes)
    for index in reversed(range(len(sizes))):
        middle = passed + sizes[index] / 2
        pieces[min(int(middle * num_buckets / total) if total else 0, num_buckets - 1)].append(index)
        passed += sizes[index]
    counts = [parameter.numel() for parameter in parameters]
    cut = [(members, ()) for members in pieces] if sharing is None else sharing.cut(pieces, counts)
    made = []
    for members, edges in cut:
        own = [parameters[index] for index in members]
        like = next(iter(own or parameters), torch.zeros(0))
        flat, start = add_up.memory(edges[-1] if edges else sum(each.numel() for each in own), like), 0
        views = []
        for each in own:
            views.append(flat.as_strided(each.size(), each.stride(), flat.storage_offset() + start))
            start += each.numel()
        bucket = _Bucket(members, flat, views, edges=edges)
        if sharing is not None and give_out is not None and flat.numel():
            _share_out(bucket, parameters, sharing, give_out.gathered(flat))
        made.append(bucket)
    return made


def _share_out(bucket: _Bucket, parameters: Sequence[nn.Parameter], sharing: Sharing, gathered: Tensor) -> None:
    """Fills in which pieces of a bucket are whose."""
    sizes = [parameter.numel() for parameter in parameters]
    for replica, (first, last) in enumerate(pairwise(bucket.edges)):
        for piece, at in pieces_of(bucket.members, sizes, first, last):
            weight = piece.of(parameters[piece.parameter])
            gradient, given = (
                each.as_strided(weight.size(), weight.stride(), each.storage_offset() + at)
                for each in (bucket.flat, gathered)
            )
            owned = bucket.own if replica == sharing.replica else bucket.others
            owned.append(_Share(piece, gradient, weight, given))


class Reducer:
    """Sums one stage's gradients over its replicas, one set of buckets a slot."""

    def __init__(
        self, parameters: Sequence[Sequence[nn.Parameter]], num_buckets: int, add_up: AllReduce | None,
        sharing: Sharing | None = None, give_out: AllReduce | None = None,
    ) -> None:  # fmt: skip
        """`parameters` are those of each slot; `add_up` is None for one replica.

        With `sharing` this replica gets sums of its share alone, and `give_out` gathers all shares' weights.
        """
        self.parameters = parameters
        self.adds_up = add_up is not None
        self.inspect: Callable[[int, Sequence[int], Sequence[Tensor | None]], None] | None = None
        """Called with a slot, indices of parameters and their gradients, before they are reduced."""
        self._add_up, self._give_out = add_up, give_out
        self.is_sharing = sharing is not None and give_out is not None
        self._armed: int | None = None
        """The slot whose buckets start by themselves."""
        self._next = [0] * len(parameters)
        """For each slot the first bucket that has not started."""
        self.buckets: list[list[_Bucket]] = [
            [] if add_up is None else _make_buckets(slot, num_buckets, add_up, sharing, give_out) for slot in parameters
        ]
        self._ungated = [set(range(len(buckets))) for buckets in self.buckets]
        """For each slot the buckets whose weights a forward may read at once."""
        self._hooks = [
            parameters[slot][index].register_post_accumulate_grad_hook(self._hook(slot, bucket, index))  # type: ignore[no-untyped-call]
            for slot, members in enumerate(self.buckets)
            for bucket in members
            for index in bucket.members
        ]

    def _hook(self, slot: int, bucket: _Bucket, index: int) -> Callable[[Tensor], None]:
        def finished(_: Tensor) -> None:
            if self._armed == slot and index in bucket.waiting:
                bucket.waiting.discard(index)
                # Buckets start in their order on every replica, whatever order the hooks come in.
                buckets = self.buckets[slot]
                while self._next[slot] < len(buckets) and not buckets[self._next[slot]].waiting:
                    self._start(slot, buckets[self._next[slot]])

        return finished

    def places(self, slot: int) -> dict[Tensor, Tensor]:
        """For each parameter of a slot its piece of a bucket, where the gradient may be made in the first place."""
        parameters = self.parameters[slot]
        pieces = [pair for bucket in self.buckets[slot] for pair in zip(bucket.members, bucket.views)]
        return {parameters[index]: view for index, view in pieces}

    def arm(self, slot: int) -> None:
        """From here on, every bucket of the slot starts as soon as its gradients are complete."""
        self._armed = slot
        for bucket in self.buckets[slot]:
            bucket.waiting = set(bucket.members)

    def _start(self, slot: int, bucket: _Bucket) -> None:
        self._settle(bucket)
        targets, sources = list[Tensor](), list[Tensor]()
        for index, view in zip(bucket.members, bucket.views):
            parameter = self.parameters[slot][index]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():  # else it was made there
                targets.append(view)
                sources.append(gradient)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        if self.inspect is not None:
            self.inspect(slot, bucket.members, bucket.views)
        if self._add_up is not None and bucket.flat.numel():
            start = self._add_up.start
            bucket.work = self._add_up.scatter(bucket.flat, bucket.edges) if self.is_sharing else start(bucket.flat)
        self._next[slot] += 1

    def start(self, slot: int) -> None:
        """Starts the buckets that have not started by themselves."""
        self._armed = None
        for bucket in self.buckets[slot][self._next[slot] :]:
            self._start(slot, bucket)

    def finish(self, slot: int) -> list[Tensor | None]:
        """The gradients of a slot, summed over the replicas: of each parameter, or of each of this replica's pieces."""
        parameters = self.parameters[slot]
        if self._add_up is None:
            gradients = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            if self.inspect is not None:
                self.inspect(slot, range(len(parameters)), gradients)
            return gradients
        if self._next[slot] < len(self.buckets[slot]):
            raise RunError(f"an update came before the reduction of bucket {self._next[slot]}: the schedule is wrong")
        summed: list[Tensor | None] = [None] * len(parameters)
        self._next[slot] = 0
        for bucket in self.buckets[slot]:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            for index, view in zip(bucket.members, bucket.views):
                summed[index] = view
        return [each.gradient for each in self._owned(slot)] if self.is_sharing else summed

    # Shares

    def _owned(self, slot: int) -> list[_Share]:
        return [share for bucket in self.buckets[slot] for share in bucket.own]

    def shares(self) -> tuple[list[Piece], list[list[Tensor]]]:
        """This replica's pieces of the parameters, and their weights in each slot."""
        owned = [self._owned(slot) for slot in range(len(self.buckets))]
        return [each.piece for each in owned[0]], [[each.weight for each in shares] for shares in owned]

    @torch.no_grad()
    def give_out(self, slot: int) -> None:
        """Starts to give the others this replica's new weights of a slot, and to take theirs."""
        for bucket in reversed(self.buckets[slot]):
            if self._give_out is not None and bucket.flat.numel():
                if bucket.own:
                    torch._foreach_copy_([each.given for each in bucket.own], [each.weight for each in bucket.own])
                bucket.coming = self._give_out.gather(bucket.flat, bucket.edges)

    def settle(self, slot: int | None = None, only: Collection[int] | None = None) -> None:
        """Waits for weights that are on their way: of one slot, of some of its buckets, or all."""
        for number, buckets in enumerate(self.buckets):
            for index, bucket in enumerate(buckets if slot in (None, number) else ()):
                if only is None or index in only:
                    self._settle(bucket)

    @torch.no_grad()
    def _settle(self, bucket: _Bucket) -> None:
        if bucket.coming is not None:
            bucket.coming.wait()
            bucket.coming = None
            if bucket.others:
                torch._foreach_copy_([each.weight for each in bucket.others], [each.given for each in bucket.others])

    def gate(self, slot: int, module: nn.Module, called: Iterable[str], read: Collection[str]) -> None:
        """Lets the parts of a stage wait for their own weights of a slot, each when it is called.

        `called` are the paths of the parts, `read` the names of what is read without calling any.
        """
        inside: dict[int, set[nn.Module]] = {}
        for part in map(module.get_submodule, called):
            for parameter in part.parameters():
                inside.setdefault(id(parameter), set()).add(part)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in read:
                inside.pop(id(parameter), None)
        waits: dict[nn.Module, set[int]] = {}
        for index, bucket in enumerate(self.buckets[slot]):
            owners = [inside.get(id(self.parameters[slot][member]), set()) for member in bucket.members]
            if all(owners):
                self._ungated[slot].discard(index)
                for part in set().union(*owners):
                    waits.setdefault(part, set()).add(index)
        for part, indices in waits.items():
            self._hooks.append(part.register_forward_pre_hook(lambda *_, only=indices: self.settle(slot, only)))

    def begin(self, slot: int) -> None:
        """Waits for those weights of a slot that no part of the stage waits for."""
        self.settle(slot, self._ungated[slot])

    def close(self) -> None:
        """Ends what runs in the background, and lets go of the parameters.

        A hook on a parameter keeps this alive and this the parameter, in a circle that Python does not see.
        """
        for hook in self._hooks:
            hook.remove()
        for each in (self._give_out, self._add_up):
            if each is not None:
                each.close()


@torch.no_grad()
def copy_from(source: int, tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Makes these tensors the same on all workers of a group: those of one of them."""
    laid_out = [(tensor, tensor.detach().contiguous()) for tensor in tensors]
    works = [dist.broadcast(flat, source, group=group, async_op=True) for _, flat in laid_out]
    for work, (tensor, flat) in zip(works, laid_out):
        if work is not None:
            work.wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)
