"""A path, or the word `synthetic`, to the dataset that is there."""

from __future__ import annotations

from pathlib import Path

from stagewright.data.folder import ImageFolder, class_folders
from stagewright.data.needs import need
from stagewright.data.source import MAX_RECORD_BYTES, Dataset, OnCorrupt
from stagewright.data.tar import TarShards, shard_paths
from stagewright.errors import DataError


def open_dataset(
    spec: str | Path,
    *,
    on_corrupt: OnCorrupt = "stop",
    num_classes: int | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    num_images: int | None = None,
    shape: tuple[int, int, int] | None = None,
    seed: int = 0,
) -> Dataset:
    """The dataset at `spec`: a directory, or `synthetic` (for which alone num_images, shape and seed count).

    part-00000 …           OFRecord          *.tar     WebDataset shards
    cat/ dog/ …            image folders     synthetic  made, not read
    """
    if str(spec) == "synthetic":
        return _synthetic(num_images, num_classes, shape, seed)
    directory = Path(spec)
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory", "give a directory of images, or the word synthetic")
    found = _open_directory(directory, on_corrupt, num_classes, max_record_bytes)
    if len(found) == 0:
        raise DataError(f"{directory} holds no image ({len(found.faults)} skipped)", "see `stagewright data make`")
    return found


def _synthetic(
    num_images: int | None, num_classes: int | None, shape: tuple[int, int, int] | None, seed: int
) -> Dataset:
    """Hashed images, with the defaults of ImageNet's size for what is not given."""
    from stagewright.data.synthetic import SyntheticImages  # needs torch, which reading files does not

    given = {"num_images": num_images, "num_classes": num_classes, "shape": shape}
    return SyntheticImages(seed=seed, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]


def _open_directory(directory: Path, on_corrupt: OnCorrupt, num_classes: int | None, max_record_bytes: int) -> Dataset:
    """The dataset whose files the directory holds."""
    if any(path.name.startswith("part-") for path in directory.iterdir()):
        need(f"{directory}, which holds OFRecord parts,", "google.protobuf")
        from stagewright.data.ofrecord import OFRecords

        return OFRecords(directory, on_corrupt=on_corrupt, num_classes=num_classes, max_record_bytes=max_record_bytes)
    if shard_paths(directory):
        return TarShards(directory, on_corrupt=on_corrupt, num_classes=num_classes, max_record_bytes=max_record_bytes)
    if class_folders(directory):
        return ImageFolder(directory, on_corrupt=on_corrupt, max_record_bytes=max_record_bytes)
    raise DataError(
        f"{directory} holds neither part-00000 …, nor .tar files, nor a folder for every class",
        "make a small set with `stagewright data make`",
    )
