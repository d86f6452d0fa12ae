"""One of three workers of one host: sums in common memory are those of gloo; hosts that differ have none in common."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from stagewright.runtime import common_memory
from stagewright.runtime.all_reduce import AllReduce, _CollectiveAllReduce, _CommonAllReduce, make_all_reduce
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import World, open_world

SIZES = (1, 2, 1001, 1 << 19)
"""Fewer numbers than replicas, an odd number, and many."""
TURNS = 3


def main() -> None:
    """Adds up tensors of all sizes and two types, again and again in the same memory."""
    with open_world(Settings(timeout_s=60.0)) as world:
        everyone = tuple(range(world.size))
        add_up = make_all_reduce(world, "stage 0", everyone, staged=False)
        assert isinstance(add_up, _CommonAllReduce)
        for dtype in (torch.float32, torch.float64):
            compare(add_up, SIZES, torch.zeros(1, dtype=dtype), world)
        add_up.close()
        assert make_all_reduce(world, "stage 0", (world.worker,), staged=False) is None
        os.environ[common_memory.APART] = "1"
        assert isinstance(make_all_reduce(world, "stage 0", everyone, staged=False), _CollectiveAllReduce)
        del os.environ[common_memory.APART]
        common_memory._identity = lambda: f"host {world.worker}"
        assert isinstance(make_all_reduce(world, "stage 0", everyone, staged=False), _CollectiveAllReduce)
        print("equal", flush=True)


def compare(add_up: AllReduce, sizes: tuple[int, ...], like: torch.Tensor, world: World) -> None:
    """Several sums under way at once, each of which must be that of all workers' numbers."""
    tensors = [add_up.memory(numel, like) for numel in sizes]
    for turn in range(TURNS):
        torch.manual_seed(10 * turn + world.worker)
        expected = [torch.randn(tensor.shape, dtype=like.dtype) for tensor in tensors]
        for tensor, value in zip(tensors, expected):
            tensor.copy_(value)
        pending = [add_up.start(tensor) for tensor in tensors]
        for each, tensor, value in zip(pending, tensors, expected):
            each.wait()
            dist.all_reduce(value, group=world.control)
            summed = tensor.cpu()
            torch.testing.assert_close(summed, value)
            alike = [torch.empty_like(summed) for _ in range(world.size)]
            dist.all_gather(alike, summed, group=world.control)
            assert all(torch.equal(other, summed) for other in alike), "replicas differ in a bit"


if __name__ == "__main__":
    main()
