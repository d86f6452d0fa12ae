"""The pixels of one crop of an image file, by the first decoder that is there."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch.nn.functional import interpolate

from stagewright.data.jpeg import (
    MAX_PIXELS_PER_BYTE,
    Crop,
    JpegHeader,
    check_size,
    cut_below,
    jpeg_header,
    reduced,
    reduction_for,
)
from stagewright.data.source import Pixels
from stagewright.errors import DataError, UsageError

if TYPE_CHECKING:  # Pillow comes with the `data` extra, which synthetic images do without
    from PIL.Image import Image

DecoderName: TypeAlias = Literal["simplejpeg", "torchvision", "pillow"]
_Decoder: TypeAlias = Callable[[bytes, JpegHeader, int, int], tuple[Pixels, int]]
_CropOf: TypeAlias = Callable[[int, int], Crop]

_DEFLATED_PIXELS_PER_BYTE = 8 * 1032  # one bit a pixel, and deflate's best ratio
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_WORTH_IT = 0.9  # a decoder that gains less than a tenth is not chosen: timings differ by as much
_SAMPLE_SHAPE = (375, 500, 3)


def read_crop(data: bytes | Pixels, crop_of: _CropOf, size: int, decoder: DecoderName) -> Pixels:
    """The crop that `crop_of(height, width)` chooses, as pixels (size, size, 3)."""
    if isinstance(data, np.ndarray):
        return _resized(data, crop_of(*data.shape[:2]), size)
    header = jpeg_header(data)
    if header is None:
        pixels = _decode_pillow(data)
        return _resized(pixels, crop_of(*pixels.shape[:2]), size)
    crop = crop_of(header.height, header.width)
    try:
        pixels, reduction = _DECODERS[decoder](data, header, crop.top + crop.height, reduction_for(crop, size))
    except (ValueError, RuntimeError):  # CMYK, or damage that Pillow reads past or puts into words
        pixels, reduction = _decode_pillow(data), 1
    return _resized(pixels, reduced(crop, reduction, header), size)


def image_shape(data: bytes) -> tuple[int, int]:
    """Height and width of an image file, from its header."""
    header = jpeg_header(data)
    if header is not None:
        return header.height, header.width
    with _opened(data) as image:
        return image.height, image.width


# ── decoders: bytes, header, the crop's last row, reduction → pixels, and the reduction they have ───────


def _simplejpeg(data: bytes, header: JpegHeader, bottom: int, reduction: int) -> tuple[Pixels, int]:
    """libjpeg-turbo: reduced, cut below the crop; `strict` refuses what a whole file should not hold."""
    import simplejpeg

    cut, height = cut_below(data, header, bottom)
    min_height, min_width = -(-height // reduction), -(-header.width // reduction)
    pixels: Pixels = simplejpeg.decode_jpeg(
        cut,
        "RGB",
        fastdct=True,
        fastupsample=True,
        min_height=min_height,
        min_width=min_width,
        strict=cut is data,
    )
    return pixels, reduction


def _torchvision(data: bytes, header: JpegHeader, bottom: int, reduction: int) -> tuple[Pixels, int]:
    """torchvision's libjpeg-turbo, which cannot reduce: cut below the crop."""
    from torchvision.io import ImageReadMode, decode_jpeg

    cut, _ = cut_below(data, header, bottom)
    channels = decode_jpeg(torch.frombuffer(bytearray(cut), dtype=torch.uint8), mode=ImageReadMode.RGB)
    pixels: Pixels = channels.permute(1, 2, 0).numpy()
    return pixels, 1


def _pillow(data: bytes, header: JpegHeader, bottom: int, reduction: int) -> tuple[Pixels, int]:
    """Pillow, which cannot cut: reduced."""
    pixels = _decode_pillow(data, reduction)
    return pixels, round(header.height / pixels.shape[0])


_DECODERS: Mapping[DecoderName, _Decoder] = MappingProxyType(
    {"simplejpeg": _simplejpeg, "torchvision": _torchvision, "pillow": _pillow}
)


def _decode_pillow(data: bytes, reduction: int = 1) -> Pixels:
    """The pixels of a file of any known format, in RGB."""
    with _opened(data) as image:
        if reduction > 1:
            image.draft("RGB", (image.width // reduction, image.height // reduction))
        try:
            return np.asarray(image.convert("RGB"))
        except Exception as error:  # what Pillow raises on damaged files has no common base
            raise DataError(f"cannot be decoded: {error}", "fetch it again, or skip with on_corrupt='skip'") from error


def _opened(data: bytes) -> Image:
    """The file as a Pillow image of a size that is allowed, not yet decoded."""
    from PIL import Image as Images

    try:
        image = Images.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:  # as above
        raise DataError(f"is not an image: {error}", f"readable formats are {', '.join(_FORMATS)}") from error
    per_byte = MAX_PIXELS_PER_BYTE if image.format == "JPEG" else _DEFLATED_PIXELS_PER_BYTE
    check_size(image.height, image.width, len(data), max_pixels_per_byte=per_byte)
    return image


# ── choosing a decoder ──────────────────────────────────────────────────────────────────────────────────


def choose_decoder(name: str = "auto") -> DecoderName:
    """The decoder of this name; `auto` is the first that is installed, so that all workers see the same pixels."""
    there = [each for each in _DECODERS if each == "pillow" or importlib.util.find_spec(each)]
    if name == "auto":
        return there[0]
    for each in there:
        if each == name:
            return each
    raise UsageError(f"decoder {name!r} is not installed or not known", f"here are {', '.join(there)} and auto")


# ── resizing ────────────────────────────────────────────────────────────────────────────────────────────


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
