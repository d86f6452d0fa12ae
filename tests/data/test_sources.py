"""Folders, tar shards and OFRecord through one interface, and from one to another."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from stagewright.data.opening import open_dataset
from stagewright.data.records import convert, write_images
from stagewright.data.source import Dataset
from stagewright.errors import DataError

FORMATS = ("folder", "ofrecord", "tar")


def samples_of(dataset: Dataset) -> list[tuple[object, int]]:
    return [(dataset.encoded(index), dataset.label(index)) for index in range(len(dataset))]


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


# ── opening ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("format", "file"), list(zip(FORMATS, ("0003/00000003.jpg", "part-00000", "00000.tar"))))
def test_a_directory_is_recognised_by_its_files(numbered: Callable[..., Path], format: str, file: str) -> None:
    dataset = open_dataset(numbered(12, format))
    assert file in dataset.where(3)
    assert (len(dataset), dataset.num_classes) == (12, 12)
    assert [dataset.label(index) for index in range(12)] == list(range(12))
    assert [bool(dataset.file_starts), dataset.faults] == [format != "folder", ()]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ((), "holds neither part-00000"),
        (("readme.txt",), "holds neither part-00000"),
        (("cat/readme.txt",), "holds no image"),
        (("part-00000",), "holds no image"),
    ],
)
def test_a_directory_without_images_says_what_was_looked_for(tmp_path: Path, files: tuple[str, ...], says: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=says):
        open_dataset(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a directory"):
        open_dataset(tmp_path / "nowhere")


# ── converting ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("first", "second"), list(permutations(FORMATS, 2)))
def test_there_and_back_is_identity(numbered: Callable[..., Path], tmp_path: Path, first: str, second: str) -> None:
    original = open_dataset(numbered(25, first))
    seen: list[int] = []
    assert convert(original, tmp_path / "there", second, images_per_file=7, progress=seen.append) == 25
    there = open_dataset(tmp_path / "there")
    convert(there, tmp_path / "back", first)
    assert samples_of(original) == samples_of(there) == samples_of(open_dataset(tmp_path / "back"))
    assert original.class_names == there.class_names
    assert seen == list(range(1, 26))


def test_labels_survive_folders_when_classes_are_empty_or_unsorted(
    tmp_path: Path, encode: Callable[..., bytes]
) -> None:
    samples = [(encode(), 2), (encode(seed=1), 0)]
    write_images(tmp_path / "records", samples, "ofrecord", class_names=("zebra", "none", "ant"))
    convert(open_dataset(tmp_path / "records"), tmp_path / "folders", "folder")
    folders = open_dataset(tmp_path / "folders")
    assert folders.class_names == ("zebra", "none", "ant")
    assert sorted(folders.label(index) for index in range(2)) == [0, 2]


def test_a_directory_that_holds_something_is_not_written_to(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    (tmp_path / "mine").write_text("keep me")
    with pytest.raises(DataError, match="not an empty directory"):
        write_images(tmp_path, [(encode(), 0)], "ofrecord")


def test_no_name_in_an_archive_becomes_a_path(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = ("../../evil", "/abs/evil", "a/../../../evil")
    write_tar(
        source / "0.tar",
        {f"{name}.{kind}": data for name in names for kind, data in (("jpg", encode()), ("cls", b"0"))},
    )
    before = sorted(path for path in tmp_path.parent.rglob("*") if tmp_path not in path.parents)
    assert convert(open_dataset(source), tmp_path / "out", "folder") == 3
    assert sorted(path for path in tmp_path.parent.rglob("*") if tmp_path not in path.parents) == before
    assert len(list((tmp_path / "out" / "000").iterdir())) == 3


@pytest.mark.parametrize("name", ["../up", "/abs", "..", "", ".hidden", "a/b", "a\\b"])
def test_no_class_name_leads_out_of_a_folder(tmp_path: Path, encode: Callable[..., bytes], name: str) -> None:
    write_images(tmp_path / "records", [(encode(), 0)], "ofrecord")
    (tmp_path / "records" / "classes.txt").write_text(f"{name}\n")
    with pytest.raises(DataError, match=re.escape(f"names a class {name!r}")):
        open_dataset(tmp_path / "records")


# ── damaged archives ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"a.jpg": b"x"}, "'/a' has no label"),
        ({"a.cls": b"1"}, "'/a' has no image"),
        ({"a.jpg": b"x", "a.cls": b"one"}, "has the label b'one'"),
        ({"a.jpg": b"x", "a.cls": b"9" * 30}, "has the label b'99999"),
        ({"a.jpg": b"x", "a.png": b"y", "a.cls": b"1"}, "has a second image"),
    ],
)
def test_an_incomplete_sample_is_named_or_skipped(tmp_path: Path, members: dict[str, bytes], says: str) -> None:
    write_tar(tmp_path / "0.tar", {"good.jpg": b"z", "good.cls": b"4\n", **members})
    with pytest.raises(DataError, match=re.escape(says)):
        open_dataset(tmp_path)
    shards = open_dataset(tmp_path, on_corrupt="skip")
    assert any(says in fault for fault in shards.faults)
    assert (shards.encoded(0), shards.label(0)) == (b"z", 4)


def test_a_damaged_header_is_not_taken_for_the_end(numbered: Callable[..., Path]) -> None:
    directory = numbered(6, "tar")
    path = directory / "00000.tar"
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        third = archive.getmembers()[4].offset
    data[third + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"00000.tar, record 4 at byte {third:,} has a damaged header"):
        open_dataset(directory)
    assert len(open_dataset(directory, on_corrupt="skip")) == 2


def test_a_negative_size_ends_instead_of_going_round(numbered: Callable[..., Path]) -> None:
    directory = numbered(3, "tar")
    path = directory / "00000.tar"
    data = bytearray(path.read_bytes())
    data[124:136] = b"\xff" * 10 + (2**16 - 1024).to_bytes(2, "big")
    checksum = sum(data[:148]) + 8 * ord(" ") + sum(data[156:512])
    data[148:156] = f"{checksum:06o}\0 ".encode()
    path.write_bytes(data)
    with pytest.raises(DataError, match="has the size -1,024"):
        open_dataset(directory)


def test_long_names_are_read(tmp_path: Path) -> None:
    key = "k" * 180
    write_tar(tmp_path / "0.tar", {f"deep/{key}.jpg": b"image", f"deep/{key}.cls": b"3"})
    assert samples_of(open_dataset(tmp_path)) == [(b"image", 3)]


def test_an_empty_image_file_is_named_or_skipped(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.jpg").write_bytes(b"")
    (tmp_path / "cat" / "b.jpg").write_bytes(encode())
    with pytest.raises(DataError, match=r"a\.jpg is empty"):
        open_dataset(tmp_path)
    assert len(open_dataset(tmp_path, on_corrupt="skip")) == 1
