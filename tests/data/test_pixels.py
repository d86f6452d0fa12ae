"""Crops: which rectangle, and the same pixels as decoding everything and cropping afterwards."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from stagewright.data import pixels as pixels_of
from stagewright.data.order import draw_uniform
from stagewright.data.pixels import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Crop,
    EvalTransform,
    TrainTransform,
    _cut_below,
    _reduction_for,
    image_shape,
    normalise,
    read_crop,
)
from stagewright.errors import DataError

Encode = Callable[..., bytes]


def by_pillow(data: bytes, crop: Crop, size: int) -> np.ndarray:
    """The crop the plain way."""
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(image).astype(int)
    return pixels[:, ::-1] if crop.flip else pixels


def difference(data: bytes, crop: Crop, size: int) -> float:
    """The mean difference from the plain way, of 255; a reduced crop has its edges on the reduced image's pixels."""
    pixels = read_crop(data, lambda height, width: crop, size)
    assert (pixels.shape, pixels.dtype) == ((size, size, 3), np.uint8)
    if data[:2] == b"\xff\xd8":
        by = _reduction_for(crop, size)
        small = crop.reduced(by, *image_shape(data))
        crop = Crop(small.top * by, small.left * by, small.height * by, small.width * by, crop.flip)
    return float(abs(pixels - by_pillow(data, crop, size)).mean())


# ── decoding ────────────────────────────────────────────────────────────────────────────────────────────

CROPS = [
    Crop(0, 0, 300, 400),
    Crop(10, 20, 100, 90, flip=True),
    Crop(150, 200, 150, 200),
    Crop(0, 0, 40, 40),
    Crop(0, 0, 32, 32),
]


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("decoder", ["simplejpeg", "pillow"])
@pytest.mark.parametrize(
    "options",
    [{}, {"subsampling": 0}, {"progressive": True}, {"restart_marker_rows": 1}, {"mode": "L"}, {"mode": "CMYK"}],
)
def test_a_crop_is_what_whole_decoding_gives(
    encode: Encode, crop: Crop, decoder: str, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixels_of, "_has_simplejpeg", lambda: decoder == "simplejpeg")
    assert difference(encode(300, 400, quality=92, **options), crop, 32) < 3


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP"])
def test_other_formats_are_read_whatever_they_are_called(encode: Encode, format: str) -> None:
    assert difference(encode(90, 120, format=format), Crop(5, 10, 70, 80), 32) < 2
    assert image_shape(encode(90, 120, format=format)) == (90, 120)


@pytest.mark.parametrize("bottom", [1, 15, 16, 17, 100, 285, 298, 299, 300])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_cutting_below_leaves_the_rows_above_untouched(encode: Encode, bottom: int, subsampling: int) -> None:
    data = encode(300, 64, subsampling=subsampling)
    cut, height = _cut_below(data, 300, 64, bottom)
    assert (height < 300) == (bottom < 287), "rows below are left out"
    assert bottom <= height <= bottom + 2 + 16
    whole = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    top = np.asarray(Image.open(io.BytesIO(cut)).convert("RGB"))
    assert top.shape[0] == height
    assert (whole[:bottom] == top[:bottom]).all()


def test_what_cannot_be_cut_is_left_whole(encode: Encode) -> None:
    for data in (encode(300, 64, progressive=True), encode(300, 64)[:-2]):
        assert _cut_below(data, 300, 64, 10) == (data, 300)


@pytest.mark.parametrize(
    ("side", "reduction"), [(223, 1), (447, 1), (448, 2), (895, 2), (896, 4), (1792, 8), (9000, 8)]
)
def test_reduced_only_while_the_crop_stays_large_enough(side: int, reduction: int) -> None:
    assert _reduction_for(Crop(0, 0, side, side + 50), 224) == reduction


def test_a_cut_off_file_is_an_error_whatever_the_crop(encode: Encode) -> None:
    data = encode(300, 400)
    for crop in CROPS:
        with pytest.raises(DataError, match="cannot be decoded: "):
            read_crop(data[: len(data) * 2 // 3], lambda height, width, crop=crop: crop, 32)


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8", b"hello", b"\xff\xd8" + bytes(200), b"\x89PNG\r\n\x1a\n" + bytes(50)]
)
def test_what_is_no_image_is_an_error(data: bytes) -> None:
    with pytest.raises(DataError, match=r"is not an image|cannot be decoded"):
        read_crop(data, lambda height, width: Crop(0, 0, height, width), 8)


def test_more_pixels_than_the_bytes_can_hold_are_refused_before_decoding(encode: Encode) -> None:
    data = bytearray(encode(16, 16))
    height_at = data.index(b"\xff\xc0") + 5
    data[height_at : height_at + 4] = (8000).to_bytes(2, "big") * 2
    with pytest.raises(DataError, match=re.escape(f"claims 8000 × 8000 pixels in {len(data)} bytes")):
        read_crop(bytes(data), lambda height, width: Crop(0, 0, height, width), 8)


def test_a_jpeg_of_very_many_scans_is_refused_before_decoding(encode: Encode) -> None:
    data = encode(16, 16, progressive=True)
    for scans in (data, data[:-2] + b"\xff\xda" * 101 + data[-2:]):
        if scans is data:
            assert read_crop(scans, lambda height, width: Crop(0, 0, height, width), 8).shape == (8, 8, 3)
        else:
            with pytest.raises(DataError, match=r"a JPEG of \d+ scans, more than the 100"):
                read_crop(scans, lambda height, width: Crop(0, 0, height, width), 8)


def test_sampling_factors_of_zero_are_an_error(encode: Encode) -> None:
    data = bytearray(encode(300, 64))
    height_at = data.index(b"\xff\xc0") + 5
    data[height_at + 6 : height_at + 13 : 3] = bytes(3)
    with pytest.raises(DataError, match="cannot be decoded"):
        read_crop(bytes(data), lambda height, width: Crop(0, 0, 10, width), 8)


# ── rectangles ──────────────────────────────────────────────────────────────────────────────────────────


@given(height=some.integers(1, 3000), width=some.integers(1, 3000), seed=some.integers(0, 10**6))
def test_a_crop_lies_within_its_image(height: int, width: int, seed: int) -> None:
    for transform in (TrainTransform(), EvalTransform()):
        crop = transform.crop(height, width, draw_uniform(seed, num=transform.num_draws)[0].tolist())
        assert 0 <= crop.top <= crop.top + crop.height <= height
        assert 0 <= crop.left <= crop.left + crop.width <= width
        assert min(crop.height, crop.width) >= 1


def test_random_crops_have_the_stated_area_aspect_and_flips() -> None:
    transform = TrainTransform()
    crops = [
        transform.crop(1000, 1000, row.tolist()) for row in draw_uniform(1, np.arange(4000), num=transform.num_draws)
    ]
    areas = np.array([crop.height * crop.width / 1e6 for crop in crops])
    aspects = np.array([crop.width / crop.height for crop in crops])
    assert 0.079 < areas.min() < 0.1
    assert 0.9 < areas.max() <= 1
    assert 0.74 < aspects.min() < 0.77
    assert 1.3 < aspects.max() < 1.35
    assert abs(np.log(aspects).mean()) < 0.01
    assert abs(np.mean([crop.flip for crop in crops]) - 0.5) < 0.03


def test_an_image_too_long_for_any_crop_gives_its_middle() -> None:
    assert TrainTransform(flip=0).crop(10, 1000, [0.999] * 41) == Crop(0, 493, 10, 13)


@pytest.mark.parametrize(
    ("height", "width", "crop"),
    [(256, 256, Crop(16, 16, 224, 224)), (512, 1024, Crop(32, 288, 448, 448)), (375, 500, Crop(23, 86, 328, 328))],
)
def test_evaluation_sees_the_middle_224_of_a_shorter_side_of_256(height: int, width: int, crop: Crop) -> None:
    assert EvalTransform().crop(height, width, ()) == crop


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_normalised_is_x_minus_mean_over_deviation(dtype: torch.dtype, channels_last: bool) -> None:
    pixels = torch.randint(0, 256, (3, 4, 5, 3), dtype=torch.uint8)
    images = normalise(pixels, dtype=dtype, channels_last=channels_last)
    expected = (pixels / 255 - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    torch.testing.assert_close(images, expected.permute(0, 3, 1, 2).to(dtype), atol=1e-5, rtol=1e-2)
    assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
