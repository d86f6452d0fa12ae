"""Allocates and frees what a training step does, over and over; prints the pages that each step faulted in."""

from __future__ import annotations

import resource
import sys
import time

import torch

from stagewright.profiling.heap import keep_freed_memory


def main() -> None:
    """Steps of 24 tensors of 4 MiB and two of 64 MiB, freed one by one at the end of each, as backward does."""
    if "keep" in sys.argv:
        print("kept" if keep_freed_memory() else "cannot keep")
    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(1 << 20) for _ in range(24)] + [torch.ones(1 << 24) for _ in range(2)]
        while held:
            held.pop()
            time.sleep(0.02)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(*faults[3:])


if __name__ == "__main__":
    main()
