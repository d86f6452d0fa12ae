"""Opens a directory of labelled images, whichever way they are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from stagewright.data.records import decode_image, scan_part, scan_shard
from stagewright.data.source import (
    IMAGE_SUFFIXES,
    MAX_RECORD_BYTES,
    WHOLE_FILE,
    Dataset,
    Faults,
    OnCorrupt,
    need,
    read_class_names,
)
from stagewright.errors import DataError


def open_dataset(path: str | Path, *, on_corrupt: OnCorrupt = "stop") -> Dataset:
    """The dataset in a directory.

    part-00000 …    OFRecord          *.tar        WebDataset shards          cat/ dog/ …    image folders
    """
    directory, faults = Path(path), Faults(on_corrupt)
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory", "give a directory of images, or the word synthetic")
    found = _open_directory(directory, read_class_names(directory), faults)
    if len(found) == 0:
        raise DataError(f"{directory} holds no image ({len(faults.found)} skipped)", "see `stagewright data make`")
    return replace(found, faults=tuple(faults.found))


def _open_directory(directory: Path, class_names: tuple[str, ...], faults: Faults) -> Dataset:
    children = sorted(directory.iterdir())
    if any(path.name.startswith("part-") for path in children):
        need(f"{directory}, which holds OFRecord parts,", "google.protobuf")
        parts = [path.name for path in children if re.fullmatch(r"part-\d+", path.name) and path.is_file()]
        parts.sort(key=lambda name: (int(name.removeprefix("part-")), name))
        scan = partial(scan_part, faults=faults)
        found = replace(_of_files(directory, parts, scan, class_names), decode=decode_image)
        return _whole_records(found, faults) if faults.on_corrupt == "skip" else found
    if shards := [path.name for path in children if path.suffix == ".tar" and path.is_file()]:
        return _of_files(directory, shards, partial(scan_shard, faults=faults, class_names=class_names), class_names)
    if folders := tuple(path.name for path in children if path.is_dir() and not path.name.startswith(".")):
        return _of_folders(directory, class_names or folders, faults)
    raise DataError(
        f"{directory} holds neither part-00000 …, nor .tar files, nor a folder for every class",
        "make a small set with `stagewright data make`",
    )


def _of_files(
    directory: Path, files: Sequence[str], scan: Callable[[Path], list[tuple[int, int, int]]], names: tuple[str, ...]
) -> Dataset:
    """The records of some files in which `scan` finds their offset, size and label."""
    found = [
        (file, offset, size, number, label)
        for file, name in enumerate(files)
        for number, (offset, size, label) in enumerate(scan(directory / name))
    ]
    return _dataset(directory, files, found, names)


def _of_folders(directory: Path, class_names: tuple[str, ...], faults: Faults) -> Dataset:
    """The images of one folder a class, sorted by name within each."""
    files: list[str] = []
    found: list[tuple[int, ...]] = []
    for label, name in enumerate(class_names):
        for image, size in _images(directory / name, faults):
            found.append((len(files), 0, size, WHOLE_FILE, label))
            files.append(f"{name}/{image}")
    return _dataset(directory, files, found, class_names)


def _dataset(
    directory: Path, files: Sequence[str], found: Sequence[tuple[int, ...]], class_names: tuple[str, ...]
) -> Dataset:
    """The dataset of (file, offset, size, number, label) rows."""
    table = np.array(found, dtype=np.int64).reshape(-1, 5)
    rows, labels = table[:, :4], table[:, 4]
    return Dataset(directory=directory, files=tuple(files), rows=rows, labels=labels, class_names=class_names)


def _whole_records(dataset: Dataset, faults: Faults) -> Dataset:
    """The records that can be read, with a fault for each of the others."""
    whole = []
    for index in range(len(dataset)):
        with faults.kept():
            dataset.encoded(index)
            whole.append(index)
    return replace(dataset, rows=dataset.rows[whole], labels=dataset.labels[whole])


def _images(folder: Path, faults: Faults) -> Iterator[tuple[str, int]]:
    """Name and size of the images in one class's folder; empty files and very large ones are faults."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder, but classes.txt names it", "add it, or take out its line")
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file():
            size = path.stat().st_size
            with faults.kept():
                if size == 0:
                    raise DataError(f"{path} is empty", "fetch it again, or skip with on_corrupt='skip'")
                if size > MAX_RECORD_BYTES:
                    raise DataError(f"{path} has more than the {MAX_RECORD_BYTES:,} bytes allowed")
                yield path.name, size
