"""Which part of an image is seen: a random crop in training, the centre in evaluation; then mean and deviation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from stagewright.errors import UsageError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Crop:
    """A rectangle of an image, mirrored or not."""

    top: int
    left: int
    height: int
    width: int
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainTransform:
    """A random part of the image, of random area and aspect, mirrored half of the time.

    Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6, as it is commonly run today.
    """

    size: int = 224
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    num_draws = 1 + 4 * 10  # ten tries

    def __post_init__(self) -> None:
        _check_size(self.size)
        if not (0 < self.area[0] <= self.area[1] <= 1 and 0 < self.aspect[0] <= self.aspect[1]):
            raise UsageError(f"crops of area {self.area} and aspect {self.aspect} cannot be")

    def crop(self, height: int, width: int, draws: Sequence[float]) -> Crop:
        """The first of ten random rectangles that fits, else the largest in the middle with an allowed aspect."""
        flip = draws[0] < self.flip
        low, high = math.log(self.aspect[0]), math.log(self.aspect[1])
        for first in range(1, self.num_draws, 4):
            area = height * width * (self.area[0] + draws[first] * (self.area[1] - self.area[0]))
            aspect = math.exp(low + draws[first + 1] * (high - low))
            wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < wide <= width and 0 < tall <= height:
                top, left = int(draws[first + 2] * (height - tall + 1)), int(draws[first + 3] * (width - wide + 1))
                return Crop(top, left, tall, wide, flip)
        wide = min(width, max(1, round(height * self.aspect[1])))
        tall = min(height, max(1, round(width / self.aspect[0])))
        return Crop((height - tall) // 2, (width - wide) // 2, tall, wide, flip)


@dataclass(frozen=True, kw_only=True)
class EvalTransform:
    """The middle of the image: the shorter side scaled to `shorter`, then the central `size` × `size`.

    Both at once: the central square of shorter side · size / shorter pixels, scaled to `size`.
    """

    size: int = 224
    shorter: int = 256
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    num_draws = 0

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.shorter < self.size:
            raise UsageError(f"a crop of {self.size} does not fit a shorter side of {self.shorter}")

    def crop(self, height: int, width: int, draws: Sequence[float]) -> Crop:
        side = max(1, round(min(height, width) * self.size / self.shorter))
        return Crop((height - side) // 2, (width - side) // 2, side, side)


Transform: TypeAlias = TrainTransform | EvalTransform


def _check_size(size: int) -> None:
    if size < 1:
        raise UsageError(f"images of {size} pixels a side cannot be", "give 1 or more")


def normalise(pixels: Tensor, transform: Transform, *, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Bytes (rows, height, width, 3) as (x / 255 - mean) / std in (rows, 3, height, width), on the device they are on.

    Whole image rows are multiplied at a time, since three channels alone would not fill a vector register; on a CPU
    one image at a time, since its numbers stay in the cache and those of a batch do not.
    """
    rows, height, width, channels = pixels.shape
    mean = torch.tensor(transform.mean, device=pixels.device)
    std = torch.tensor(transform.std, device=pixels.device)
    scale, shift = (1 / (255 * std)).repeat(width), (-mean / std).repeat(width)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    shape = (rows, channels, height, width)
    images = torch.empty(shape, dtype=dtype, device=pixels.device, memory_format=layout)
    at_a_time = 1 if pixels.device.type == "cpu" else max(1, rows)
    for first in range(0, rows, at_a_time):
        some = pixels[first : first + at_a_time]
        numbers = torch.mul(some.reshape(-1, height, width * channels), scale).add_(shift)
        images[first : first + at_a_time] = numbers.view(-1, height, width, channels).permute(0, 3, 1, 2)
    return images
