"""Behind `stagewright data make`: a small set of coloured shapes that a small network learns.

class k   shape k mod 6, hue k mod 8 (48 pairs that all differ in 24), then another ground
image     the shape somewhere, of some size and brightness, over a noisy grey ground; deterministic by (seed, number)
"""

from __future__ import annotations

import colorsys
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stagewright.data.order import draw_uniform
from stagewright.data.records import IMAGES_PER_FILE, Format, write_images
from stagewright.data.source import Pixels
from stagewright.errors import UsageError

_SHAPES = ("disc", "square", "ring", "plus", "bars", "diamond")
_HUES = ("red", "orange", "green", "teal", "azure", "blue", "violet", "pink")
_HUE_DEGREES = (0, 35, 110, 165, 200, 235, 275, 320)
_GROUNDS = ("plain", "streaked", "banded")
_MAX_CLASSES = len(_SHAPES) * len(_HUES) * len(_GROUNDS)


def make_images(
    directory: Path,
    num_classes: int = 10,
    num_images: int = 2000,
    size: int = 64,
    format: Format = "folder",
    seed: int = 0,
    *,
    quality: int = 90,
    images_per_file: int = IMAGES_PER_FILE,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Writes `num_images` JPEGs of `size` × `size` pixels, as many of every class, and gives their number."""
    if not 1 <= num_classes <= _MAX_CLASSES:
        raise UsageError(f"{num_classes} classes cannot be drawn", f"give 1 to {_MAX_CLASSES}")
    if num_images < 1 or not 8 <= size <= 4096:
        raise UsageError(f"{num_images} images of {size} pixels cannot be", "give 1 or more, of 8 to 4096 pixels")

    def drawn() -> Iterator[tuple[bytes, int]]:
        """JPEG files with their labels, the classes in turn."""
        for number in range(num_images):
            stream = io.BytesIO()
            Image.fromarray(_draw_image(number % num_classes, number, size, seed)).save(stream, "JPEG", quality=quality)
            yield stream.getvalue(), number % num_classes
            if progress is not None:
                progress(number + 1)

    names = tuple(f"{label:03d}-{'-'.join(_class_look(label))}" for label in range(num_classes))
    return write_images(directory, drawn(), format, class_names=names, images_per_file=images_per_file)


def _class_look(label: int) -> tuple[str, str, str]:
    """Ground, hue and shape of a class; all differ, and neighbours differ in both hue and shape."""
    pair = label % (len(_SHAPES) * len(_HUES))
    shape = (pair + pair // 24) % len(_SHAPES)  # 6 and 8 meet again after 24: shift the shapes by one there
    ground = _GROUNDS[label // (len(_SHAPES) * len(_HUES))]
    return ground, _HUES[pair % len(_HUES)], _SHAPES[shape]


def _draw_image(label: int, number: int, size: int, seed: int) -> Pixels:
    """Image `number` of the set, of class `label`, as pixels (size, size, 3)."""
    ground, hue, shape = _class_look(label)
    across, down, scale, value, tint, slant, light, _ = draw_uniform(seed, number, num=8)[0]
    radius = 0.28 + 0.14 * scale
    grid = (np.arange(size) + 0.5) / size
    x = grid[None, :] - (radius + (1 - 2 * radius) * across)
    y = grid[:, None] - (radius + (1 - 2 * radius) * down)
    inside = _inside(shape, x / radius, y / radius)[:, :, None]
    degrees = _HUE_DEGREES[_HUES.index(hue)] + 12 * (tint - 0.5)
    colour = np.array(colorsys.hsv_to_rgb(degrees / 360 % 1, 0.8, 0.65 + 0.35 * value))
    along = grid[None, :] if ground == "streaked" else grid[:, None]
    waves = 1 + (0.0 if ground == "plain" else 0.4) * np.sin(2 * np.pi * (8 * along + slant))
    back = (0.35 + 0.3 * light) * np.broadcast_to(waves, (size, size))[:, :, None]
    noise = draw_uniform(seed, number, 1, num=size * size * 3).reshape(size, size, 3) - 0.5
    pixels: Pixels = (255 * np.clip(np.where(inside, colour, back) + 0.12 * noise, 0, 1)).astype(np.uint8)
    return pixels


def _inside(shape: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which points of the unit square around 0 belong to the shape; all shapes are mirror images of themselves."""
    far = np.hypot(x, y)
    box = np.maximum(abs(x), abs(y))
    masks: dict[str, NDArray[np.bool_]] = {
        "disc": far < 1, "square": box < 0.85, "diamond": abs(x) + abs(y) < 1.1, "ring": (far < 1) & (far > 0.55),
        "plus": (box < 1) & (np.minimum(abs(x), abs(y)) < 0.3),
        "bars": (box < 1) & (np.floor((y + 1) * 2.5) % 2 == 0),
    }  # fmt: skip
    return masks[shape]
