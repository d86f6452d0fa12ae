"""WebDataset shards: tar files in which `key.jpg` and `key.cls` (the label in digits) are one labelled image."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from stagewright.data.source import (
    IMAGE_SUFFIXES,
    MAX_RECORD_BYTES,
    Faults,
    Indices,
    OnCorrupt,
    checked_label,
    make_extents,
    place,
    read_class_names,
)
from stagewright.errors import DataError

_Row = tuple[int, int, int]  # offset, size, label
_MAX_LABEL_BYTES = 20
_BAD_ARCHIVE = (
    tarfile.TarError,
    EOFError,
    OverflowError,
    RecursionError,
    UnicodeError,
    ValueError,
    IndexError,
    KeyError,
)


class TarShards:
    """The labelled images of the tar files in one directory, by index.

    Opening reads all headers and labels, and no image; names in the archive are never used as paths.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_corrupt: OnCorrupt = "stop",
        num_classes: int | None = None,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self.class_names = read_class_names(directory)
        given = num_classes or len(self.class_names) or None
        faults = Faults(on_corrupt)
        paths = shard_paths(directory)
        rows, labels = [], []
        for file, path in enumerate(paths):
            for number, (offset, size, label) in enumerate(_scan_shard(path, faults, given, max_record_bytes)):
                rows.append((file, offset, size, number))
                labels.append(label)
        self._extents = make_extents(paths, rows)
        self._labels: Indices = np.array(labels, dtype=np.int64)
        self.num_classes = given or 1 + max(labels, default=-1)
        self.file_starts = self._extents.file_starts()
        self.faults = tuple(faults.found)

    def __len__(self) -> int:
        return len(self._extents)

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def encoded(self, index: int) -> bytes:
        return self._extents.read(index)

    def where(self, index: int) -> str:
        return self._extents.where(index)


def shard_paths(directory: Path) -> tuple[Path, ...]:
    """The directory's tar files in the order of their names."""
    return tuple(sorted(path for path in directory.glob("*.tar") if path.is_file()))


def _scan_shard(path: Path, faults: Faults, num_classes: int | None, max_record_bytes: int) -> Iterator[_Row]:
    """Offset and size of every image with its label; what is missing or damaged goes to `faults`."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for number, member in enumerate(_members(archive, path)):
                try:
                    _sort_member(archive, member, path, number, images, labels, num_classes, max_record_bytes)
                except DataError as fault:
                    faults.report(fault)
    except DataError as fault:
        faults.report(fault)
    except (*_BAD_ARCHIVE, OSError) as error:
        faults.report(
            DataError(f"{path} is not a tar file: {error}", "fetch the file again; only plain .tar can be read")
        )
    for key in sorted(images.keys() ^ labels.keys()):
        missing = "label, key.cls" if key in images else "image, key.jpg"
        faults.report(DataError(f"{path}: {key!r} has no {missing}", "add it, or skip with on_corrupt='skip'"))
    return ((*images[key], labels[key]) for key in images if key in labels)


def _members(archive: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    """The files of the archive, in order; a size that leads backwards or past the end is an error, not a loop."""
    end_bytes = path.stat().st_size
    offset, number = 0, 0
    while (member := _next_member(archive, path, offset, number)) is not None:
        past = member.offset_data + max(0, member.size)
        if member.size < 0 or member.offset < offset or (member.isreg() and past > end_bytes):
            raise DataError(
                f"{place(path, member.offset, number)} has the size {member.size:,}, the file {end_bytes:,} bytes",
                "fetch the file again, or go on without the rest with on_corrupt='skip'",
            )
        if member.isreg():
            yield member
        offset = max(offset + tarfile.BLOCKSIZE, archive.offset)
        number += 1


def _next_member(archive: tarfile.TarFile, path: Path, offset: int, number: int) -> tarfile.TarInfo | None:
    """The next header, or None at the archive's end; tarfile takes a damaged header for the end, this does not."""
    try:
        member = archive.next()
    except (*_BAD_ARCHIVE, OSError) as error:
        raise DataError(
            f"{place(path, offset, number)} has a damaged header: {error}", "fetch the file again"
        ) from error
    if member is None:
        with path.open("rb") as stream:
            stream.seek(offset)
            block = stream.read(tarfile.BLOCKSIZE)
        if block.strip(b"\0"):
            raise DataError(f"{place(path, offset, number)} has a damaged header", "fetch the file again")
    return member


def _sort_member(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    path: Path,
    number: int,
    images: dict[str, tuple[int, int]],
    labels: dict[str, int],
    num_classes: int | None,
    max_record_bytes: int,
) -> None:
    """Puts one file of the archive among the images or the labels, by its suffix; others are left alone."""
    folder, _, name = member.name.rpartition("/")
    stem, _, suffix = name.partition(".")
    key, where = f"{folder}/{stem}", place(path, member.offset_data, number)
    if suffix.lower() == "cls":
        labels[key] = _read_label(archive, member, where, num_classes)
    elif f".{suffix.lower()}" in IMAGE_SUFFIXES:
        if member.size > max_record_bytes:
            raise DataError(f"{where} has {member.size:,} bytes, more than the {max_record_bytes:,} allowed")
        if key in images:
            raise DataError(f"{where}: the key {key!r} has a second image", "give every image its own key")
        images[key] = (member.offset_data, member.size)


def _read_label(archive: tarfile.TarFile, member: tarfile.TarInfo, where: str, num_classes: int | None) -> int:
    """The digits of one `key.cls`."""
    if member.size > _MAX_LABEL_BYTES:
        raise DataError(f"{where} has a label of {member.size:,} bytes; it should be a number in digits")
    stream = archive.extractfile(member)
    text = b"" if stream is None else stream.read(_MAX_LABEL_BYTES)
    if not text.strip().isdigit():
        raise DataError(f"{where} has the label {text!r}; it should be a number in digits")
    return checked_label(int(text), where, num_classes)


def write_shard(path: Path, samples: Iterable[tuple[str, str, bytes, int]]) -> int:
    """Writes (key, suffix, image, label) samples as one shard and gives their number; the same bytes every time."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    num_samples = 0
    with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as archive:
        for key, suffix, encoded, label in samples:
            for name, data in ((f"{key}{suffix}", encoded), (f"{key}.cls", str(label).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            num_samples += 1
    unfinished.replace(path)
    return num_samples
