"""OFRecord files: the bytes on disk, and what is said when they are damaged."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from stagewright.data import records as record_files
from stagewright.data.opening import open_dataset
from stagewright.data.records import _encode_image, _message_type, _write_part, scan_part
from stagewright.data.source import Faults
from stagewright.errors import DataError

VECTOR = (
    "2d00000000000000"  # 45 bytes follow
    "0a14 0a0b636c6173732f6c6162656c 1205 2203 0a0107"  # "class/label": int32_list [7], packed
    "0a15 0a07656e636f646564 120a 0a08 0a06ffd86a706567"  # "encoded": bytes_list [ff d8 "jpeg"]
)
JPEG = b"\xff\xd8jpeg"


def write_three(directory: Path) -> bytes:
    """Records of labels 0, 1, 2 in one part, 53 bytes each."""
    _write_part(directory / "part-00000", [_encode_image(JPEG, label) for label in range(3)])
    return (directory / "part-00000").read_bytes()


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_check_vector_is_written_byte_for_byte(tmp_path: Path) -> None:
    assert _write_part(tmp_path / "part-00000", [_encode_image(JPEG, 7)]) == 1
    assert (tmp_path / "part-00000").read_bytes() == bytes.fromhex(VECTOR)


def test_the_check_vector_is_read(tmp_path: Path) -> None:
    (tmp_path / "part-00000").write_bytes(bytes.fromhex(VECTOR))
    records = open_dataset(tmp_path)
    assert (len(records), records.label(0), records.encoded(0)) == (1, 7, JPEG)


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("length", "says"),
    [
        (-5, "has the length -5"),
        (0, "has the length 0"),
        (46, "has the length 46, but 45 bytes are left"),
        (2**40, "more than the 268,435,456 bytes allowed"),
        (2**63 - 1, "more than the 268,435,456 bytes allowed"),
    ],
)
def test_an_impossible_length_is_named_with_file_offset_and_number(tmp_path: Path, length: int, says: str) -> None:
    data = write_three(tmp_path)
    (tmp_path / "part-00000").write_bytes(data[:106] + struct.pack("<q", length) + data[114:])
    with pytest.raises(DataError, match=re.escape("part-00000, record 2 at byte 106 ")) as caught:
        open_dataset(tmp_path)
    assert says in caught.value.what


@pytest.mark.parametrize("cut", range(107, 159))
def test_a_truncated_file_is_named_or_skipped_with_a_count(tmp_path: Path, cut: int) -> None:
    data = write_three(tmp_path)
    (tmp_path / "part-00000").write_bytes(data[:cut])
    with pytest.raises(DataError, match="record 2 at byte 106"):
        open_dataset(tmp_path)
    records = open_dataset(tmp_path, on_corrupt="skip")
    assert (len(records), len(records.faults)) == (2, 1)
    assert f"the last {cut - 106} bytes of the file are lost" in records.faults[0]


def test_a_corrupt_message_between_whole_ones_is_named_or_skipped(tmp_path: Path) -> None:
    data = bytearray(write_three(tmp_path))
    data[61:70] = b"\xff" * 9
    (tmp_path / "part-00000").write_bytes(data)
    records = open_dataset(tmp_path)
    assert records.label(2) == 2
    with pytest.raises(DataError, match="record 1 at byte 61 is not an OFRecord message"):
        records.label(1)
    skipping = open_dataset(tmp_path, on_corrupt="skip")
    assert [skipping.label(index) for index in range(len(skipping))] == [0, 2]
    assert len(skipping.faults) == 1
    assert skipping.where(1).endswith("part-00000, record 2 at byte 114")


@pytest.mark.parametrize(
    ("label", "says"),
    [
        ({}, "has no feature 'class/label', only ['encoded']"),
        ({"double_list": [1.0]}, "1 images and 0 labels"),
        ({"int32_list": [1, 2]}, "1 images and 2 labels"),
        ({"int32_list": [-1]}, "has the label -1"),
        ({"int64_list": [10]}, "labels run from 0 to 9"),
    ],
)
def test_a_record_that_is_no_labelled_image_says_why(tmp_path: Path, label: dict[str, list], says: str) -> None:
    message = _message_type()()
    message.feature["encoded"].bytes_list.value.append(JPEG)
    for kind, values in label.items():
        getattr(message.feature["class/label"], kind).value.extend(values)
    _write_part(tmp_path / "part-00000", [message.SerializeToString()])
    (tmp_path / "classes.txt").write_text("".join(f"{name}\n" for name in range(10)))
    with pytest.raises(DataError, match=re.escape(says)):
        open_dataset(tmp_path).encoded(0)


def test_a_bound_on_records_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_three(tmp_path)
    monkeypatch.setattr(record_files, "MAX_RECORD_BYTES", 44)
    with pytest.raises(DataError, match="more than the 44 bytes allowed"):
        open_dataset(tmp_path)


def test_a_file_that_shrinks_after_opening_is_an_error_not_garbage(tmp_path: Path) -> None:
    data = write_three(tmp_path)
    records = open_dataset(tmp_path)
    (tmp_path / "part-00000").write_bytes(data[:130])
    with pytest.raises(DataError, match="has 16 of its 45 bytes"):
        records.encoded(2)


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────


def test_parts_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for part in (10, 2, 0):
        _write_part(tmp_path / f"part-{part}", [_encode_image(JPEG, part), _encode_image(JPEG, part + 1)])
    (tmp_path / "part-00000.index").write_bytes(b"not a part")
    records = open_dataset(tmp_path)
    assert [records.label(index) for index in range(6)] == [0, 1, 2, 3, 10, 11]
    assert records.file_starts == (0, 2, 4)
    assert records.num_classes == 12


def test_scanning_reads_lengths_only(tmp_path: Path) -> None:
    path = tmp_path / "part-00000"
    with path.open("wb") as stream:
        for _ in range(4):
            stream.write(struct.pack("<q", 2**27))
            stream.seek(2**27, 1)
        stream.truncate()
    assert scan_part(path, Faults()) == [(8 + number * (8 + 2**27), 2**27, -1) for number in range(4)]
