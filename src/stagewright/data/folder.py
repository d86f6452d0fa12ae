"""Image folders: one subfolder a class, labels in the order of the subfolders' names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stagewright.data.source import IMAGE_SUFFIXES, MAX_RECORD_BYTES, Faults, Indices, OnCorrupt, read_class_names
from stagewright.errors import DataError


class ImageFolder:
    """The images of the subfolders of one directory, by index; classes.txt, if it is there, orders the classes."""

    file_starts: tuple[int, ...] = ()

    def __init__(self, directory: Path, *, on_corrupt: OnCorrupt = "stop") -> None:
        self._directory = directory
        self.class_names = read_class_names(directory) or class_folders(directory)
        faults = Faults(on_corrupt)
        found = [self._images(name, faults) for name in self.class_names]
        self._names = [name for names in found for name in names]
        self._labels: Indices = np.repeat(np.arange(len(found)), [len(names) for names in found]).astype(np.int64)
        self.num_classes = len(self.class_names)
        self.faults = tuple(faults.found)

    def __len__(self) -> int:
        return len(self._names)

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def encoded(self, index: int) -> bytes:
        try:
            with self._path(index).open("rb", buffering=0) as stream:
                data = stream.read(MAX_RECORD_BYTES + 1)
        except OSError as error:
            raise DataError(f"{self.where(index)}: {error.strerror}") from error
        if len(data) > MAX_RECORD_BYTES:
            raise DataError(f"{self.where(index)} has more than the {MAX_RECORD_BYTES:,} bytes allowed")
        return data

    def where(self, index: int) -> str:
        return str(self._path(index))

    def _path(self, index: int) -> Path:
        return self._directory / self.class_names[self.label(index)] / self._names[index]

    def _images(self, class_name: str, faults: Faults) -> list[str]:
        """The names of the images in one class's folder, sorted; empty files are faults."""
        folder = self._directory / class_name
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder, but classes.txt names it", "add it, or take out its line")
        names = []
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file():
                if path.stat().st_size:
                    names.append(path.name)
                else:
                    faults.report(DataError(f"{path} is empty", "fetch it again, or skip with on_corrupt='skip'"))
        return names


def class_folders(directory: Path) -> tuple[str, ...]:
    """The names of the subfolders, sorted."""
    return tuple(sorted(path.name for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")))
