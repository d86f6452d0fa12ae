"""One worker of test_sums: adds up rows with the others, and says what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stagewright.runtime.sums import add_up


def main() -> None:
    """Adds up several sizes among the members that are asked for; the others do nothing."""
    folder, members = Path(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")]
    dist.init_process_group("gloo")
    worker = dist.get_rank()
    group = dist.new_group(members)
    told: list[list[float]] = []
    for size in (1, 5, 40_000):
        rows = torch.stack([torch.arange(size) * 0.1 + 10 * worker + number for number in range(len(members))])
        if worker in members:
            add_up(rows, torch.empty_like(rows), members.index(worker), members, group)
            told.append(rows.flatten().tolist())
    (folder / f"worker-{worker}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
