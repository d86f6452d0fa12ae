"""Dropout by sample: which numbers are dropped follows from the seed, the batch, the row and the place in the model.

So it is the same under every plan, whatever microbatch, replica or stage a row is in, and when a forward runs again:

    keep[row, i] = mix(mix(mix(row ^ key(seed)) ^ key(batch)) ^ mix(i ^ key(place))) ≥ rate         key(n) = mix(n)

The place is the module that draws, by its path, and how many draws of that module came before.

It holds for torch's dropouts, `rand` and `rand_like` with one entry a row first. Attention's fused dropout and other
random numbers come from a generator that each microbatch seeds, and so do all inside compiled code.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_ALPHA = -1.7580993408473766
"""What alpha dropout puts in the place of a dropped number (Klambauer et al. 2017, section 1.2)."""


class _Rows(threading.local):
    """The rows that this thread computes at the moment, each by a key of its own."""

    keys: Tensor | None = None


_rows = _Rows()


@contextmanager
def rows_drawn(keys: Tensor | None) -> Iterator[None]:
    """Inside, dropout is by sample: `keys` has one number a row."""
    before, _rows.keys = _rows.keys, keys
    try:
        yield
    finally:
        _rows.keys = before


def row_keys(seed: int, batch: int, start: int, stop: int, device: torch.device) -> Tensor:
    """One number for each of some rows of a batch, the same wherever they are computed."""
    rows = torch.arange(start, stop, dtype=torch.int32, device=device)
    return _mixed(_mixed(rows ^ _key(seed)) ^ _key(batch))


@cache
def _key(number: int) -> int:
    return int(_mixed(torch.tensor(number & 0x7FFFFFFF, dtype=torch.int32)))


def place_of(path: str, number: int) -> int:
    """A number for the draws of a module, which has room for 64 a node: by its path, and how many nodes drew before."""
    return zlib.crc32(path.encode()) + number * 64


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers that look random, from 32-bit ones that do not (murmur3's finalizer, its factors as signed numbers)."""
    numbers = (numbers * -1640531527) ^ ((numbers >> 16) & 0xFFFF)
    numbers = numbers * -2048144789
    numbers = (numbers ^ ((numbers >> 13) & 0x7FFFF)) * -1028477387
    return numbers ^ ((numbers >> 16) & 0xFFFF)


class _ByRow(TorchFunctionMode):
    """Draws dropouts by sample, in one place of a model; several in one place are counted."""

    def __init__(self, place: int, keys: Tensor) -> None:
        super().__init__()
        self.place, self.keys, self.count = place, keys, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = _DRAWN.get(func)
        made = None if drawn is None else drawn(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is None else made

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """Numbers from 0 to 1 for as many rows as there are keys; None where the shape has other rows."""
        signed = self.signed(shape)
        return None if signed is None else (signed.to(like.dtype) * 2.0**-32 + 0.5).to(like.device)

    def signed(self, shape: Sequence[int]) -> Tensor | None:
        """32-bit numbers of a shape that begins with the rows, or is flat over them."""
        rows, size = len(self.keys), torch.Size(shape)
        if not size or size[0] % rows:
            return None
        place = _key(self.place + self.count)
        self.count += 1
        each = _mixed(torch.arange(size.numel() // rows, dtype=torch.int32, device=self.keys.device) ^ place)
        return _mixed(self.keys[:, None] ^ each).view(size)

    def keep(self, shape: Sequence[int], rate: float) -> Tensor | None:
        """Which numbers are kept."""
        signed = self.signed(shape)
        return None if signed is None else signed >= int((rate - 0.5) * 2**32)


def _dropout(
    by: _ByRow, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True
) -> Tensor | None:
    return _dropped(by, input, input.shape, p, training and train, inplace)


def _channel_dropout(
    by: _ByRow, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True
) -> Tensor | None:
    shape = (*input.shape[:2], *([1] * (input.dim() - 2)))
    return _dropped(by, input, shape, p, training and train, inplace)


def _dropped(by: _ByRow, input: Tensor, shape: Sequence[int], p: float, training: bool, inplace: bool) -> Tensor | None:
    keep = by.keep(shape, p) if training and 0.0 < p < 1.0 else None
    if keep is None:
        return None
    factor = keep.to(input.dtype) / (1.0 - p)
    return input.mul_(factor) if inplace else input * factor


def _alpha_dropout(
    by: _ByRow, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False, *, train: bool = True
) -> Tensor | None:
    keep = by.keep(input.shape, p) if training and train and 0.0 < p < 1.0 else None
    if keep is None:
        return None
    scale = ((1.0 - p) * (1.0 + p * _ALPHA**2)) ** -0.5
    made = torch.where(keep, input, _ALPHA) * scale - scale * _ALPHA * p
    return input.copy_(made) if inplace else made


def _rand(by: _ByRow, *size: Any, dtype: torch.dtype | None = None, **given: Any) -> Tensor | None:
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    if not shape or set(given) - {"device"}:
        return None
    return by.uniform(shape, torch.empty(0, dtype=dtype or torch.get_default_dtype(), device=given.get("device")))


def _rand_like(by: _ByRow, input: Tensor, **given: Any) -> Tensor | None:
    return None if given else by.uniform(input.shape, input)


_DRAWN: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((F.dropout, torch.dropout, torch.ops.aten.dropout.default), _dropout),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), _channel_dropout),
    **dict.fromkeys((torch.feature_dropout, torch.ops.aten.feature_dropout.default), _channel_dropout),
    **dict.fromkeys((F.alpha_dropout, torch.alpha_dropout, torch.ops.aten.alpha_dropout.default), _alpha_dropout),
    torch.rand: _rand,
    torch.rand_like: _rand_like,
}


def draws(operation: Any) -> bool:
    """Whether something may draw numbers at random: a function, a method by its name, or a module."""
    if isinstance(operation, nn.Module):
        parts = list(operation.modules())
        own = any(not type(part).__module__.startswith("torch.") for part in parts)
        return own or any(isinstance(part, nn.modules.dropout._DropoutNd | nn.MultiheadAttention) for part in parts)
    return operation in _DRAWN


@contextmanager
def drawing(place: int | None) -> Iterator[None]:
    """Inside, what is drawn in one place of a model is by sample, where rows have keys."""
    keys = _rows.keys
    if place is None or keys is None or torch.compiler.is_compiling():
        yield
        return
    with _ByRow(place, keys):
        yield
