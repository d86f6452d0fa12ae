"""Files of labelled images, read and written; damage is told with its place and never taken for the end.

OFRecord: files `part-00000` … of length-prefixed protobuf messages.

    part-00000   │ int64 little-endian length │ message │ length │ message │ …
    message      OFRecord{ map<string, Feature> feature = 1 }
    Feature      oneof { BytesList = 1, FloatList = 2, DoubleList = 3, Int32List = 4, Int64List = 5 }
    …List        repeated value = 1, numbers packed

An image is `encoded` (the JPEG file, bytes) and `class/label` (int32, from 0).

WebDataset shards: tar files in which `key.jpg` and `key.cls` (the label in digits) are one labelled image.
"""

from __future__ import annotations

import io
import os
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from stagewright.data.source import (
    IMAGE_SUFFIXES,
    MAX_RECORD_BYTES,
    Dataset,
    Faults,
    checked_label,
    need,
    place,
    save_class_names,
)
from stagewright.errors import DataError, UsageError

Format: TypeAlias = Literal["folder", "ofrecord", "tar"]
IMAGES_PER_FILE = 1000
_Labelled: TypeAlias = tuple[bytes, int]

_KINDS = ("bytes", "float", "double", "int32", "int64")
_LENGTH = struct.Struct("<q")
_IMAGE, _LABEL = "encoded", "class/label"
_SIGNATURES = ((b"\xff\xd8", ".jpg"), (b"\x89PNG", ".png"), (b"RIFF", ".webp"), (b"BM", ".bmp"))


@contextmanager
def _writing_whole(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when the file is whole."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    yield unfinished
    unfinished.replace(path)


# ── OFRecord ────────────────────────────────────────────────────────────────────────────────────────────


@cache
def _message_type() -> Any:
    """The OFRecord message class, described here so that no generated file is needed."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # comes with the extra `data`

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="ofrecord.proto", package="oneflow", syntax="proto3")
    feature = descriptor_pb2.DescriptorProto(name="Feature")
    feature.oneof_decl.add(name="kind")
    one, many, message = field.LABEL_OPTIONAL, field.LABEL_REPEATED, field.TYPE_MESSAGE
    for number, kind in enumerate(_KINDS, start=1):
        name, value = f"{kind.capitalize()}List", getattr(field, f"TYPE_{kind.upper()}")
        file.message_type.add(name=name).field.add(name="value", number=1, label=many, type=value)
        feature.field.add(
            name=f"{kind}_list", number=number, label=one, type=message, type_name=f".oneflow.{name}", oneof_index=0
        )
    file.message_type.append(feature)
    record = file.message_type.add(name="OFRecord")
    entry = record.nested_type.add(name="FeatureEntry")  # a map is a repeated entry of key and value
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=one, type=message, type_name=".oneflow.Feature")
    record.field.add(name="feature", number=1, label=many, type=message, type_name=".oneflow.OFRecord.FeatureEntry")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("oneflow.OFRecord"))


def _encode_image(encoded: bytes, label: int) -> bytes:
    """The message of one labelled image, the same bytes every time."""
    message = _message_type()()
    message.feature[_IMAGE].bytes_list.value.append(encoded)
    message.feature[_LABEL].int32_list.value.append(label)
    return bytes(message.SerializeToString(deterministic=True))


def decode_image(data: bytes) -> tuple[bytes, int]:
    """The image file and the label in one message."""
    from google.protobuf.message import DecodeError

    message = _message_type()()
    try:
        message.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise DataError("is not an OFRecord message", "fetch the file again, or skip with on_corrupt='skip'") from error
    features = message.feature
    for name in (_IMAGE, _LABEL):
        if name not in features:
            raise DataError(f"has no feature {name!r}, only {sorted(features)[:8]}", "is this a file of images?")
    images = features[_IMAGE].bytes_list.value
    labels = features[_LABEL].int32_list.value or features[_LABEL].int64_list.value
    if len(images) != 1 or len(labels) != 1:
        raise DataError(f"has {len(images)} images and {len(labels)} labels where one of each belongs")
    return images[0], labels[0]


def _write_part(path: Path, messages: Iterable[bytes]) -> int:
    """Writes one part, each message behind its length, and gives their number."""
    num_records = 0
    with _writing_whole(path) as unfinished, unfinished.open("wb") as stream:
        for message in messages:
            stream.write(_LENGTH.pack(len(message)) + message)
            num_records += 1
    return num_records


def scan_part(path: Path, faults: Faults) -> list[tuple[int, int, int]]:
    """Offset and size of every message, and −1 for its label; what is behind a damaged length is lost.

    Only the lengths are read; nothing is allocated for a record before its length is known to fit.
    """
    rows: list[tuple[int, int, int]] = []
    with faults.kept(), path.open("rb", buffering=0) as stream:
        end, offset = os.fstat(stream.fileno()).st_size, 0
        while offset < end:
            header = os.pread(stream.fileno(), _LENGTH.size, offset)
            why = _length_fault(header, end - offset)
            if why is not None:
                raise DataError(
                    f"{place(path, offset, len(rows))} {why}; the last {end - offset:,} bytes of the file are lost",
                    "fetch the file again, or go on without them with on_corrupt='skip'",
                )
            (size,) = _LENGTH.unpack(header)
            rows.append((offset + _LENGTH.size, size, -1))
            offset += _LENGTH.size + size
    return rows


def _length_fault(header: bytes, left_bytes: int) -> str | None:
    if len(header) < _LENGTH.size:
        return f"has {len(header)} of the 8 bytes of its length"
    (size,) = _LENGTH.unpack(header)
    if size < 1:
        return f"has the length {size}"
    if size > MAX_RECORD_BYTES:
        return f"has the length {size:,}, more than the {MAX_RECORD_BYTES:,} bytes allowed"
    if size > left_bytes - _LENGTH.size:
        return f"has the length {size:,}, but {left_bytes - _LENGTH.size:,} bytes are left in the file"
    return None


# ── tar ─────────────────────────────────────────────────────────────────────────────────────────────────


def scan_shard(path: Path, faults: Faults, class_names: tuple[str, ...]) -> list[tuple[int, int, int]]:
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
                    size, most = member.size, MAX_RECORD_BYTES
                    if size > most:
                        raise DataError(f"{where} has {size:,} bytes, more than the {most:,} allowed")
                    if key in images:
                        raise DataError(f"{where} has a second image of its key", "give every image its own key")
                    images[key] = (member.offset_data, size)
    for key in sorted(images.keys() ^ labels.keys()):
        missing = "label, key.cls" if key in images else "image, key.jpg"
        with faults.kept():
            raise DataError(f"{path}: {key!r} has no {missing}", "add it, or skip with on_corrupt='skip'")
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


def _label_of(text: bytes, where: str, class_names: tuple[str, ...]) -> int:
    """The digits of one `key.cls`."""
    if len(text) > 20 or not text.strip().isdigit():
        raise DataError(f"{where} has the label {text[:20]!r}; it should be a number in digits")
    return checked_label(int(text), where, class_names)


def _write_shard(path: Path, samples: Iterable[tuple[bytes, int]], first: int) -> int:
    """Writes labelled images as one shard, numbered from `first`, and gives their number; the same bytes every time."""
    number = first - 1
    with _writing_whole(path) as unfinished, tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, (encoded, label) in enumerate(samples, start=first):
            for suffix, data in ((_image_suffix(encoded), encoded), (".cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:08d}{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return number + 1 - first


def _image_suffix(encoded: bytes) -> str:
    """`.jpg` and the like, by how the file begins."""
    return next((suffix for signature, suffix in _SIGNATURES if encoded.startswith(signature)), ".jpg")


# ── whole sets ──────────────────────────────────────────────────────────────────────────────────────────


def write_images(
    directory: Path,
    images: Iterable[tuple[bytes, int]],
    format: Format,
    *,
    class_names: Sequence[str] = (),
    images_per_file: int = IMAGES_PER_FILE,
) -> int:
    """Writes the (image file, label) pairs to a new directory and gives their number.

    folder    cat/00000000.jpg …          labels are the order of classes.txt
    ofrecord  part-00000 …                tar    00000.tar …
    """
    check_format(format)
    if images_per_file < 1:
        raise UsageError(f"{images_per_file} images a file cannot be", "give 1 or more")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DataError(f"{directory} is there already and not an empty directory", "name a new one")
    directory.mkdir(parents=True, exist_ok=True)
    save_class_names(directory, class_names)
    if format == "folder":
        return _write_folders(directory, images, class_names)
    num_images = 0
    for file, some in enumerate(_groups(images, images_per_file)):
        if format == "tar":
            num_images += _write_shard(directory / f"{file:05d}.tar", some, num_images)
        else:
            num_images += _write_part(directory / f"part-{file:05d}", (_encode_image(*labelled) for labelled in some))
    return num_images


def check_format(format: str) -> None:
    """Refuses a --format that is unknown, or whose package is not installed."""
    if format not in get_args(Format):
        raise UsageError(f"--format is {format!r}: expected one of {', '.join(get_args(Format))}")
    if format == "ofrecord":
        need(f"--format {format}", "google.protobuf")


def _write_folders(directory: Path, images: Iterable[_Labelled], class_names: Sequence[str]) -> int:
    """One subfolder a class, images numbered; no name comes from where the images came from."""
    if not class_names:
        raise UsageError("image folders need names for the classes", "give class_names")
    for name in class_names:
        (directory / name).mkdir()
    number = -1
    for number, (encoded, label) in enumerate(images):
        (directory / class_names[label] / f"{number:08d}{_image_suffix(encoded)}").write_bytes(encoded)
    return number + 1


def _groups(images: Iterable[_Labelled], size: int) -> Iterator[Iterator[_Labelled]]:
    """The images in runs of `size`; none is empty, and only one image is held at a time."""
    left = iter(images)
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

    def images() -> Iterator[_Labelled]:
        for index in range(len(dataset)):
            yield dataset.encoded(index), dataset.label(index)
            if progress is not None:
                progress(index + 1)

    class_names = dataset.class_names or _numbered_classes(dataset.num_classes)
    return write_images(directory, images(), format, class_names=class_names, images_per_file=images_per_file)


def _numbered_classes(num_classes: int) -> tuple[str, ...]:
    """`000`, `001` …: names for classes without, in the order of their labels when sorted."""
    digits = max(3, len(str(num_classes - 1)))
    return tuple(f"{label:0{digits}d}" for label in range(num_classes))
