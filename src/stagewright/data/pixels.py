"""From an image file to the pixels of one crop, decoded as little as the crop allows.

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
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.nn.functional import interpolate

from stagewright.data.augment import Crop
from stagewright.data.source import Pixels, is_there
from stagewright.errors import DataError

if TYPE_CHECKING:  # Pillow comes with the `data` extra, which synthetic images do without
    from PIL.Image import Image

_CropOf: TypeAlias = Callable[[int, int], Crop]

_START, _END, _SCAN = b"\xff\xd8", b"\xff\xd9", b"\xff\xda"
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")


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
        pixels = _decoded(image, _reduction_for(crop, size))
    return _resized(pixels, reduced(crop, round(height / pixels.shape[0]), height, width), size)


@cache
def _has_simplejpeg() -> bool:
    return is_there("simplejpeg")


def image_shape(data: bytes) -> tuple[int, int]:
    """Height and width of an image file, from its header."""
    with _opened(data) as image:
        return image.height, image.width


# ── JPEG ────────────────────────────────────────────────────────────────────────────────────────────────


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
    return _resized(pixels, reduced(crop, reduction, height, width), size)


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


def reduced(crop: Crop, reduction: int, height: int, width: int) -> Crop:
    """The crop on the reduced image, its edges moved to whole pixels there: at most half a pixel of the result."""
    if reduction == 1:
        return crop
    top, left = round(crop.top / reduction), round(crop.left / reduction)
    bottom = min(round((crop.top + crop.height) / reduction), height // reduction)
    right = min(round((crop.left + crop.width) / reduction), width // reduction)
    return Crop(top, left, max(1, bottom - top), max(1, right - left), crop.flip)


# ── any format ──────────────────────────────────────────────────────────────────────────────────────────


def _opened(data: bytes) -> Image:
    """The file as a Pillow image of a size that is allowed, not yet decoded."""
    from PIL import Image as Images

    try:
        image = Images.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:  # what Pillow raises on damaged files has no common base
        raise DataError(f"is not an image: {error}", f"readable formats are {', '.join(_FORMATS)}") from error
    _check_size(data, image.height, image.width, is_jpeg=image.format == "JPEG")
    return image


def _decoded(image: Image, reduction: int) -> Pixels:
    """The pixels in RGB; a JPEG's may come reduced."""
    if reduction > 1:
        image.draft("RGB", (image.width // reduction, image.height // reduction))
    try:
        return np.asarray(image.convert("RGB"))
    except Exception as error:  # as above
        raise DataError(f"cannot be decoded: {error}", "fetch it again, or skip with on_corrupt='skip'") from error


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
    return _mirrored(rectangle) if crop.flip else rectangle


def _mirrored(pixels: Pixels) -> Pixels:
    """Left and right exchanged; a channel at a time, which numpy does five times as fast as pixels of three bytes."""
    mirrored = np.empty_like(pixels)
    for channel in range(pixels.shape[2]):
        mirrored[:, :, channel] = pixels[:, ::-1, channel]
    return mirrored
