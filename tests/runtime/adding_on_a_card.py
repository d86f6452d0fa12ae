"""One of two workers on one card: sums staged in pinned memory are those of the CPU, several pieces on the way."""

from __future__ import annotations

import torch
import torch.distributed as dist

from stagewright.runtime.settings import Settings
from stagewright.runtime.sums import PIECE_BYTES, StagedSum
from stagewright.runtime.world import open_world


def main() -> None:
    """Adds up tensors of one piece and of several, three times each with new values."""
    with open_world(Settings(device="cuda", timeout_s=60.0)) as world:
        add_up = StagedSum(world, (0, 1))
        tensors = [torch.empty(numel, device=world.device) for numel in (1, 1001, PIECE_BYTES // 4 * 3 + 17)]
        for turn in range(3):
            torch.manual_seed(10 * turn + world.worker)
            expected = [torch.randn(tensor.shape) for tensor in tensors]
            for tensor, value in zip(tensors, expected):
                tensor.copy_(value)
            pending = [add_up.start(tensor) for tensor in tensors]
            for each, tensor, value in zip(pending, tensors, expected):
                each.wait()
                dist.all_reduce(value, group=world.control)
                torch.testing.assert_close(tensor.cpu(), value)
        add_up.close()
        print("equal", flush=True)


if __name__ == "__main__":
    main()
