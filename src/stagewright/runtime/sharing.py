"""Who of a stage's replicas updates what, where they share out the optimizer's states (ZeRO stage 1).

Each bucket of gradients is cut into a share a replica, equal in numbers and wherever that falls, so that states and
updates are equal too. An optimizer that moves each number by itself gets the pieces of its parameters as they lie in
memory. One that looks at whole matrices, or that nobody knows, gets whole parameters, the largest ones dealt out first.

    bucket     │ conv5.bias │ conv5.weight                │ conv4.bias │
    replica    │ 0              │ 1              │ 2                  │
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor, optim

ELEMENTWISE = frozenset({
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop,
    optim.Adadelta, optim.Adagrad,
})  # fmt: skip
"""Optimizers whose step on a number depends on that number's own gradients and states alone."""


class Piece(NamedTuple):
    """The numbers start … stop − 1, as they lie in memory, of one of a stage's parameters."""

    parameter: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor that is laid out as the parameter: itself where that is all of it, else flat."""
        if self.stop - self.start == tensor.numel():
            return tensor.detach()
        return tensor.detach().as_strided((self.stop - self.start,), (1,), tensor.storage_offset() + self.start)


@dataclass(frozen=True)
class Sharing:
    """How a stage's parameters are shared out."""

    replica: int
    num_replicas: int
    is_whole: bool
    """Whether each parameter belongs to one replica."""

    def cut(self, buckets: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[tuple[list[int], tuple[int, ...]]]:
        """For each bucket its parameters in the order of their places, and the edges of the replicas' shares."""
        if not self.is_whole:
            shares = [-(-sum(sizes[index] for index in members) // self.num_replicas) for members in buckets]
            edges = (tuple(share * number for number in range(self.num_replicas + 1)) for share in shares)
            return [([*members], each) for members, each in zip(buckets, edges)]
        loads, owners = [0] * self.num_replicas, {}
        for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            owners[index] = loads.index(min(loads))
            loads[owners[index]] += sizes[index]
        made = []
        for members in buckets:
            sums = [0] * self.num_replicas
            for index in members:
                sums[owners[index]] += sizes[index]
            made.append((sorted(members, key=owners.__getitem__), tuple(accumulate(sums, initial=0))))
        return made


def pieces_of(members: Sequence[int], sizes: Sequence[int], first: int, last: int) -> list[tuple[Piece, int]]:
    """The pieces of a bucket's parameters between two of its numbers, each with where it begins in the bucket."""
    found, at = [], 0
    for index in members:
        start, stop = max(first - at, 0), min(last - at, sizes[index])
        if start < stop:
            found.append((Piece(index, start, stop), at + start))
        at += sizes[index]
    return found
