"""Small images for the tests of this folder."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stagewright.data.records import write_images

Encode = Callable[..., bytes]


def waves(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A smooth coloured picture, the same for the same seed."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [np.sin(x / (9 + 3 * c + seed % 5)) + np.cos(y / (7 + 2 * c) + seed + c) for c in range(3)]
    return ((np.stack(planes, axis=-1) + 2) * 63).astype(np.uint8)


@pytest.fixture
def picture() -> Callable[..., np.ndarray]:
    return waves


@pytest.fixture
def encode() -> Encode:
    """Pixels or a size to the bytes of an image file."""

    def encoded(height: int = 48, width: int = 64, seed: int = 0, format: str = "JPEG", **options: object) -> bytes:
        stream = io.BytesIO()
        mode = str(options.pop("mode", "RGB"))
        Image.fromarray(waves(height, width, seed)).convert(mode).save(stream, format, **options)
        return stream.getvalue()

    return encoded


@pytest.fixture
def numbered(tmp_path: Path, encode: Encode) -> Callable[..., Path]:
    """A directory of `num` images whose labels are their numbers, so that a label tells which image was seen."""

    def written(num: int, format: str = "ofrecord", images_per_file: int = 10) -> Path:
        directory = tmp_path / f"numbered-{format}-{num}"
        samples = ((encode(24, 32, number), number) for number in range(num))
        names = tuple(f"{number:04d}" for number in range(num))
        write_images(directory, samples, format, class_names=names, images_per_file=images_per_file)
        return directory

    return written
