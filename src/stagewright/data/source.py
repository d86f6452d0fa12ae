"""What a dataset is: labelled images by index, each a stretch of some file; and the one that a directory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import DataError, UsageError

Indices: TypeAlias = NDArray[np.int64]
Pixels: TypeAlias = NDArray[np.uint8]
OnCorrupt: TypeAlias = Literal["stop", "skip"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_CLASS_NAMES_FILE = "classes.txt"
MAX_RECORD_BYTES = 1 << 28
WHOLE_FILE = -1
"""The number of a record that is a file of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Labelled images by index, each at a place in some file."""

    directory: Path
    files: tuple[str, ...]
    """Within the directory."""
    rows: Indices
    """File, offset, size and number within its file of each record."""
    labels: Indices
    """−1 where a label is still to be read from its record."""
    class_names: tuple[str, ...] = ()
    """In the order of their labels; () where none are known."""
    faults: tuple[str, ...] = ()
    """One sentence for every record that was skipped."""
    decode: Callable[[bytes], tuple[bytes, int]] | None = None
    """What a record holds: an image file and its label; None where it is the image file."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_classes(self) -> int:
        """As classes.txt has it; else one more than the largest label, for which all records may have to be read."""
        if self.class_names:
            return len(self.class_names)
        for index in np.flatnonzero(self.labels < 0).tolist():
            self.encoded(index)
        return 1 + int(self.labels.max(initial=-1))

    @property
    def file_starts(self) -> tuple[int, ...]:
        """The first index in every file, or () where images have files of their own."""
        if WHOLE_FILE in self.rows[:1, 3]:
            return ()
        return tuple(np.unique(self.rows[:, 0], return_index=True)[1].tolist())

    def label(self, index: int) -> int:
        """The image's label; no image is decoded for it."""
        if self.labels[index] < 0:
            self.encoded(index)
        return int(self.labels[index])

    def encoded(self, index: int) -> bytes:
        """The image file's bytes."""
        record = self._read(index)
        if self.decode is None:
            return record
        try:
            encoded, label = self.decode(record)
        except DataError as error:
            raise DataError(f"{self.where(index)} {error.what}", error.todo) from error
        self.labels[index] = checked_label(label, self.where(index), self.class_names)
        return encoded

    def where(self, index: int) -> str:
        """Where the image lies: file, offset and record number."""
        file, offset, _, number = self.rows[index].tolist()
        return place(self.directory / self.files[file], offset, number)

    def _read(self, index: int) -> bytes:
        """The bytes of one record; the file is opened for it alone, so threads share nothing."""
        file, offset, size, _ = self.rows[index].tolist()
        try:
            with (self.directory / self.files[file]).open("rb", buffering=0) as stream:
                stream.seek(offset)
                data = bytes(stream.read(size))
        except OSError as error:
            raise DataError(f"{self.where(index)}: {error.strerror}") from error
        if len(data) != size:
            raise DataError(
                f"{self.where(index)} has {len(data)} of its {size} bytes",
                "the file was shortened since it was opened: fetch it again",
            )
        return data


@dataclass
class Faults:
    """Stops at the first fault, or keeps a sentence for each and goes on."""

    on_corrupt: OnCorrupt = "stop"
    found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.on_corrupt not in ("stop", "skip"):
            raise UsageError(f"on_corrupt is {self.on_corrupt!r}", "give stop or skip")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps the fault that ends what is done inside, where faults are skipped."""
        try:
            yield
        except DataError as fault:
            if self.on_corrupt == "stop":
                raise
            self.found.append(fault.what)


def place(path: Path, offset: int, number: int) -> str:
    """`part-00003, record 17 at byte 52,113`, with the path as it was given."""
    return str(path) if number == WHOLE_FILE else f"{path}, record {number} at byte {offset:,}"


def checked_label(value: int, where: str, class_names: tuple[str, ...]) -> int:
    """The label, if it runs from 0 to the last class (or to a million, where the classes are not known)."""
    limit = len(class_names) or 1 << 20
    if not 0 <= value < limit:
        raise DataError(
            f"{where} has the label {value}; labels run from 0 to {limit - 1}",
            "name all classes in classes.txt, or skip such records with on_corrupt='skip'",
        )
    return int(value)


# ── names of classes ────────────────────────────────────────────────────────────────────────────────────


def read_class_names(directory: Path) -> tuple[str, ...]:
    """The names in the directory's classes.txt, one a line in the order of the labels; () where there is none."""
    path = directory / _CLASS_NAMES_FILE
    if not path.exists():
        return ()
    try:
        names = tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    _check_class_names(names, path)
    return names


def save_class_names(directory: Path, names: Sequence[str]) -> None:
    """Writes the directory's classes.txt, if the classes have names."""
    _check_class_names(tuple(names), directory)
    if names:
        (directory / _CLASS_NAMES_FILE).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


def _check_class_names(names: tuple[str, ...], origin: Path) -> None:
    """Refuses names that are given twice, or would not stay one folder inside the folder they are written to."""
    for name in names:
        if name in ("", ".", "..") or name.startswith(".") or any(char in name for char in "/\\\0\n\r"):
            raise DataError(
                f"{origin} names a class {name!r}, which cannot be a folder",
                "use names without slashes that do not begin with a dot",
            )
    if len(set(names)) != len(names):
        raise DataError(f"{origin} names a class twice", "give every class its own line")


# ── packages ────────────────────────────────────────────────────────────────────────────────────────────


def need(what: str, *modules: str) -> None:
    """Refuses what needs packages that are not installed, before any of it is done."""
    package_of = {"PIL": "Pillow", "google.protobuf": "protobuf"}
    lacking = [module for module in modules if not is_there(module)]
    if lacking:
        names = [package_of.get(module, module) for module in lacking]
        source = "'stagewright[data]'" if set(lacking) <= package_of.keys() else " ".join(names)
        raise UsageError(f"{what} needs {' and '.join(names)}, which is not installed", f"pip install {source}")


def is_there(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return find_spec(module) is not None
    except ImportError:  # its parent is missing
        return False
