"""What a dataset is: labelled images by index, with a place in some file for every one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagewright.errors import DataError, UsageError

Indices: TypeAlias = NDArray[np.int64]
Pixels: TypeAlias = NDArray[np.uint8]
OnCorrupt: TypeAlias = Literal["stop", "skip"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
CLASS_NAMES_FILE = "classes.txt"
MAX_RECORD_BYTES = 1 << 28


class Dataset(Protocol):
    """Labelled images by index; `label` never decodes an image."""

    @property
    def num_classes(self) -> int: ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' names in the order of their labels, or () where none are known."""

    @property
    def file_starts(self) -> tuple[int, ...]:
        """The first index in every file, or () where rows do not share files."""

    @property
    def faults(self) -> tuple[str, ...]:
        """One sentence for every record that was skipped."""

    def __len__(self) -> int: ...

    def label(self, index: int) -> int: ...

    def encoded(self, index: int) -> bytes:
        """The image file's bytes."""

    def where(self, index: int) -> str:
        """Where the image lies: file, offset and record number."""


@dataclass
class Faults:
    """Stops at the first fault, or keeps a sentence for each and goes on."""

    on_corrupt: OnCorrupt = "stop"
    found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.on_corrupt not in ("stop", "skip"):
            raise UsageError(f"on_corrupt is {self.on_corrupt!r}", "give stop or skip")

    def report(self, fault: DataError) -> None:
        """Keeps the fault where faults are skipped, raises it otherwise."""
        if self.on_corrupt == "stop":
            raise fault
        self.found.append(fault.what)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Reports the fault that ends what is done inside."""
        try:
            yield
        except DataError as fault:
            self.report(fault)


@dataclass(frozen=True)
class Extents:
    """Where the records lie: a row (file, offset, size, number) for each, its file by its index in `paths`."""

    paths: tuple[Path, ...]
    rows: Indices

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> bytes:
        """The bytes of one record; the file is opened for it alone, so threads share nothing."""
        file, offset, size, _ = self.rows[index].tolist()
        try:
            with self.paths[file].open("rb", buffering=0) as stream:
                stream.seek(offset)
                data: bytes = stream.read(size)
        except OSError as error:
            raise DataError(f"{self.where(index)}: {error.strerror}") from error
        if len(data) != size:
            raise DataError(
                f"{self.where(index)} has {len(data)} of its {size} bytes",
                "the file was shortened since it was opened: fetch it again",
            )
        return data

    def where(self, index: int) -> str:
        file, offset, _, number = self.rows[index].tolist()
        return place(self.paths[file], offset, number)

    def file_starts(self) -> tuple[int, ...]:
        """The first index of every file that holds any record."""
        return tuple(np.unique(self.rows[:, 0], return_index=True)[1].tolist())

    def keep(self, kept: Indices) -> Extents:
        """Only the records at these indices."""
        return Extents(self.paths, self.rows[kept])


def make_extents(paths: tuple[Path, ...], rows: list[tuple[int, int, int, int]]) -> Extents:
    """Extents from (file, offset, size, number) rows."""
    return Extents(paths, np.array(rows, dtype=np.int64).reshape(-1, 4))


@contextmanager
def writing_whole(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when the file is whole."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    yield unfinished
    unfinished.replace(path)


def place(path: Path, offset: int, number: int) -> str:
    """`part-00003, record 17 at byte 52,113`, with the path as it was given."""
    return f"{path}, record {number} at byte {offset:,}"


def checked_label(value: Any, where: str, class_names: tuple[str, ...]) -> int:
    """The label as an int from 0 to the last class (or to a million, where the classes are not known)."""
    limit = len(class_names) or 1 << 20
    if not 0 <= value < limit:
        raise DataError(
            f"{where} has the label {value}; labels run from 0 to {limit - 1}",
            "name all classes in classes.txt, or skip such records with on_corrupt='skip'",
        )
    return int(value)


def read_class_names(directory: Path) -> tuple[str, ...]:
    """The names in the directory's classes.txt, one a line in the order of the labels; () where there is none."""
    path = directory / CLASS_NAMES_FILE
    if not path.exists():
        return ()
    try:
        names = tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for name in names:
        check_class_name(name, path)
    if len(set(names)) != len(names):
        raise DataError(f"{path} names a class twice", "give every class its own line")
    return names


def check_class_name(name: str, origin: Path) -> None:
    """Refuses a name that would not stay one folder inside the folder it is written to."""
    if name in ("", ".", "..") or name.startswith(".") or any(char in name for char in "/\\\0\n\r"):
        raise DataError(
            f"{origin} names a class {name!r}, which cannot be a folder",
            "use names without slashes that do not begin with a dot",
        )


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
