"""Damaged files end in data or in a clear error, quickly and in little memory."""

from __future__ import annotations

import random
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stagewright.data.opening import open_dataset
from stagewright.data.pixels import Crop, read_crop
from stagewright.data.records import _encode_image, _write_part, write_images
from stagewright.data.source import Dataset
from stagewright.errors import DataError

Check = Callable[[bytes], object]
MAX_CASE_S = 2.0
MAX_GROWTH_KIB = 200 * 1024
LENGTHS = (-1, 0, 1, 7, 2**15, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63))


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The data after one to four random wounds."""
    wounded = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(wounded) + 1)
        length = rng.choice((1, 1, 2, 8, 60))
        wound = rng.randrange(7)
        if wound == 0:
            wounded[at : at + 1] = bytes([rng.randrange(256)])
        elif wound == 1:
            wounded[at : at + length] = rng.randbytes(length)
        elif wound == 2:
            del wounded[at:]
        elif wound == 3:
            del wounded[at : at + length]
        elif wound == 4:
            wounded[at:at] = rng.randbytes(length)
        elif wound == 5:
            wounded[at:at] = wounded[max(0, at - length) : at]
        else:
            wounded[at : at + 8] = struct.pack("<q", rng.choice(LENGTHS))
    return bytes(wounded)


def fuzz(data: bytes, check: Check, num: int, seed: int) -> tuple[int, int]:
    """How many of `num` mutations ended in data, and how many in a DataError; anything else fails."""
    rng = random.Random(seed)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends = [0, 0]
    for case in range(num):
        wounded = mutated(data, rng)
        start_s = time.process_time()
        try:
            check(wounded)
            ends[0] += 1
        except DataError as error:
            ends[1] += len(error.what) > 10
        assert time.process_time() - start_s < MAX_CASE_S, f"case {case} of seed {seed} took too long"
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < MAX_GROWTH_KIB, f"memory grew by {grown_kib // 1024} MiB"
    assert sum(ends) == num, "an error without words"
    return ends[0], ends[1]


def read_all(dataset: Dataset) -> Iterator[tuple[bytes, int]]:
    return ((dataset.encoded(index), dataset.label(index)) for index in range(len(dataset)))


def checks_files(path: Path) -> Check:
    def check(data: bytes) -> None:
        path.write_bytes(data)
        skipping = open_dataset(path.parent, on_corrupt="skip")
        assert len(list(read_all(skipping))) == len(skipping)
        list(read_all(open_dataset(path.parent)))

    return check


def checks_image(data: bytes) -> None:
    pixels = read_crop(data, lambda height, width: Crop(0, 0, max(1, height // 2), width, True), 16)
    assert pixels.shape == (16, 16, 3)


QUICK_AND_ALL = [pytest.param(1_000, 1), pytest.param(100_000, 2, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
FEWER_AND_MANY = [pytest.param(400, 1), pytest.param(20_000, 2, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]


@pytest.mark.parametrize(("num", "seed"), QUICK_AND_ALL)
def test_mutated_record_files_end_in_data_or_a_clear_error(tmp_path: Path, num: int, seed: int) -> None:
    _write_part(tmp_path / "whole", [_encode_image(b"\xff\xd8 a small image", label) for label in range(3)])
    data = (tmp_path / "whole").read_bytes()
    read, refused = fuzz(data, checks_files(tmp_path / "part-00000"), num, seed)
    assert min(read, refused) > num // 20


@pytest.mark.parametrize(("num", "seed"), FEWER_AND_MANY)
def test_mutated_shards_end_in_data_or_a_clear_error(tmp_path: Path, num: int, seed: int) -> None:
    write_images(tmp_path / "set", [(b"\xff\xd8" + bytes(90), 1), (b"\xff\xd8" + bytes(30), 0)], "tar")
    data = (tmp_path / "set" / "00000.tar").read_bytes()[:4096]
    read, refused = fuzz(data, checks_files(tmp_path / "set" / "00000.tar"), num, seed)
    assert min(read, refused) > num // 20


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"format": "PNG"}])
@pytest.mark.parametrize(("num", "seed"), FEWER_AND_MANY)
def test_mutated_images_end_in_pixels_or_a_clear_error(
    encode: Callable[..., bytes], options: dict, num: int, seed: int
) -> None:
    read, refused = fuzz(encode(40, 56, **options), checks_image, num, seed)
    assert min(read, refused) > num // 100
