"""Layers and links measured inside the hosts of a cluster: one worker's part of it.

FOLDER/inside.json says what to measure; worker n leaves FOLDER/inside-n.json, and its profile where it made one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist


def _main(folder: str) -> None:
    """Measures as one of the workers."""
    where, rank, size = Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    asked = json.loads((where / "inside.json").read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    dist.init_process_group("gloo", init_method=asked.get("meet"), rank=rank, world_size=size)
    large_bytes = asked["large_bytes"]
    # Every link is in two pairs.
    pairs = sorted({(min(pair), max(pair)) for pair in ((one, (one + 1) % size) for one in range(size))})
    found: dict[str, Any] = {"pairs": _bounce_pairs(rank, pairs, large_bytes)}
    found["core_s_per_byte"] = _core_s_per_byte(rank, size, large_bytes)
    if asked.get("has_common_memory"):
        found["sum_core_s_per_byte"] = _sum_core_s_per_byte(rank, size, large_bytes, f"{folder}/common")
    if rank in asked.get("profiled", ()):
        _save_profile(where / f"inside-{rank}.profile.json", asked)
    (where / f"inside-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _save_profile(path: Path, asked: Mapping[str, Any]) -> None:
    """Profiles the model while the other hosts that do so are as busy, so that all see full cores."""
    from stagewright.models import build_model
    from stagewright.profiling.measured import make_profile

    model = build_model(asked["model"], device=asked["device"], from_scratch=True, **asked["options"])
    made = make_profile(model, batch_sizes=asked["batch_sizes"], name=asked["model"], repeats=asked["repeats"])
    made.save(path)


def _core_s_per_byte(rank: int, size: int, num_bytes: int) -> float:
    """What this end of a transfer spends on a byte: neighbours bounce messages, all at once."""
    other = rank ^ 1
    if other >= size:
        dist.barrier()
        return 0.0
    _bounce(rank < other, other, num_bytes)
    before = process_time()
    for _ in range(4):
        _bounce(rank < other, other, num_bytes)
    spent = process_time() - before
    dist.barrier()
    # Each bounce sends the message once and receives it once.
    return spent / (4 * 2 * num_bytes)


def _sum_core_s_per_byte(rank: int, size: int, num_bytes: int, file: str) -> float:
    """What this replica spends on a byte of gradients that all add up in memory that they have in common.

    Each adds a part of all rows, and copies the whole sum into its own; bucket by bucket, for they meet at each.
    """
    numel = num_bytes // 4
    rows = torch.from_file(file, shared=True, size=(size + 1) * numel).view(size + 1, numel)
    buckets = 8  # as many as a stage's gradients mostly make
    edges = [numel * at // (buckets * size) for at in range(buckets * size + 1)]
    spent = []
    for _ in range(6):  # the first time finds the memory
        dist.barrier()
        before = process_time()
        for first in range(0, buckets * size, size):
            own, whole = slice(*edges[first + rank : first + rank + 2]), slice(edges[first], edges[first + size])
            dist.barrier()
            torch.sum(rows[:-1, own], 0, out=rows[-1, own])
            dist.barrier()
            rows[rank, whole].copy_(rows[-1, whole])
        spent.append(process_time() - before)
    return median(spent[1:]) / num_bytes


def _bounce_pairs(rank: int, pairs: Sequence[tuple[int, int]], large_bytes: int) -> list[tuple[int, int, float, float]]:
    """What the pairs show that this worker begins: (first, second, bytes a second, latency); one pair at a time."""
    found = []
    for first, second in pairs:
        if rank in (first, second):
            other = second if rank == first else first
            small = min(_bounce(rank == first, other, 1) for _ in range(30))  # whatever else runs can only add
            large = median(_bounce(rank == first, other, large_bytes) for _ in range(3))
            if rank == first:
                found.append((first, second, rate_of(large_bytes, large, small), small))
        dist.barrier()
    return found


def _bounce(starts: bool, other: int, num_bytes: int) -> float:
    """Half of the seconds that a message takes there and back."""
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    begin = perf_counter()
    for sends in (starts, not starts):
        if sends:
            dist.send(message, other)
        else:
            dist.recv(message, other)
    return (perf_counter() - begin) / 2


def rate_of(num_bytes: int, large_s: float, small_s: float) -> float:
    """Bytes a second, the latency taken off; but never more than half, so that a disturbed latency cannot spoil it."""
    return num_bytes / max(large_s - small_s, large_s / 2)


if __name__ == "__main__":
    _main(sys.argv[1])
