"""Which crop of an image is seen, and its pixels, decoded as little as the crop allows.

    ┌────────────────┐   rows below the crop are not decoded: the frame's height is rewritten (7 % more images/s)
    │    ┌──────┐    │   a crop over twice as large as its result is decoded at 1/2, 1/4 or 1/8
    │    │ crop │    │   (the scales with vector code in libjpeg-turbo; 7/8 … 5/8 are slower than 1)
    │    └──────┘    │
    ├┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┤   Huffman codes can only be read from the top, so what lies above is decoded
    └────────────────┘

JPEGs are decoded by simplejpeg where it is installed, all else by Pillow. Orientation tags are ignored, as is usual
for ImageNet.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from stagewright.data.source import Pixels, is_there
from stagewright.errors import DataError, UsageError

if TYPE_CHECKING:  # Pillow comes with the `data` extra, which synthetic images do without
    from PIL.Image import Image

_CropOf: TypeAlias = Callable[[int, int], "Crop"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_START, _END, _SCAN = b"\xff\xd8", b"\xff\xd9", b"\xff\xda"
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")


# ── crops ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Crop:
    """A rectangle of an image, mirrored or not."""

    top: int
    left: int
    height: int
    width: int
    flip: bool = False

    def reduced(self, reduction: int, height: int, width: int) -> Crop:
        """The crop on the reduced image, its edges moved to whole pixels there: at most half a pixel of the result."""
        if reduction == 1:
            return self
        top, left = round(self.top / reduction), round(self.left / reduction)
        bottom = min(round((self.top + self.height) / reduction), height // reduction)
        right = min(round((self.left + self.width) / reduction), width // reduction)
        return Crop(top, left, max(1, bottom - top), max(1, right - left), self.flip)


@dataclass(frozen=True, kw_only=True)
class TrainTransform:
    """A random part of the image, of random area and aspect, mirrored half of the time.

    Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6, as it is commonly run today.
    """

    size: int = 224
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    num_draws = 1 + 4 * 10  # ten tries

    def __post_init__(self) -> None:
        _check_side(self.size)
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

    num_draws = 0

    def __post_init__(self) -> None:
        _check_side(self.size)
        if self.shorter < self.size:
            raise UsageError(f"a crop of {self.size} does not fit a shorter side of {self.shorter}")

    def crop(self, height: int, width: int, draws: Sequence[float]) -> Crop:
        side = max(1, round(min(height, width) * self.size / self.shorter))
        return Crop((height - side) // 2, (width - side) // 2, side, side)


Transform: TypeAlias = TrainTransform | EvalTransform


def _check_side(size: int) -> None:
    if size < 1:
        raise UsageError(f"images of {size} pixels a side cannot be", "give 1 or more")


def normalise(pixels: Tensor, *, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Bytes (rows, height, width, 3) as (x / 255 - mean) / std of ImageNet in (rows, 3, height, width), where they are.

    Whole image rows are multiplied at a time, since three channels alone would not fill a vector register; on a CPU
    one image at a time, since its numbers stay in the cache and those of a batch do not.
    """
    rows, height, width, channels = pixels.shape
    mean, std = (torch.tensor(numbers, device=pixels.device) for numbers in (IMAGENET_MEAN, IMAGENET_STD))
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


# ── pixels ──────────────────────────────────────────────────────────────────────────────────────────────


def read_crop(data: bytes, crop_of: _CropOf, size: int) -> Pixels:
    """The crop that `crop_of(height, width)` chooses, as pixels (size, size, 3)."""
    if data[:2] == _START and _has_simplejpeg():
        try:
            return _read_jpeg(data, crop_of, size)
        except (ValueError, KeyError):  # CMYK, odd sampling, or damage that Pillow reads past or puts into words
            pass
    with _opened(data) as image:
        height, width = image.height, image.width
        crop = crop_of(height, width)
        reduction = _reduction_for(crop, size)
        if reduction > 1:
            image.draft("RGB", (width // reduction, height // reduction))
        try:
            pixels = np.asarray(image.convert("RGB"))
        except Exception as error:  # what Pillow raises on damaged files has no common base
            raise DataError(f"cannot be decoded: {error}", "fetch it again, or skip with on_corrupt='skip'") from error
    return _resized(pixels, crop.reduced(round(height / pixels.shape[0]), height, width), size)


@cache
def _has_simplejpeg() -> bool:
    return is_there("simplejpeg")


def image_shape(data: bytes) -> tuple[int, int]:
    """Height and width of an image file, from its header."""
    with _opened(data) as image:
        return image.height, image.width


def _read_jpeg(data: bytes, crop_of: _CropOf, size: int) -> Pixels:
    """The crop by libjpeg-turbo: reduced, cut below the crop; `strict` refuses what a whole file should not hold."""
    import simplejpeg

    height, width, _, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    _check_size(data, height, width, is_jpeg=True)
    crop = crop_of(height, width)
    reduction = _reduction_for(crop, size)
    cut, cut_height = _cut_below(data, height, width, crop.top + crop.height)
    pixels: Pixels = simplejpeg.decode_jpeg(
        cut, "RGB", fastdct=True, fastupsample=True, strict=cut is data,
        min_height=-(-cut_height // reduction), min_width=-(-width // reduction),
    )  # fmt: skip
    return _resized(pixels, crop.reduced(reduction, height, width), size)


def _cut_below(data: bytes, height: int, width: int, bottom: int) -> tuple[bytes, int]:
    """The same JPEG ending a little below row `bottom`, and its height; unchanged where rows cannot be cut.

    Rows can be cut where a baseline frame of three colours has them in one scan. The codes of the rows below stay
    in the file, and the decoder skips them as it looks for the end marker; files without that marker are cut off,
    and left as they are for the decoder to complain about. Smooth upsampling of colour looks at two rows below.
    """
    cut_height = -(-(bottom + 2) // 16) * 16
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    frame = data.find(b"\xff\xc0\x00\x11\x08" + size + b"\x03")  # marker, length, bits, height, width, components
    scan = data.find(_SCAN, frame)
    if cut_height >= height or frame < 0 or data[scan + 4] != 3 or data.find(_END, -64) < 0:
        return data, height
    return data[: frame + 5] + cut_height.to_bytes(2, "big") + data[frame + 7 :], cut_height


def _reduction_for(crop: Crop, size: int) -> int:
    """The most that the image may be reduced so that the crop still has `size` rows and columns: 1, 2, 4 or 8."""
    smaller = min(crop.height, crop.width)
    return next((reduction for reduction in (8, 4, 2) if smaller >= reduction * size), 1)


def _opened(data: bytes) -> Image:
    """The file as a Pillow image of a size that is allowed, not yet decoded."""
    from PIL import Image as Images

    try:
        image = Images.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:  # as above
        raise DataError(f"is not an image: {error}", f"readable formats are {', '.join(_FORMATS)}") from error
    _check_size(data, image.height, image.width, is_jpeg=image.format == "JPEG")
    return image


def _check_size(data: bytes, height: int, width: int, *, is_jpeg: bool) -> None:
    """Refuses images without pixels, of too many, or of more than their bytes can hold.

    A JPEG's block of 8 × 8 pixels takes one bit or more; other formats may take one bit a pixel, and deflate's best
    ratio is 1 : 1032.
    """
    if height < 1 or width < 1:
        raise DataError(f"claims {width} × {height} pixels")
    most, per_byte = 1 << 26, 8 * (64 if is_jpeg else 1032)
    if height * width > min(most, per_byte * len(data)):
        raise DataError(
            f"claims {width} × {height} pixels in {len(data):,} bytes",
            f"up to {most:,} pixels and {per_byte} a byte are read: scale it down beforehand",
        )
    if is_jpeg and data.count(_SCAN) > 100:
        raise DataError(f"is a JPEG of {data.count(_SCAN)} scans, more than the 100 allowed")


def _resized(pixels: Pixels, crop: Crop, size: int) -> Pixels:
    """The crop at (size, size) with triangle filtering, mirrored where the crop says so.

    The four-dimensional contiguous view matters: only with these strides does torch take its vector path for bytes.
    """
    rectangle = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    if 0 in rectangle.shape:
        raise DataError(f"has {pixels.shape[1]} × {pixels.shape[0]} pixels, fewer than its header claims")
    if rectangle.shape[:2] != (size, size):
        rows_last = torch.from_numpy(np.array(rectangle, order="C", ndmin=4)).permute(0, 3, 1, 2)
        resized = interpolate(rows_last, size=(size, size), mode="bilinear", antialias=True)
        rectangle = resized[0].permute(1, 2, 0).numpy()
    if not crop.flip:
        return rectangle
    mirrored = np.empty_like(rectangle)
    for channel in range(3):  # numpy does this five times as fast as with pixels of three bytes
        mirrored[:, :, channel] = rectangle[:, ::-1, channel]
    return mirrored
