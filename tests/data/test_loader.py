"""Batches: the rows that were asked for, the same whoever reads them, and a clean end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.data.loader import Loader
from stagewright.data.opening import open_dataset
from stagewright.data.pixels import EvalTransform, TrainTransform
from stagewright.data.records import write_images
from stagewright.data.source import Dataset
from stagewright.errors import DataError, UsageError

SMALL = TrainTransform(size=16)


def whole(rows: int) -> tuple[tuple[int, int], ...]:
    return ((0, rows),)


def load(dataset: Dataset, **options: Any) -> Loader:
    if isinstance(fixed := options.get("row_ranges"), tuple):
        options["row_ranges"] = lambda rows: fixed
    return Loader(dataset=dataset, **{"batch": 4, "row_ranges": whole, "transform": SMALL, **options})


def labels_of(loader: Loader) -> list[list[int]]:
    return [torch.cat(batch.labels).tolist() for batch in loader]


@pytest.fixture
def ten(numbered: Callable[..., Path]) -> Dataset:
    """Ten images with the labels 0 to 9."""
    return open_dataset(numbered(10, images_per_file=4))


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────


def test_batches_come_in_order_and_the_last_one_is_dropped_or_kept(ten: Dataset) -> None:
    assert labels_of(load(ten, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert labels_of(load(ten, shuffle=False, keep_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(load(ten)), len(load(ten, keep_last=True)), len(load(ten, start=4))] == [2, 3, 1]


def test_a_worker_gets_a_tensor_for_every_range_of_rows(ten: Dataset) -> None:
    loader = load(ten, shuffle=False, row_ranges=((0, 1), (2, 4), (4, 4)), num_workers=2)
    batches = list(loader)
    assert [[labels.tolist() for labels in batch.labels] for batch in batches] == [[[0], [2, 3], []], [[4], [6, 7], []]]
    assert [tuple(images.shape) for images in batches[0].images] == [(1, 3, 16, 16), (2, 3, 16, 16), (0, 3, 16, 16)]
    assert [(batch.position, batch.rows) for batch in batches] == [(0, 4), (4, 4)]


def test_only_what_is_wanted_is_read(ten: Dataset) -> None:
    images, labels = next(iter(load(ten, want="images"))), next(iter(load(ten, want="labels")))
    assert (len(images.images), images.labels, labels.images, len(labels.labels)) == (1, (), (), 1)


@pytest.mark.parametrize("format", ["folder", "ofrecord", "tar"])
def test_what_a_row_holds_does_not_depend_on_who_reads_it(numbered: Callable[..., Path], format: str) -> None:
    """One reader of everything = three that share the rows = labels apart from images = any number of threads."""
    dataset = open_dataset(numbered(24, format))
    alone = list(load(dataset, batch=12, seed=5, epoch=2))
    shares = [((0, 5),), ((5, 6), (9, 12)), ((6, 9),)]
    parts = [list(load(dataset, batch=12, seed=5, epoch=2, row_ranges=share, num_workers=2)) for share in shares]
    for step, batch in enumerate(alone):
        first, (second, fourth), third = (part[step].images for part in parts)
        assert torch.equal(torch.cat([*first, second, *third, fourth]), batch.images[0])
    apart = list(load(dataset, batch=12, seed=5, epoch=2, want="labels"))
    assert [batch.labels[0].tolist() for batch in apart] == [batch.labels[0].tolist() for batch in alone]


def test_crops_differ_by_epoch_and_seed_but_not_by_batch_size(ten: Dataset) -> None:
    def images(**options: int) -> torch.Tensor:
        return torch.cat([batch.images[0] for batch in load(ten, shuffle=False, keep_last=True, **options)])

    assert torch.equal(images(), images(batch=3))
    assert not torch.equal(images(), images(epoch=1))
    assert not torch.equal(images(), images(seed=1))


@pytest.mark.parametrize("start", range(11))
def test_any_position_resumes_exactly(ten: Dataset, start: int) -> None:
    rows = [label for labels in labels_of(load(ten, batch=1, seed=3)) for label in labels]
    resumed = [label for labels in labels_of(load(ten, seed=3, start=start, keep_last=True)) for label in labels]
    assert resumed == rows[start:]


def test_the_position_counts_what_was_given_out_not_what_was_read_ahead(ten: Dataset) -> None:
    loader = load(ten, batch=2, num_workers=2, seed=1, epoch=6)
    batches = iter(loader)
    next(batches)
    next(batches)
    assert loader.position == 4
    assert (loader.for_epoch(7).epoch, loader.for_epoch(7).position) == (7, 0)


def test_layout_and_number_type_are_as_asked(ten: Dataset) -> None:
    (images,) = next(iter(load(ten, dtype=torch.bfloat16, channels_last=True, device=torch.device("cpu")))).images
    assert (images.dtype, images.is_contiguous(memory_format=torch.channels_last)) == (torch.bfloat16, True)


def test_evaluation_is_the_same_every_epoch(ten: Dataset) -> None:
    shown = [
        next(iter(load(ten, shuffle=False, transform=EvalTransform(size=14, shorter=16), epoch=epoch))).images[0]
        for epoch in (0, 1)
    ]
    assert torch.equal(*shown)


# ── ends ────────────────────────────────────────────────────────────────────────────────────────────────


def data_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stagewright-data")]


def test_threads_end_with_the_loop_even_when_it_is_left(ten: Dataset) -> None:
    for _ in load(ten, batch=1, num_workers=3):
        assert data_threads()
        break
    deadline_s = time.monotonic() + 10
    while data_threads() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert data_threads() == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_image_that_cannot_be_decoded_stops_with_its_place_or_is_blank_and_counted(
    tmp_path: Path, encode: Callable[..., bytes], num_workers: int
) -> None:
    images = [encode(), encode()[:300], encode()]
    write_images(tmp_path / "set", zip(images, range(3)), "ofrecord")
    dataset = open_dataset(tmp_path / "set")
    with pytest.raises(DataError, match=r"part-00000, record 1 at byte 1,050 is not an image"):
        list(load(dataset, batch=3, num_workers=num_workers))
    loader = load(dataset, batch=3, num_workers=num_workers, on_corrupt="skip", shuffle=False)
    (batch,) = loader
    assert loader.skipped == 1
    assert [float(image.std(dim=(1, 2)).max()) < 1e-5 for image in batch.images[0]] == [False, True, False]


class Stuck:
    """A dataset on a disk that does not answer for a while."""

    file_starts = ()

    def __len__(self) -> int:
        return 4

    def label(self, index: int) -> int:
        time.sleep(1.5)
        return 0


def test_a_disk_that_does_not_answer_is_an_error_after_a_while() -> None:
    with pytest.raises(DataError, match=r"position 0 was not read within 0\.1 s"):
        list(load(Stuck(), want="labels", num_workers=1, timeout_s=0.1))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 0}, "batch 0"),
        ({"start": 11}, "start 11 is not in an epoch of 10"),
        ({"row_ranges": ((0, 5),)}, r"row range \(0, 5\) does not fit a batch of 4 rows"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_reading(ten: Dataset, options: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load(ten, **options)


def test_fixed_ranges_do_not_fit_a_smaller_last_batch(ten: Dataset) -> None:
    with pytest.raises(UsageError, match=r"\(0, 4\) does not fit a batch of 2 rows"):
        list(load(ten, row_ranges=((0, 4),), keep_last=True))
