"""WebDataset shards: tar files in which `key.jpg` and `key.cls` (the label in digits) are one labelled image.

`tarfile` reads and writes them; what is added here is that damage is told with its place and never taken for the end.
"""

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
    writing_whole,
)
from stagewright.errors import DataError


class TarShards:
    """The labelled images of the tar files in one directory, by index.

    Opening reads all headers and labels, and no image; names in the archive are never used as paths.
    """

    def __init__(self, directory: Path, *, on_corrupt: OnCorrupt = "stop") -> None:
        self.class_names = read_class_names(directory)
        faults, paths = Faults(on_corrupt), shard_paths(directory)
        rows, labels = [], []
        for file, path in enumerate(paths):
            found = _scan_shard(path, faults, self.class_names)
            rows += [(file, offset, size, number) for number, (offset, size, _) in enumerate(found)]
            labels += [label for _, _, label in found]
        self._extents = make_extents(paths, rows)
        self._labels: Indices = np.array(labels, dtype=np.int64)
        self.num_classes = len(self.class_names) or 1 + max(labels, default=-1)
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


def _scan_shard(path: Path, faults: Faults, class_names: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """Offset, size and label of every image; what is missing or damaged goes to `faults`."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with faults.kept():
        for number, (member, content) in enumerate(_members(path)):
            folder, _, name = member.name.rpartition("/")
            stem, _, suffix = name.partition(".")
            key, where = f"{folder}/{stem}", place(path, member.offset_data, number)
            with faults.kept():
                if suffix.lower() == "cls":
                    labels[key] = _label_of(content, where, class_names)
                elif f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    _check_image(member, where, is_new=key not in images)
                    images[key] = (member.offset_data, member.size)
    for key in sorted(images.keys() ^ labels.keys()):
        missing = "label, key.cls" if key in images else "image, key.jpg"
        faults.report(DataError(f"{path}: {key!r} has no {missing}", "add it, or skip with on_corrupt='skip'"))
    return [(*images[key], labels[key]) for key in images if key in labels]


def _members(path: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """The files of the archive, in order, with the first bytes of labels.

    A size that leads backwards or past the end is an error, not a loop; so is a damaged header, where tarfile ends.
    """
    end_bytes, offset, number = path.stat().st_size, 0, 0
    try:
        with path.open("rb") as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            while (member := archive.next()) is not None:
                past = member.offset_data + max(0, member.size)
                if member.size < 0 or member.offset < offset or (member.isreg() and past > end_bytes):
                    size = f"has the size {member.size:,}, the file {end_bytes:,} bytes"
                    raise DataError(
                        f"{place(path, member.offset, number)} {size}",
                        "fetch the file again, or go on without the rest with on_corrupt='skip'",
                    )
                if member.isreg():
                    stream.seek(member.offset_data)
                    is_label = member.name.lower().endswith(".cls")
                    yield member, stream.read(min(member.size, 21)) if is_label else b""
                offset = max(offset + tarfile.BLOCKSIZE, archive.offset)
                number += 1
            stream.seek(offset)
            if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise DataError(f"{place(path, offset, number)} has a damaged header", "fetch the file again")
    except DataError:
        raise
    except Exception as error:  # what tarfile raises on damaged files has no common base
        what = f"{place(path, offset, number)} has a damaged header" if offset else f"{path} is not a tar file"
        raise DataError(f"{what}: {error}", "fetch the file again; only plain .tar can be read") from error


def _check_image(member: tarfile.TarInfo, where: str, *, is_new: bool) -> None:
    if member.size > MAX_RECORD_BYTES:
        raise DataError(f"{where} has {member.size:,} bytes, more than the {MAX_RECORD_BYTES:,} allowed")
    if not is_new:
        raise DataError(f"{where} has a second image of its key", "give every image its own key")


def _label_of(text: bytes, where: str, class_names: tuple[str, ...]) -> int:
    """The digits of one `key.cls`."""
    if len(text) > 20 or not text.strip().isdigit():
        raise DataError(f"{where} has the label {text[:20]!r}; it should be a number in digits")
    return checked_label(int(text), where, class_names)


def write_shard(path: Path, samples: Iterable[tuple[str, str, bytes, int]]) -> int:
    """Writes (key, suffix, image, label) samples as one shard and gives their number; the same bytes every time."""
    num_samples = 0
    with writing_whole(path) as unfinished, tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as archive:
        for key, suffix, encoded, label in samples:
            for name, data in ((f"{key}{suffix}", encoded), (f"{key}.cls", str(label).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            num_samples += 1
    return num_samples
