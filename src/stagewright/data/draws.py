"""Random numbers that depend on a seed and on counters, never on who asks or in which order.

    draw k of row (a, b, …)  =  mix(mix(mix(mix(seed) ⊕ a) ⊕ b …) + k·γ)

where mix is the finaliser and γ the increment of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014, figure 17). Resuming under another plan, or another numpy, gives the same numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stagewright.errors import UsageError

_GAMMA = 0x9E3779B97F4A7C15


def draw_bits(seed: int, *counters: ArrayLike, num: int) -> NDArray[np.uint64]:
    """`num` random 64-bit words for every row of the counters, as an array (rows, num)."""
    if seed < 0:
        raise UsageError(f"seed {seed} is negative", "give a seed from 0 up")
    state = _mix(np.array([seed], dtype=np.uint64))
    for counter in counters:
        state = _mix(state ^ np.atleast_1d(np.asarray(counter)).astype(np.uint64))
    steps = np.arange(1, num + 1, dtype=np.uint64) * np.array([_GAMMA], dtype=np.uint64)
    return _mix(state[:, None] + steps[None, :])


def draw_uniform(seed: int, *counters: ArrayLike, num: int) -> NDArray[np.float64]:
    """`num` numbers in [0, 1) for every row of the counters."""
    return (draw_bits(seed, *counters, num=num) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of a word spread over all of it."""
    words = words + np.array(_GAMMA, dtype=np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.array(0xBF58476D1CE4E5B9, dtype=np.uint64)
    words = (words ^ (words >> np.uint64(27))) * np.array(0x94D049BB133111EB, dtype=np.uint64)
    return words ^ (words >> np.uint64(31))
