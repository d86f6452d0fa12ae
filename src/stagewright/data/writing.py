"""Labelled images into files: class folders, OFRecord parts or tar shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from stagewright.data.source import CLASS_NAMES_FILE, Dataset, check_class_name, need
from stagewright.data.tar import write_shard
from stagewright.errors import DataError, UsageError

Format: TypeAlias = Literal["folder", "ofrecord", "tar"]
Sample: TypeAlias = tuple[bytes, int]
IMAGES_PER_FILE = 1000
_SIGNATURES = ((b"\xff\xd8", ".jpg"), (b"\x89PNG", ".png"), (b"RIFF", ".webp"), (b"BM", ".bmp"))


def write_images(
    directory: Path,
    samples: Iterable[Sample],
    format: Format,
    *,
    class_names: Sequence[str] = (),
    images_per_file: int = IMAGES_PER_FILE,
) -> int:
    """Writes the (image file, label) samples to a new directory and gives their number.

    folder    cat/00000000.jpg …          labels are the order of classes.txt
    ofrecord  part-00000 …                tar    00000.tar …
    """
    check_format(format)
    if images_per_file < 1:
        raise UsageError(f"{images_per_file} images a file cannot be", "give 1 or more")
    _make_empty(directory)
    for name in class_names:
        check_class_name(name, directory)
    if class_names:
        (directory / CLASS_NAMES_FILE).write_text("".join(f"{name}\n" for name in class_names), encoding="utf-8")
    if format == "folder":
        return _write_folders(directory, samples, class_names)
    return _write_files(directory, samples, format, images_per_file)


def check_format(format: str) -> None:
    """Refuses a --format that is unknown, or whose package is not installed."""
    if format not in get_args(Format):
        raise UsageError(f"--format is {format!r}: expected one of {', '.join(get_args(Format))}")
    if format == "ofrecord":
        need(f"--format {format}", "google.protobuf")


def _numbered_classes(num_classes: int) -> tuple[str, ...]:
    """`000`, `001` …: names for classes without, in the order of their labels when sorted."""
    digits = max(3, len(str(num_classes - 1)))
    return tuple(f"{label:0{digits}d}" for label in range(num_classes))


def _image_suffix(encoded: bytes) -> str:
    """`.jpg` and the like, by how the file begins."""
    return next((suffix for signature, suffix in _SIGNATURES if encoded.startswith(signature)), ".jpg")


def _make_empty(directory: Path) -> None:
    """Makes the directory; one that already holds something is left alone."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DataError(f"{directory} is there already and not an empty directory", "name a new one")
    directory.mkdir(parents=True, exist_ok=True)


def _write_folders(directory: Path, samples: Iterable[Sample], class_names: Sequence[str]) -> int:
    """One subfolder a class, images numbered; no name comes from where the images came from."""
    if not class_names:
        raise UsageError("image folders need names for the classes", "give class_names")
    for name in class_names:
        (directory / name).mkdir()
    num_images = 0
    for encoded, label in samples:
        path = directory / class_names[label] / f"{num_images:08d}{_image_suffix(encoded)}"
        path.write_bytes(encoded)
        num_images += 1
    return num_images


def _write_files(directory: Path, samples: Iterable[Sample], format: Format, images_per_file: int) -> int:
    """Parts or shards of so many images each."""
    num_images = 0
    for file, some in enumerate(_groups(samples, images_per_file)):
        num_images += _WRITERS[format](directory, file, some, num_images)
    return num_images


def _write_part(directory: Path, file: int, samples: Iterable[Sample], first: int) -> int:
    """One OFRecord part; the number of its images."""
    from stagewright.data.ofrecord import encode_image, write_part  # needs protobuf

    return write_part(directory / f"part-{file:05d}", (encode_image(encoded, label) for encoded, label in samples))


def _write_shard(directory: Path, file: int, samples: Iterable[Sample], first: int) -> int:
    """One tar shard, its images numbered from the first; the number of them."""
    keyed = enumerate(samples, start=first)
    shard = ((f"{key:08d}", _image_suffix(encoded), encoded, label) for key, (encoded, label) in keyed)
    return write_shard(directory / f"{file:05d}.tar", shard)


_WRITERS: Mapping[Format, Callable[[Path, int, Iterable[Sample], int], int]] = {
    "ofrecord": _write_part, "tar": _write_shard,
}  # fmt: skip
"""What writes a file of each format that has several images in one."""


def _groups(samples: Iterable[Sample], size: int) -> Iterator[Iterator[Sample]]:
    """The samples in runs of `size`; none is empty, and only one sample is held at a time."""
    left = iter(samples)
    for first in left:
        yield chain([first], islice(left, size - 1))


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
    class_names = dataset.class_names or _numbered_classes(dataset.num_classes)
    return write_images(
        directory, _samples_of(dataset, progress), format, class_names=class_names, images_per_file=images_per_file
    )


def _samples_of(dataset: Dataset, progress: Callable[[int], None] | None) -> Iterator[Sample]:
    """The image file and label of every row."""
    for index in range(len(dataset)):
        yield dataset.encoded(index), dataset.label(index)
        if progress is not None:
            progress(index + 1)
