"""From an image file to the pixels of one crop, decoded as little as the crop allows.

    ┌────────────────┐   rows below the crop are not decoded: the frame's height is rewritten
    │    ┌──────┐    │   a crop over twice as large as its result is decoded at 1/2, 1/4 or 1/8
    │    │ crop │    │   (the scales with vector code in libjpeg-turbo; 7/8 … 5/8 are slower than 1)
    │    └──────┘    │
    ├┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┤   Huffman codes can only be read from the top, so what lies above is decoded
    └────────────────┘

Orientation tags are ignored, as is usual for ImageNet.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.errors import DataError

_MAX_PIXELS = 1 << 26
# A block of 8 × 8 pixels takes one bit or more, so a file of n bytes holds at most 8 · 64 · n pixels.
MAX_PIXELS_PER_BYTE = 512
_MAX_SCANS = 100
_REDUCTIONS = (8, 4, 2)
_START, _END, _SCAN = b"\xff\xd8", b"\xff\xd9", b"\xff\xda"
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL = {0xC0, 0xC1}
_BARE = {0x01, *range(0xD0, 0xD8)}  # markers without a length
_MARGIN_ROWS = 2  # smooth upsampling of colour looks at the rows below


@dataclass(frozen=True)
class Crop:
    """A rectangle of an image, mirrored or not."""

    top: int
    left: int
    height: int
    width: int
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class JpegHeader:
    """A JPEG's size, where its height is written, and whether its rows follow one another in a single scan."""

    height: int
    width: int
    height_at: int
    one_scan: bool
    rows_per_unit: int


def jpeg_header(data: bytes) -> JpegHeader | None:
    """What the file says of itself, or None where it is not a JPEG; sizes that its bytes cannot hold are refused."""
    if data[:2] != _START:
        return None
    frame_at, frame = 0, 0
    at = 2
    while at + 10 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker in _FRAMES:
            frame_at, frame = at, marker
        if marker == _SCAN[1]:
            return _described(data, frame_at, frame, data[at + 4]) if frame_at else None
        at += 2 if marker in _BARE else 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
    return None


def _described(data: bytes, frame_at: int, frame: int, num_in_scan: int) -> JpegHeader:
    """The header of a frame; a component's sampling factors lie three bytes apart, the vertical one in the low half.

    FF C0 │ length 2 │ bits 1 │ height 2 │ width 2 │ components 1 │ (id 1, factors 1, table 1) …
    """
    height = int.from_bytes(data[frame_at + 5 : frame_at + 7], "big")
    width = int.from_bytes(data[frame_at + 7 : frame_at + 9], "big")
    num_components = data[frame_at + 9]
    check_size(height, width, len(data))
    if frame not in _SEQUENTIAL and data.count(_SCAN) > _MAX_SCANS:
        raise DataError(f"is a JPEG of {data.count(_SCAN)} scans, more than the {_MAX_SCANS} allowed")
    factors = data[frame_at + 11 : frame_at + 11 + 3 * num_components : 3]
    return JpegHeader(
        height=height,
        width=width,
        height_at=frame_at + 5,
        one_scan=frame in _SEQUENTIAL and num_in_scan == num_components,
        rows_per_unit=8 * max([1, *(factor & 15 for factor in factors)]),
    )


def check_size(height: int, width: int, num_bytes: int, max_pixels_per_byte: int = MAX_PIXELS_PER_BYTE) -> None:
    """Refuses images without pixels, of more than MAX_PIXELS, or of more than their bytes can hold."""
    if height < 1 or width < 1:
        raise DataError(f"claims {width} × {height} pixels")
    if height * width > min(_MAX_PIXELS, max_pixels_per_byte * num_bytes):
        raise DataError(
            f"claims {width} × {height} pixels in {num_bytes:,} bytes",
            f"up to {_MAX_PIXELS:,} pixels and {max_pixels_per_byte} a byte are read: scale it down beforehand",
        )


def reduction_for(crop: Crop, size: int) -> int:
    """The most that the image may be reduced so that the crop still has `size` rows and columns: 1, 2, 4 or 8."""
    smaller = min(crop.height, crop.width)
    return next((reduction for reduction in _REDUCTIONS if smaller >= reduction * size), 1)


def reduced(crop: Crop, reduction: int, header: JpegHeader) -> Crop:
    """The crop on the reduced image, its edges moved to whole pixels there: at most half a pixel of the result."""
    if reduction == 1:
        return crop
    top, left = round(crop.top / reduction), round(crop.left / reduction)
    bottom = min(round((crop.top + crop.height) / reduction), header.height // reduction)
    right = min(round((crop.left + crop.width) / reduction), header.width // reduction)
    return Crop(top, left, max(1, bottom - top), max(1, right - left), crop.flip)


def cut_below(data: bytes, header: JpegHeader, bottom: int) -> tuple[bytes, int]:
    """The same JPEG ending a little below row `bottom`, and its height; unchanged where rows cannot be cut.

    The codes of the rows below stay in the file, and the decoder skips them as it looks for the end marker; files
    without that marker are cut off, and left as they are for the decoder to complain about.
    """
    unit = header.rows_per_unit
    height = min(header.height, -(-(bottom + _MARGIN_ROWS) // unit) * unit)
    if height == header.height or not header.one_scan or data.find(_END, -64) < 0:
        return data, header.height
    at = header.height_at
    return data[:at] + height.to_bytes(2, "big") + data[at + 2 :], height
