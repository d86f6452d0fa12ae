"""Images that tell who they are: a grey of their own number, which no crop or mirror changes, and that label too."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from stagewright.data.pixels import IMAGENET_MEAN, IMAGENET_STD
from stagewright.data.records import _numbered_classes, write_images

SIZE = 16


def write_numbered(directory: Path, num: int) -> Path:
    """Writes images 0 … num − 1, at most 250, in files of 7."""
    write_images(
        directory, ((grey(number), number) for number in range(num)), "ofrecord",
        class_names=_numbered_classes(num), images_per_file=7,
    )  # fmt: skip
    return directory


def grey(number: int) -> bytes:
    """The image of a number, as a file that keeps its pixels."""
    stream = io.BytesIO()
    Image.fromarray(np.full((SIZE, SIZE, 3), number, dtype=np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def numbers_of(images: torch.Tensor) -> list[int]:
    """Which images these are, from their pixels."""
    values = images[:, 0].mean(dim=(1, 2)) * IMAGENET_STD[0] + IMAGENET_MEAN[0]
    return [round(value) for value in (values * 255).tolist()]
