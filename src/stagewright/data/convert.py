"""Behind `stagewright data convert`: folder ⇄ OFRecord ⇄ tar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from stagewright.data.source import Dataset
from stagewright.data.writing import IMAGES_PER_FILE, Format, Sample, numbered_classes, write_images
from stagewright.errors import UsageError


def convert(
    dataset: Dataset,
    directory: Path,
    format: Format,
    *,
    images_per_file: int = IMAGES_PER_FILE,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Writes the dataset's images, byte for byte and in order, in another format, and gives their number.

    `progress` is called with the number of images read so far.
    """
    class_names = dataset.class_names or numbered_classes(dataset.num_classes)
    return write_images(
        directory,
        _samples(dataset, progress),
        format,
        class_names=class_names,
        images_per_file=images_per_file,
    )


def _samples(dataset: Dataset, progress: Callable[[int], None] | None) -> Iterator[Sample]:
    """The image file and label of every row."""
    for index in range(len(dataset)):
        encoded = dataset.encoded(index)
        if not isinstance(encoded, bytes):
            raise UsageError("synthetic images have no files to convert", "see `stagewright data make`")
        yield encoded, dataset.label(index)
        if progress is not None:
            progress(index + 1)
