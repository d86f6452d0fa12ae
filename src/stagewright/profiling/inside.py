"""Layers and links measured inside the hosts of a cluster: one worker's part of it.

FOLDER/inside.json says what to measure; worker n leaves FOLDER/inside-n.json, and its profile where it made one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stagewright.models import build_model
from stagewright.profiling.links import measure_as
from stagewright.profiling.measured import make_profile


def main(folder: str) -> None:
    """Measures as one of the workers."""
    where, rank, size = Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    asked = json.loads((where / "inside.json").read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    dist.init_process_group("gloo")
    # About 0.15 s at the rate that the cluster file names: neither lost in noise nor long.
    found = measure_as(rank, size, int(min(max(asked["bytes_per_s"] * 0.15, 1 << 20), 16 << 20)))
    if rank in asked["profiled"]:
        _save_profile(where / f"inside-{rank}.profile.json", asked)
    (where / f"inside-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _save_profile(path: Path, asked: Mapping[str, Any]) -> None:
    """Profiles the model while the other hosts that do so are as busy, so that all see full cores."""
    model = build_model(asked["model"], device=asked["device"], from_scratch=True, **asked["options"])
    made = make_profile(model, batch_sizes=asked["batch_sizes"], name=asked["model"], repeats=asked["repeats"])
    made.save(path)


if __name__ == "__main__":
    main(sys.argv[1])
