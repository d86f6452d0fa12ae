"""The order of an epoch: a list of indices from (seed, epoch), so that a place in an epoch is one integer.

Random numbers depend on a seed and on counters, never on who asks or in which order:

    draw k of row (a, b, …)  =  mix(mix(mix(mix(seed) ⊕ a) ⊕ b …) + k·γ)

where mix is the finaliser and γ the increment of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014, figure 17). Resuming under another plan, or another numpy, gives the same numbers.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stagewright.data.source import Dataset, Indices
from stagewright.errors import UsageError

_GAMMA = 0x9E3779B97F4A7C15


class Draw(IntEnum):
    """What a random number is for; no two uses share any."""

    FILES, SLOTS, REST, ROWS = range(4)
    CROP, MASK = 7, 8


def epoch_order(dataset: Dataset, *, seed: int, epoch: int, shuffle: bool = True, buffer: int = 16_384) -> Indices:
    """The indices of the dataset in the order in which this epoch reads them, every one once.

    Rows with files of their own are permuted; files of records are shuffled, then their rows pass through a buffer:

        files c a b  →  c0 c1 c2 … a0 a1 …  →  [ buffer ]  →  c1 a0 c0 …      reads stay near one another
    """
    if epoch < 0:
        raise UsageError(f"epoch {epoch} is negative", "give an epoch from 0 up")
    if not shuffle:
        return np.arange(len(dataset), dtype=np.int64)
    if not dataset.file_starts:
        return _permutation(len(dataset), seed, epoch, Draw.ROWS)
    bounds = [*dataset.file_starts, len(dataset)]
    files = _permutation(len(bounds) - 1, seed, epoch, Draw.FILES)
    in_files = np.concatenate([np.arange(bounds[file], bounds[file + 1], dtype=np.int64) for file in files])
    return _shuffle_buffer(in_files, buffer, seed=seed, epoch=epoch)


def _shuffle_buffer(rows: Indices, buffer: int, *, seed: int, epoch: int) -> Indices:
    """What comes out of a buffer of `buffer` rows from which a random slot is read and filled with the next row.

    Step t reads slot s(t). The slot holds what the last earlier step that read it put there, row buffer + t',
    or its first filling, row s(t), if there was none; so the whole epoch is one sort instead of a loop.
    """
    if buffer < 1:
        raise UsageError(f"a shuffle buffer of {buffer} rows cannot be", "give 1 or more")
    steps = max(0, len(rows) - buffer)
    buffer = min(buffer, len(rows))
    slots = (draw_bits(seed, epoch, Draw.SLOTS, num=steps)[0] % np.uint64(max(1, buffer))).astype(np.int64)
    by_slot = np.argsort(slots, kind="stable")
    repeats = slots[by_slot][1:] == slots[by_slot][:-1]
    taken = slots.copy()
    taken[by_slot[1:][repeats]] = buffer + by_slot[:-1][repeats]
    left = np.arange(buffer, dtype=np.int64)
    left[slots] = buffer + np.arange(steps)  # the last write to a slot stays
    rest = left[_permutation(buffer, seed, epoch, Draw.REST)]
    shuffled: Indices = rows[np.concatenate([taken, rest])]
    return shuffled


def _permutation(num: int, seed: int, epoch: int, use: int) -> Indices:
    """A random order of 0 … num - 1."""
    order: Indices = np.argsort(draw_bits(seed, epoch, use, num=num)[0], kind="stable").astype(np.int64)
    return order


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
