"""A path to the dataset that is there."""

from __future__ import annotations

from pathlib import Path

from stagewright.data.folder import ImageFolder, class_folders
from stagewright.data.source import Dataset, OnCorrupt, need
from stagewright.data.tar import TarShards, shard_paths
from stagewright.errors import DataError


def open_dataset(path: str | Path, *, on_corrupt: OnCorrupt = "stop") -> Dataset:
    """The dataset in a directory.

    part-00000 …    OFRecord          *.tar        WebDataset shards          cat/ dog/ …    image folders
    """
    directory = Path(path)
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory", "give a directory of images, or the word synthetic")
    found = _open_directory(directory, on_corrupt)
    if len(found) == 0:
        raise DataError(f"{directory} holds no image ({len(found.faults)} skipped)", "see `stagewright data make`")
    return found


def _open_directory(directory: Path, on_corrupt: OnCorrupt) -> Dataset:
    """The dataset whose files the directory holds."""
    if any(path.name.startswith("part-") for path in directory.iterdir()):
        need(f"{directory}, which holds OFRecord parts,", "google.protobuf")
        from stagewright.data.ofrecord import OFRecords

        return OFRecords(directory, on_corrupt=on_corrupt)
    if shard_paths(directory):
        return TarShards(directory, on_corrupt=on_corrupt)
    if class_folders(directory):
        return ImageFolder(directory, on_corrupt=on_corrupt)
    raise DataError(
        f"{directory} holds neither part-00000 …, nor .tar files, nor a folder for every class",
        "make a small set with `stagewright data make`",
    )
