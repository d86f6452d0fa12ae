"""Images without files: every pixel a hash of (seed, row, place), the same on any worker and any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagewright.data.source import Pixels
from stagewright.errors import UsageError

_SYNTHETIC = "synthetic"
_MASK = 0xFFFFFFFF


def synthetic_rows(
    shape: Sequence[int],
    num_classes: int,
    seed: int,
    batch: int,
    start: int,
    stop: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Rows `start` to `stop` of batch number `batch`: images of this shape with mean 0 and variance 1, and labels."""
    if not 0 <= start <= stop:
        raise UsageError(f"rows {start} to {stop} of a batch cannot be", "give 0 <= start <= stop")
    rows = torch.arange(start, stop, device=device, dtype=torch.int64)
    keys = _keys(rows, seed, batch)
    return _images(keys, shape, dtype), _labels(keys, num_classes)


def _keys(rows: Tensor, seed: int, batch: int) -> Tensor:
    """A 32-bit word for every row of a batch."""
    return _mix(_mix(_mix(rows & _MASK) ^ (seed & _MASK)) ^ (batch & _MASK))


def _images(keys: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uniform numbers of mean 0 and variance 1 by key and place: (u - 1/2)·√12, with u on a grid of 2⁻²⁴."""
    num = 1
    for extent in shape:
        num *= extent
    places = torch.arange(1, num + 1, device=keys.device, dtype=torch.int64)
    uniform = (_mix(keys[:, None] + places[None, :] * 0x9E3779B1 & _MASK) >> 8).to(torch.float32) * 2.0**-24
    return ((uniform - 0.5) * 12**0.5).to(dtype).reshape(len(keys), *shape)


def _labels(keys: Tensor, num_classes: int) -> Tensor:
    """A label by key."""
    return _mix(keys ^ 0x5BD1E995) % num_classes


def _mix(words: Tensor) -> Tensor:
    """Every bit of a 32-bit word, held in an int64, spread over all of it (the finaliser of MurmurHash3)."""
    words = (words ^ (words >> 16)) * 0x85EBCA6B & _MASK
    words = (words ^ (words >> 13)) * 0xC2B2AE35 & _MASK
    return words ^ (words >> 16)


@dataclass(frozen=True, kw_only=True)
class SyntheticImages:
    """A dataset of hashed pixels: row i is row i of batch 0 of `synthetic_rows`."""

    num_images: int = 1_281_167
    num_classes: int = 1000
    shape: tuple[int, int, int] = (3, 224, 224)
    seed: int = 0
    class_names: tuple[str, ...] = ()
    file_starts: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_images < 1 or self.num_classes < 1 or min(self.shape) < 1:
            raise UsageError(f"{self.num_images} images of {self.num_classes} classes and shape {self.shape} cannot be")

    def __len__(self) -> int:
        return self.num_images

    def label(self, index: int) -> int:
        return int(synthetic_rows((1,), self.num_classes, self.seed, 0, index, index + 1)[1])

    def encoded(self, index: int) -> Pixels:
        """The pixels (height, width, channels) as bytes of colour."""
        image = synthetic_rows(self.shape, 1, self.seed, 0, index, index + 1)[0][0]
        pixels: Pixels = ((image / 12**0.5 + 0.5) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        return pixels

    def where(self, index: int) -> str:
        return f"synthetic row {index}"

    def images(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """The images of these rows, made on the device of `indices`."""
        return _images(_keys(indices, self.seed, 0), self.shape, dtype)

    def labels(self, indices: Tensor) -> Tensor:
        """The labels of these rows, made on the device of `indices`."""
        return _labels(_keys(indices, self.seed, 0), self.num_classes)
