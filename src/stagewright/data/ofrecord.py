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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    writing_whole,
)
from stagewright.errors import DataError

_KINDS = ("bytes", "float", "double", "int32", "int64")
_LENGTH = struct.Struct("<q")
_IMAGE, _LABEL = "encoded", "class/label"


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────


def _message_type() -> Any:
    """The OFRecord message class, described here so that no generated file is needed."""
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


_Message = _message_type()


def encode_image(encoded: bytes, label: int) -> bytes:
    """The message of one labelled image, the same bytes every time."""
    message = _Message()
    message.feature[_IMAGE].bytes_list.value.append(encoded)
    message.feature[_LABEL].int32_list.value.append(label)
    return bytes(message.SerializeToString(deterministic=True))


def _decode_image(data: bytes) -> tuple[bytes, int]:
    """The image file and the label in one message."""
    message = _Message()
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


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────


def write_part(path: Path, messages: Iterable[bytes]) -> int:
    """Writes one part, each message behind its length, and gives their number."""
    num_records = 0
    with writing_whole(path) as unfinished, unfinished.open("wb") as stream:
        for message in messages:
            stream.write(_LENGTH.pack(len(message)) + message)
            num_records += 1
    return num_records


def _scan_part(path: Path) -> tuple[list[tuple[int, int]], DataError | None]:
    """Offset and size of every message, and the fault that ended the scan, if one did.

    Only the lengths are read; nothing is allocated for a record before its length is known to fit.
    """
    rows: list[tuple[int, int]] = []
    with path.open("rb", buffering=0) as stream:
        end = os.fstat(stream.fileno()).st_size
        offset = 0
        while offset < end:
            header = os.pread(stream.fileno(), _LENGTH.size, offset)
            why = _length_fault(header, end - offset)
            if why is not None:
                return rows, DataError(
                    f"{place(path, offset, len(rows))} {why}; the last {end - offset:,} bytes of the file are lost",
                    "fetch the file again, or go on without them with on_corrupt='skip'",
                )
            (size,) = _LENGTH.unpack(header)
            rows.append((offset + _LENGTH.size, size))
            offset += _LENGTH.size + size
    return rows, None


def _length_fault(header: bytes, left_bytes: int) -> str | None:
    """What is wrong with a record's length, or None."""
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


# ── the dataset ─────────────────────────────────────────────────────────────────────────────────────────


class OFRecords:
    """The labelled images of the parts in one directory, by index.

    Opening reads the lengths only; with on_corrupt="skip" it reads every record once, to number those that are whole.
    """

    def __init__(self, directory: Path, *, on_corrupt: OnCorrupt = "stop") -> None:
        self.class_names = read_class_names(directory)
        self._faults = Faults(on_corrupt)
        self._extents = _scan(directory, self._faults)
        self._labels: Indices = np.full(len(self._extents), -1, dtype=np.int64)
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
        """As classes.txt has it; else one more than the largest label, for which all records are read."""
        return len(self.class_names) or 1 + max((self.label(index) for index in range(len(self))), default=-1)

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
        self._labels[index] = checked_label(label, where, self.class_names)
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


def _scan(directory: Path, faults: Faults) -> Extents:
    """The places of all records of the directory's parts, in the order of the parts' numbers."""
    parts = [path for path in directory.iterdir() if re.fullmatch(r"part-\d+", path.name) and path.is_file()]
    paths = tuple(sorted(parts, key=lambda path: (int(path.name.removeprefix("part-")), path.name)))
    rows = []
    for file, path in enumerate(paths):
        found, fault = _scan_part(path)
        rows += [(file, offset, size, number) for number, (offset, size) in enumerate(found)]
        if fault is not None:
            faults.report(fault)
    return make_extents(paths, rows)
