"""Behind `stagewright data inspect`: what a dataset holds, and a contact sheet of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from stagewright.data.pixels import EvalTransform, image_shape, read_crop
from stagewright.data.source import Dataset
from stagewright.errors import DataError


@dataclass(frozen=True)
class Spread:
    """The smallest, the median and the largest of some numbers."""

    smallest: int
    median: int
    largest: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was found: counts a class in the order of the labels, sizes, and one sentence a fault."""

    num_images: int
    num_classes: int
    class_names: tuple[str, ...]
    class_counts: tuple[int, ...]
    total_bytes: int
    image_bytes: Spread
    heights: Spread
    widths: Spread
    faults: tuple[str, ...]


def inspect_dataset(dataset: Dataset, *, progress: Callable[[int], None] | None = None) -> Inspection:
    """Reads every record and every image's header, and counts; what cannot be read becomes a fault."""
    labels: Counter[int] = Counter()
    sizes: list[tuple[int, int, int]] = []
    faults = list(dataset.faults)
    for index in range(len(dataset)):
        try:
            encoded = dataset.encoded(index)
            sizes.append((len(encoded), *image_shape(encoded)))
            labels[dataset.label(index)] += 1
        except DataError as error:
            where = dataset.where(index)
            faults.append(error.what if error.what.startswith(where) else f"{where} {error.what}")
        if progress is not None:
            progress(index + 1)
    if not sizes:
        raise DataError(f"none of {len(dataset)} images can be read; the first fault: {faults[0]}")
    num_classes = max(len(dataset.class_names), 1 + max(labels))
    spreads = [Spread(min(column), int(np.median(column)), max(column)) for column in zip(*sizes)]
    return Inspection(
        num_images=len(sizes), num_classes=num_classes, class_names=dataset.class_names,
        class_counts=tuple(labels[label] for label in range(num_classes)),
        total_bytes=sum(size for size, _, _ in sizes), image_bytes=spreads[0], heights=spreads[1], widths=spreads[2],
        faults=tuple(faults),
    )  # fmt: skip


def save_contact_sheet(
    dataset: Dataset, path: Path, *, num_columns: int = 8, num_rows: int = 6, side: int = 112, caption: int = 14
) -> int:
    """Saves a PNG of images taken evenly from the whole dataset under their labels, and gives their number."""
    shown = np.unique(np.linspace(0, len(dataset) - 1, num_columns * num_rows).astype(int)).tolist()
    sheet = Image.new("RGB", (num_columns * side, -(-len(shown) // num_columns) * (side + caption)), "white")
    pen = ImageDraw.Draw(sheet)
    for place, index in enumerate(shown):
        corner = (place % num_columns * side, place // num_columns * (side + caption))
        picture, words = _shown(dataset, index, side)
        sheet.paste(picture, (corner[0], corner[1] + caption))
        pen.text((corner[0] + 2, corner[1] + 1), words[: side // 6], fill="black")
    sheet.save(path, "PNG")
    return len(shown)


def _shown(dataset: Dataset, index: int, side: int) -> tuple[Image.Image, str]:
    """One image's middle with its class; a grey square where it cannot be read."""
    middle = partial(EvalTransform(size=side, shorter=side).crop, draws=())
    try:
        pixels = read_crop(dataset.encoded(index), middle, side)
        label = dataset.label(index)
    except DataError:
        return Image.new("RGB", (side, side), "grey"), "unreadable"
    return Image.fromarray(pixels), dataset.class_names[label] if dataset.class_names else str(label)
