"""Memory that a CPU worker keeps for its next step instead of giving it back after each.

glibc returns what is free at the end of the heap, and takes large pieces from the system one by one. A step frees all
its activations and gradients at once, so the next one would have to fault every page in again: a tenth of its time, and
half of that of a loss over many words, whose rows are large pieces. So nothing is a piece of its own here.

torch's builds for Arm have an allocator of their own, mimalloc, which returns what has been free for 10 ms. On hosts
with a quarter of a core a linear layer's backward took one to three times its time by that, as chance would have it.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT_LONGER = {"MIMALLOC_PURGE_DELAY": "10000", "MIMALLOC_ARENA_PURGE_MULT": "1"}
"""Variables of workers: how many milliseconds mimalloc keeps what is free, and how many times as long what is large. It
reads them when torch is loaded, and not again."""


def keep_longer() -> None:
    """Gives this process, before it loads torch, and those that it starts the variables above unless they are set."""
    for name, value in KEPT_LONGER.items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> bool:
    """Asks glibc to keep freed memory, and to take all of it from the heap; whether it does."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    mmap_max, trim_threshold = -4, -1  # as malloc.h numbers them
    return mallopt is not None and bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))
