"""Gradient reduction: a stage's gradients in buckets, summed over its replicas while backward goes on.

backward   conv5 ── conv4 ── conv3 ── conv2 ── conv1
bucket       0 ───────┘└──────── 1 ──────┘└──── 2
reduce                [ 0 ]            [ 1 ]       [ 2 ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagewright.errors import RunError
from stagewright.runtime.all_reduce import AllReduce
from stagewright.runtime.background import Pending


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


def _make_buckets(parameters: Sequence[nn.Parameter], num_buckets: int, add_up: AllReduce) -> list[_Bucket]:
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
    made = []
    for members in pieces:
        own = [parameters[index] for index in members]
        like = next(iter(own or parameters), torch.zeros(0))
        flat, start = add_up.memory(sum(each.numel() for each in own), like), 0
        views = []
        for each in own:
            views.append(flat.as_strided(each.size(), each.stride(), flat.storage_offset() + start))
            start += each.numel()
        made.append(_Bucket(members, flat, views))
    return made


class Reducer:
    """Sums one stage's gradients over its replicas, one set of buckets a slot."""

    def __init__(
        self, parameters: Sequence[Sequence[nn.Parameter]], num_buckets: int, add_up: AllReduce | None
    ) -> None:
        """`parameters` are those of each slot; `add_up` is None for one replica."""
        self.parameters = parameters
        self.adds_up = add_up is not None
        self.inspect: Callable[[int, Sequence[int], Sequence[Tensor | None]], None] | None = None
        """Called with a slot, indices of parameters and their gradients, before they are reduced."""
        self._add_up = add_up
        self._armed: int | None = None
        """The slot whose buckets start by themselves."""
        self._next = [0] * len(parameters)
        """For each slot the first bucket that has not started."""
        self.buckets: list[list[_Bucket]] = [
            _make_buckets(slot, num_buckets, add_up) if add_up is not None else [] for slot in parameters
        ]
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
            bucket.work = self._add_up.start(bucket.flat)
        self._next[slot] += 1

    def start(self, slot: int) -> None:
        """Starts the buckets that have not started by themselves."""
        self._armed = None
        for bucket in self.buckets[slot][self._next[slot] :]:
            self._start(slot, bucket)

    def finish(self, slot: int) -> list[Tensor | None]:
        """The gradients of a slot, summed over the replicas, one for each parameter."""
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
        return summed

    def close(self) -> None:
        """Ends what runs in the background, and lets go of the parameters.

        A hook on a parameter keeps this alive and this the parameter, in a circle that Python does not see.
        """
        for hook in self._hooks:
            hook.remove()
        if self._add_up is not None:
            self._add_up.close()


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
