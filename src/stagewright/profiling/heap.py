"""Memory that a CPU worker keeps for its next step instead of giving it back after each.

glibc returns what is free at the end of the heap, and takes large pieces from the system one by one. A step frees all
its activations and gradients at once, so the next one would have to fault every page in again: a tenth of its time.
"""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Of mallopt, as malloc.h numbers them."""
MOST = 2**31 - 1
LARGEST_ON_THE_HEAP = 32 << 20
"""The most that glibc accepts; larger tensors are always pieces of their own."""


def keep_freed_memory() -> bool:
    """Asks glibc to keep freed memory; whether it does."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_ON_THE_HEAP) and mallopt(TRIM_THRESHOLD, MOST))
