"""One of two workers on one card: sums staged in the host's memory are those of the CPU, several pieces on the way."""

from __future__ import annotations

import os

import torch

from stagewright.runtime.all_reduce import _PIECE_BYTES, _StagedAllReduce, make_all_reduce
from stagewright.runtime.common_memory import APART
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import World, open_world
from tests.runtime.adding_in_common import compare

SIZES = (1, 1001, _PIECE_BYTES // 4 * 3 + 17)
"""One piece, an odd number, and several pieces."""


def main() -> None:
    """Adds up over sockets, as workers do that stand for hosts, and then twice in common memory."""
    with open_world(Settings(device="cuda", timeout_s=60.0)) as world:
        os.environ[APART] = "1"
        check(world, in_common=False)
        del os.environ[APART]
        check(world, in_common=True)
        check(world, in_common=True)  # memory that was pinned can be pinned again
        print("equal", flush=True)


def check(world: World, *, in_common: bool) -> None:
    """Sums over both workers, in two number formats."""
    add_up = make_all_reduce(world, "stage 0", (0, 1), staged=True)
    assert isinstance(add_up, _StagedAllReduce)
    assert add_up.in_common is in_common
    for dtype in (torch.float32, torch.bfloat16):
        compare(add_up, SIZES, torch.zeros(1, dtype=dtype, device=world.device), world)
    add_up.close()


if __name__ == "__main__":
    main()
