"""One of three workers of one host: sums in common memory are those of gloo; hosts that differ have none in common."""

from __future__ import annotations

import torch
import torch.distributed as dist

from stagewright.runtime import common_memory
from stagewright.runtime.settings import Settings
from stagewright.runtime.sums import CACHED, CollectiveSum, CommonSum, Sum, make_sum
from stagewright.runtime.world import World, open_world

SIZES = (1, 2, 1001, 9 * CACHED + 17)
"""Fewer numbers than replicas, an odd number, and several pieces for each of them."""
TURNS = 3


def main() -> None:
    """Adds up tensors of all sizes and two types, again and again in the same memory."""
    with open_world(Settings(timeout_s=60.0)) as world:
        everyone = tuple(range(world.size))
        add_up = make_sum(world, 0, everyone, staged=False)
        assert isinstance(add_up, CommonSum)
        for dtype in (torch.float32, torch.float64):
            compare(add_up, dtype, world)
        add_up.close()
        common_memory.identity = lambda: f"host {world.worker}"
        assert isinstance(make_sum(world, 1, everyone, staged=False), CollectiveSum)
        assert make_sum(world, 2, (world.worker,), staged=False) is None
        print("equal", flush=True)


def compare(add_up: Sum, dtype: torch.dtype, world: World) -> None:
    """Several sums under way at once, each of which must be that of all workers' numbers."""
    tensors = [add_up.memory(numel, torch.zeros(1, dtype=dtype)) for numel in SIZES]
    for turn in range(TURNS):
        torch.manual_seed(10 * turn + world.worker)
        expected = [torch.randn(tensor.shape, dtype=dtype) for tensor in tensors]
        for tensor, value in zip(tensors, expected):
            tensor.copy_(value)
        pending = [add_up.start(tensor) for tensor in tensors]
        for each, tensor, value in zip(pending, tensors, expected):
            each.wait()
            dist.all_reduce(value, group=world.control)
            torch.testing.assert_close(tensor, value)
            alike = [torch.empty_like(tensor) for _ in range(world.size)]
            dist.all_gather(alike, tensor, group=world.control)
            assert all(torch.equal(other, tensor) for other in alike), "replicas differ in a bit"


if __name__ == "__main__":
    main()
