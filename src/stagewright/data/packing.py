"""Tokens as rows of a batch: which tokens each row holds, and which rows each batch of an epoch.

join        documents one after the other, cut every so many tokens     a a a a │ a b b b │ b c c c
documents   each begins a row of its own, and goes on in the next       a a a a │ a · · · │ b b b b │ c c c ·
off         one row each; a longer one is refused                       a a a · │ b b b b │ c c · ·
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagewright.data.order import draw_bits
from stagewright.data.source import Indices, OnCorrupt
from stagewright.data.tokens import Tokens
from stagewright.errors import DataError, UsageError

_Pack: TypeAlias = Literal["join", "documents", "off"]
_SHORTEST = 2
"""Tokens of a row, at least: the first is given, and the next is learned."""


def permuted(positions: Indices, num: int, *, seed: int, use: str, epoch: int = 0) -> Indices:
    """Where positions of 0 … num − 1 are in a random order of them, computed for each on its own; one for each use.

    Four rounds of a Feistel network on as many bits as `num` needs; what falls outside goes round again (Black and
    Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 5).
    """
    half = max(1, (max(num - 1, 1).bit_length() + 1) // 2)
    low = np.int64((1 << half) - 1)
    places = np.array(positions, dtype=np.int64)
    todo = np.arange(len(places))
    while len(todo):
        left, right = places[todo] >> half, places[todo] & low
        for turn in range(4):
            drawn = draw_bits(seed, zlib.crc32(use.encode()), epoch, turn, right, num=1)[:, 0].astype(np.int64) & low
            left, right = right, left ^ drawn
        places[todo] = (left << half) | right
        todo = todo[places[todo] >= num]
    return places


@dataclass(frozen=True)
class TokenRows:
    """Rows of at most `length` tokens each; all of them, or those of a split."""

    tokens: Tokens
    length: int
    bounds: NDArray[np.int64] | None
    """The first token of each row, and one past its last; None where row n begins at n · length."""
    num_whole: int
    """The rows of all splits."""
    first: int = 0
    last: int | None = None
    """Which of them, in the order that splits them."""
    num_longer: int = 0
    """Documents that were left out, because they are longer than a row."""

    def __len__(self) -> int:
        return (self.num_whole if self.last is None else self.last) - self.first

    @property
    def faults(self) -> tuple[str, ...]:
        """A sentence for everything that was left out; not told again of the rows that a split holds back."""
        if self.last is not None and self.first == 0:
            return ()
        longer = f"{self.num_longer:,} of {self.tokens.about.num_documents:,} documents are longer than {self.length:,}"
        return (*self.tokens.about.faults, *([f"{longer} tokens"] if self.num_longer else []))

    @property
    def is_even(self) -> bool:
        """Whether all rows have the same length."""
        return self.bounds is None

    def numbers(self, positions: Indices) -> Indices:
        """Which of all rows are at these positions of the split."""
        if self.first == 0 and self.last is None:
            return positions
        return permuted(positions + self.first, self.num_whole, seed=0, use="split")

    def lengths(self, positions: Indices) -> Indices:
        """The tokens of rows."""
        if self.bounds is None:
            return np.full(len(positions), self.length)
        found = self.bounds[self.numbers(positions)]
        return found[:, 1] - found[:, 0]

    def read(self, position: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The tokens of a row, and which of them count."""
        number = int(self.numbers(np.array([position]))[0])
        start, stop = (number * self.length, (number + 1) * self.length)
        if self.bounds is not None:
            start, stop = self.bounds[number].tolist()
        return self.tokens.ids[start:stop], self.tokens.counted(start, stop)

    def split(self, share: float) -> tuple[TokenRows, TokenRows]:
        """The rows for training, and a random share of all for validation, the same for every seed."""
        number = round(share * len(self))
        if not 0 < number < len(self):
            raise UsageError(
                f"--validation {share:g} of {len(self):,} rows is {number:,}",
                f"give a share between {1 / max(len(self), 2):.2g} and 1, or a file with --evaluation-data",
            )
        parts = ((number, self.num_whole), (0, number))
        train, held_out = (replace(self, first=first, last=last) for first, last in parts)
        return train, held_out


def pack(tokens: Tokens, length: int, how: _Pack | None = None, on_corrupt: OnCorrupt = "stop") -> TokenRows:
    """The tokens as rows; by default text is joined, and where some tokens do not count documents are kept apart."""
    how = how or ("off" if len(tokens.ignored) else "join")
    if length < _SHORTEST:
        raise UsageError(f"a row of {length} token has nothing to learn", f"--sequence-length {_SHORTEST} or more")
    if how == "join":
        rows = TokenRows(tokens, length, None, tokens.about.num_tokens // length)
    else:
        bounds = _pieces(tokens, length) if how == "documents" else _whole(tokens, length, on_corrupt)
        longer = len(tokens.lengths) - len(bounds) if how == "off" else 0
        bounds = bounds[bounds[:, 1] - bounds[:, 0] >= _SHORTEST]
        rows = TokenRows(tokens, length, bounds, len(bounds), num_longer=longer)
    if not len(rows):
        raise DataError(
            f"{tokens.about.num_tokens:,} tokens are not one row of {length:,}", "give more text, or a smaller "
            "--sequence-length",
        )  # fmt: skip
    return rows


def _pieces(tokens: Tokens, length: int) -> NDArray[np.int64]:
    """Each document in pieces of so many tokens, the last one shorter."""
    numbers = np.maximum(1, -(-tokens.lengths // length))
    documents = np.repeat(np.arange(len(numbers)), numbers)
    piece = np.arange(len(documents)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    starts = tokens.starts[:-1][documents] + piece * length
    return np.stack([starts, np.minimum(starts + length, tokens.starts[1:][documents])], axis=1)


def _whole(tokens: Tokens, length: int, on_corrupt: OnCorrupt) -> NDArray[np.int64]:
    """Each document as one row; those that are longer are refused, or left out."""
    bounds = np.stack([tokens.starts[:-1], tokens.starts[1:]], axis=1)
    longer = np.flatnonzero(tokens.lengths > length)
    if len(longer) and on_corrupt == "stop":
        first = int(longer[0])
        raise DataError(
            f"{tokens.where(first)} has {tokens.lengths[first]:,} tokens, and a row has {length:,}"
            f" ({len(longer):,} of {len(bounds):,} documents are longer)",
            "raise --sequence-length, cut them with --pack documents, or leave them out with --on-corrupt skip",
        )
    return bounds[tokens.lengths <= length]


def rows_of_batch(rows: TokenRows, batch: int, *, size: int, seed: int, windows: int | None = None) -> Indices:
    """The positions of the rows of a batch, epochs one after the other, each row once an epoch; the rest is left out.

    With `windows` batches of so many batches are made of rows of about the same length.
    """
    per_epoch = len(rows) // size
    epoch, place = divmod(batch, per_epoch)
    if windows is None:
        return permuted(np.arange(place * size, (place + 1) * size), len(rows), seed=seed, use="epoch", epoch=epoch)
    window, inside = divmod(place, windows)
    first, last = window * windows, min((window + 1) * windows, per_epoch)
    found = permuted(np.arange(first * size, last * size), len(rows), seed=seed, use="epoch", epoch=epoch)
    found = found[np.argsort(rows.lengths(found), kind="stable")]
    chosen = permuted(np.array([inside]), last - first, seed=seed + window, use="batches", epoch=epoch)
    start = int(chosen[0]) * size
    return found[start : start + size]


def bucket_lengths(longest: int, number: int) -> tuple[int, ...]:
    """The lengths that rows are padded to: so many, evenly spaced, multiples of 8 but for the last."""
    steps = [-(-longest * each // number) for each in range(1, number + 1)]
    return tuple(sorted({min(longest, -(-each // 8) * 8) for each in steps[:-1]} | {longest}))


def padded_to(lengths: Sequence[int], buckets: Sequence[int]) -> int:
    """The smallest bucket that the longest row fits into."""
    return next(each for each in buckets if each >= max(lengths))
