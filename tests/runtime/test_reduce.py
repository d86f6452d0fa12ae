"""Buckets of gradients, and what is left of them when a run is over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stagewright.runtime.all_reduce import AllReduce
from stagewright.runtime.background import Several
from stagewright.runtime.reduce import Reducer


class OfOne(AllReduce):
    """The sum over one replica: the tensor itself."""

    def start(self, tensor: Tensor) -> Several:
        return Several([])

    def scatter(self, tensor: Tensor, edges: Sequence[int]) -> Several:
        return self.start(tensor)

    gather = scatter


def test_a_reducer_that_was_closed_keeps_no_weights() -> None:
    """Hooks and parameters hold each other where Python's collector does not look: a process that trains one model
    after the other would keep all of them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    parameters = list(model.parameters())
    reducer = Reducer([parameters], 2, OfOne())
    reducer.arm(0)
    model(torch.randn(3, 4)).sum().backward()
    summed = reducer.finish(0)
    assert all(gradient is not None and gradient.any() for gradient in summed), "buckets started by themselves"
    left = [weakref.ref(reducer), *map(weakref.ref, parameters)]
    reducer.close()
    del model, parameters, reducer, summed
    gc.collect()
    assert [each() for each in left] == [None] * len(left)
