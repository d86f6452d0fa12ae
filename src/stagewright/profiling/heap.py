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
from typing import Any

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Of mallopt, as malloc.h numbers them."""
_MOST = 2**31 - 1
KEPT_LONGER = {"MIMALLOC_PURGE_DELAY": "10000", "MIMALLOC_ARENA_PURGE_MULT": "1"}
"""Variables of workers: how many milliseconds mimalloc keeps what is free, and how many times as long what is large. It
reads them when torch is loaded, and not again."""


def keep_longer() -> None:
    """Gives this process, before it loads torch, and those that it starts the variables above unless they are set."""
    for name, value in KEPT_LONGER.items():
        os.environ.setdefault(name, value)


def keep_freed_memory() -> bool:
    """Asks glibc to keep freed memory, and to take all of it from the heap; whether it does."""
    mallopt = _glibc("mallopt")
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _MOST))


def give_back_freed_memory() -> None:
    """Returns to the system what is kept, where something large is over for good."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(name: str) -> Any:
    """A function of the C library; None where it has none of that name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
