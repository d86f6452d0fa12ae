"""OFRecord: files `part-00000` … of length-prefixed protobuf messages.

    part-00000   │ int64 little-endian length │ message │ length │ message │ …
    message      OFRecord{ map<string, Feature> feature = 1 }
    Feature      oneof { BytesList = 1, FloatList = 2, DoubleList = 3, Int32List = 4, Int64List = 5 }
    …List        repeated value = 1, numbers packed

An image is `encoded` (the JPEG file, bytes) and `class/label` (int32, from 0).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from stagewright.data.source import (
    MAX_RECORD_BYTES,
    Extents,
    Faults,
    Indices,
    OnCorrupt,
    checked_label,
    make_extents,
    place,
    read_class_names,
)
from stagewright.errors import DataError

_Kind: TypeAlias = Literal["bytes", "float", "double", "int32", "int64"]
KINDS: tuple[_Kind, ...] = ("bytes", "float", "double", "int32", "int64")
_LENGTH = struct.Struct("<q")
_PART_NAME = re.compile(r"part-\d+")
_IMAGE_FEATURE, _LABEL_FEATURE = "encoded", "class/label"


@dataclass(frozen=True)
class Feature:
    """A list of values of one kind."""

    kind: _Kind
    values: tuple[bytes | float | int, ...]


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────


def _message_type() -> Any:
    """The OFRecord message class, described here so that no generated file is needed."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="ofrecord.proto", package="oneflow", syntax="proto3")
    feature = descriptor_pb2.DescriptorProto(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, kind in enumerate(KINDS, start=1):
        name = f"{kind.capitalize()}List"
        value_type = getattr(field, f"TYPE_{kind.upper()}")
        file.message_type.add(name=name).field.add(name="value", number=1, label=field.LABEL_REPEATED, type=value_type)
        feature.field.add(
            name=f"{kind}_list",
            number=number,
            label=field.LABEL_OPTIONAL,
            type=field.TYPE_MESSAGE,
            type_name=f".oneflow.{name}",
            oneof_index=0,
        )
    file.message_type.append(feature)
    _describe_record(file)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("oneflow.OFRecord"))


def _describe_record(file: descriptor_pb2.FileDescriptorProto) -> None:
    """Adds `OFRecord{ map<string, Feature> feature = 1 }`; a map is a repeated entry of key and value."""
    field = descriptor_pb2.FieldDescriptorProto
    record = file.message_type.add(name="OFRecord")
    entry = record.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING)
    shared = {"type": field.TYPE_MESSAGE}
    entry.field.add(name="value", number=2, label=field.LABEL_OPTIONAL, type_name=".oneflow.Feature", **shared)
    entry_name = ".oneflow.OFRecord.FeatureEntry"
    record.field.add(name="feature", number=1, label=field.LABEL_REPEATED, type_name=entry_name, **shared)


_Record = _message_type()


def encode_record(features: Mapping[str, Feature]) -> bytes:
    """The message of these features, the same bytes every time: keys are sorted."""
    message = _Record()
    for name, feature in features.items():
        held = getattr(message.feature[name], f"{feature.kind}_list")
        held.SetInParent()
        try:
            held.value.extend(feature.values)
        except (TypeError, ValueError) as error:
            raise DataError(f"feature {name!r} cannot hold its values as {feature.kind}: {error}") from error
    return bytes(message.SerializeToString(deterministic=True))


def decode_record(message: bytes) -> dict[str, Feature]:
    """The features of one message, by name."""
    features = {}
    for name, feature in sorted(_parsed(message).feature.items()):
        field = feature.WhichOneof("kind")
        if field is None:
            raise DataError(f"feature {name!r} holds no list")
        features[name] = Feature(field.removesuffix("_list"), tuple(getattr(feature, field).value))
    return features


def encode_image(encoded: bytes, label: int) -> bytes:
    """The message of one labelled image."""
    return encode_record({_LABEL_FEATURE: Feature("int32", (label,)), _IMAGE_FEATURE: Feature("bytes", (encoded,))})


def _decode_image(message: bytes) -> tuple[bytes, int]:
    """The image file and the label in one message."""
    features = _parsed(message).feature
    for name in (_IMAGE_FEATURE, _LABEL_FEATURE):
        if name not in features:
            raise DataError(f"has no feature {name!r}, only {sorted(features)[:8]}", "is this a file of images?")
    images = features[_IMAGE_FEATURE].bytes_list.value
    labels = features[_LABEL_FEATURE].int32_list.value or features[_LABEL_FEATURE].int64_list.value
    if len(images) != 1 or len(labels) != 1:
        raise DataError(f"has {len(images)} images and {len(labels)} labels where one of each belongs")
    return images[0], labels[0]


def _parsed(message: bytes) -> Any:
    """The protobuf message in these bytes."""
    record = _Record()
    try:
        record.ParseFromString(message)
    except (DecodeError, UnicodeDecodeError) as error:
        raise DataError("is not an OFRecord message", "fetch the file again, or skip with on_corrupt='skip'") from error
    return record


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────


def part_name(part: int) -> str:
    """`part-00000`."""
    return f"part-{part:05d}"


def frame(message: bytes) -> bytes:
    """The message behind its length; an empty one is refused, since zeros are what damaged files are full of."""
    if not message:
        raise DataError("a record without features cannot be written", "give it a feature")
    return _LENGTH.pack(len(message)) + message


def write_part(path: Path, messages: Iterable[bytes]) -> int:
    """Writes one part and gives the number of records; the name appears when the file is whole."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    num_records = 0
    with unfinished.open("wb") as stream:
        for message in messages:
            stream.write(frame(message))
            num_records += 1
    unfinished.replace(path)
    return num_records


def read_part(path: Path, max_record_bytes: int = MAX_RECORD_BYTES) -> Iterator[dict[str, Feature]]:
    """The features of every record of one part, in order."""
    rows, fault = scan_part(path, max_record_bytes)
    extents = make_extents((path,), [(0, offset, size, number) for number, (offset, size) in enumerate(rows)])
    for index in range(len(extents)):
        try:
            yield decode_record(extents.read(index))
        except DataError as error:
            raise DataError(f"{extents.where(index)} {error.what}", error.todo) from error
    if fault is not None:
        raise fault


def scan_part(path: Path, max_record_bytes: int = MAX_RECORD_BYTES) -> tuple[list[tuple[int, int]], DataError | None]:
    """Offset and size of every message, and the fault that ended the scan, if one did.

    Only the lengths are read; nothing is allocated for a record before its length is known to fit.
    """
    rows: list[tuple[int, int]] = []
    with path.open("rb", buffering=0) as stream:
        end = os.fstat(stream.fileno()).st_size
        offset = 0
        while offset < end:
            header = os.pread(stream.fileno(), _LENGTH.size, offset)
            why = _length_fault(header, end - offset, max_record_bytes)
            if why is not None:
                return rows, _lost_rest(path, offset, len(rows), why, end)
            (size,) = _LENGTH.unpack(header)
            rows.append((offset + _LENGTH.size, size))
            offset += _LENGTH.size + size
    return rows, None


def _length_fault(header: bytes, left_bytes: int, max_record_bytes: int) -> str | None:
    """What is wrong with a record's length, or None."""
    if len(header) < _LENGTH.size:
        return f"has {len(header)} of the 8 bytes of its length"
    (size,) = _LENGTH.unpack(header)
    if size < 1:
        return f"has the length {size}"
    if size > max_record_bytes:
        return f"has the length {size:,}, more than the {max_record_bytes:,} bytes allowed"
    if size > left_bytes - _LENGTH.size:
        return f"has the length {size:,}, but {left_bytes - _LENGTH.size:,} bytes are left in the file"
    return None


def _lost_rest(path: Path, offset: int, number: int, why: str, end: int) -> DataError:
    """The error of a length that cannot be: what follows it cannot be found any more."""
    return DataError(
        f"{place(path, offset, number)} {why}; the last {end - offset:,} bytes of the file are lost",
        "fetch the file again, or go on without them with on_corrupt='skip'",
    )


# ── the dataset ─────────────────────────────────────────────────────────────────────────────────────────


class OFRecords:
    """The labelled images of the parts in one directory, by index.

    Opening reads the lengths only; with on_corrupt="skip" it reads every record once, to number those that are whole.
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
        self._given_classes = num_classes or len(self.class_names) or None
        self._faults = Faults(on_corrupt)
        self._extents = _scan(_part_paths(directory), max_record_bytes, self._faults)
        self._labels = np.full(len(self._extents), -1, dtype=np.int64)
        if on_corrupt == "skip":
            self._keep_whole()
        self.file_starts = self._extents.file_starts()

    def __len__(self) -> int:
        return len(self._extents)

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(self._faults.found)

    @property
    def num_classes(self) -> int:
        """As given or as classes.txt has it; else one more than the largest label, for which all records are read."""
        if self._given_classes is None:
            self._given_classes = 1 + max((self.label(index) for index in range(len(self))), default=-1)
        return self._given_classes

    def label(self, index: int) -> int:
        if self._labels[index] < 0:
            self.encoded(index)
        return int(self._labels[index])

    def encoded(self, index: int) -> bytes:
        where = self.where(index)
        try:
            encoded, label = _decode_image(self._extents.read(index))
        except DataError as error:
            what = error.what if error.what.startswith(where) else f"{where} {error.what}"
            raise DataError(what, error.todo) from error
        self._labels[index] = checked_label(label, where, self._given_classes)
        return encoded

    def where(self, index: int) -> str:
        return self._extents.where(index)

    def _keep_whole(self) -> None:
        """Leaves out the records that cannot be read, with a fault for each."""
        whole = []
        for index in range(len(self._extents)):
            try:
                self.encoded(index)
                whole.append(index)
            except DataError as error:
                self._faults.report(error)
        kept: Indices = np.array(whole, dtype=np.int64)
        self._extents, self._labels = self._extents.keep(kept), self._labels[kept]


def _part_paths(directory: Path) -> tuple[Path, ...]:
    """The directory's parts in the order of their numbers."""
    parts = [path for path in directory.iterdir() if _PART_NAME.fullmatch(path.name) and path.is_file()]
    return tuple(sorted(parts, key=lambda path: (int(path.name.removeprefix("part-")), path.name)))


def _scan(paths: tuple[Path, ...], max_record_bytes: int, faults: Faults) -> Extents:
    """The places of all records of all parts."""
    rows = []
    for file, path in enumerate(paths):
        found, fault = scan_part(path, max_record_bytes)
        rows += [(file, offset, size, number) for number, (offset, size) in enumerate(found)]
        if fault is not None:
            faults.report(fault)
    return make_extents(paths, rows)
