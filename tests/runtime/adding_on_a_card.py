"""One of two workers on one card: sums staged in the host's memory are those of the CPU, several pieces on the way."""

from __future__ import annotations

import torch

from stagewright.runtime.settings import Settings
from stagewright.runtime.sums import PIECE_BYTES, StagedSum, make_sum
from stagewright.runtime.world import World, open_world
from tests.runtime.adding_in_common import compare, replicas_of

SIZES = (1, 1001, PIECE_BYTES // 4 * 3 + 17)
"""One piece, an odd number, and several pieces."""


def main() -> None:
    """Adds up over sockets, where the plan has several hosts, and then twice in common memory."""
    with open_world(Settings(device="cuda", timeout_s=60.0)) as world:
        for placement, in_common in (("0:0,1:0", False), ("0:0-1", True), ("0:0-1", True)):
            check(placement, in_common, world)
        print("equal", flush=True)


def check(placement: str, in_common: bool, world: World) -> None:
    """Sums of a placement's replicas; memory that was pinned for them can be pinned again."""
    add_up = make_sum(world, 0, replicas_of(placement), staged=True)
    assert isinstance(add_up, StagedSum)
    assert add_up.in_common is in_common
    for dtype in (torch.float32, torch.bfloat16):
        compare(add_up, SIZES, torch.zeros(1, dtype=dtype, device=world.device), world)
    add_up.close()


if __name__ == "__main__":
    main()
