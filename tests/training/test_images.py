"""Images as rows: the same whoever reads them, in the layout that was asked for, and faults with their places."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stagewright.data.opening import open_dataset
from stagewright.data.records import write_images
from stagewright.data.source import Dataset
from stagewright.errors import DataError
from stagewright.runtime.feed import ReadAhead
from stagewright.runtime.settings import Settings
from stagewright.scheduling.drawing import sketch_plan
from stagewright.training.feeds import DataFeed
from tests.data.conftest import encode, numbered, picture

__all__ = ["encode", "numbered", "picture"]
SIZE = 16


def feed_of(dataset: Any, batch: int = 4, settings: Settings | None = None, **options: Any) -> DataFeed:
    feed = DataFeed(dataset, size=SIZE, **options)
    feed.settle(sketch_plan((1,), batch=batch), settings or Settings())
    return feed


def images_of(feed: DataFeed, batches: int, rows: int) -> Tensor:
    return torch.cat([feed.inputs(batch, 0, rows)[0] for batch in range(batches)])


@pytest.fixture
def ten(numbered: Callable[..., Path]) -> Dataset:
    """Ten images with the labels 0 to 9."""
    return open_dataset(numbered(10, images_per_file=4))


@pytest.mark.parametrize("format", ["folder", "ofrecord", "tar"])
def test_what_a_row_holds_does_not_depend_on_who_reads_it(numbered: Callable[..., Path], format: str) -> None:
    """One reader of everything = three that share the rows, in whatever order they come."""
    dataset = open_dataset(numbered(24, format))
    alone = feed_of(dataset, 12, seed=5)
    (whole,), (labels,) = alone.inputs(5, 0, 12), alone.targets(5, 0, 12)
    shared = feed_of(dataset, 12, seed=5)
    parts = {start: shared.inputs(5, start, stop)[0] for start, stop in ((9, 12), (0, 5), (5, 6), (6, 9))}
    assert torch.equal(torch.cat([parts[start] for start in sorted(parts)]), whole)
    assert torch.equal(torch.cat([shared.targets(5, *ends)[0] for ends in ((0, 5), (5, 12))]), labels)
    assert shared.inputs(5, 4, 4)[0].shape == (0, SIZE, SIZE, 3)


def test_crops_differ_by_epoch_and_seed_but_not_by_batch_size(ten: Dataset) -> None:
    first = images_of(feed_of(ten, 5), 2, 5)
    assert torch.equal(first, images_of(feed_of(ten, 2), 5, 2))
    assert not torch.equal(first, images_of(feed_of(ten, 5, seed=1), 2, 5))
    order = [feed_of(ten, 10).targets(epoch, 0, 10)[0] for epoch in range(2)]
    crops = [feed_of(ten, 10).inputs(epoch, 0, 10)[0][labels.argsort()] for epoch, labels in enumerate(order)]
    assert not torch.equal(*crops)


def test_evaluation_is_in_order_and_the_same_every_time(ten: Dataset) -> None:
    feed = feed_of(ten, 4, is_training=False)
    assert [feed.targets(batch, 0, rows)[0].tolist() for batch, rows in ((0, 4), (1, 4), (2, 2))] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]
    ]  # fmt: skip
    assert torch.equal(feed.inputs(1, 0, 4)[0], feed.inputs(1, 0, 4)[0])


def test_numbers_layout_and_type_are_as_asked(ten: Dataset) -> None:
    feed = feed_of(ten, 4, Settings(precision="fp64", channels_last=True))
    (images,) = ReadAhead(feed, torch.device("cpu")).inputs(0, 0, 4)
    assert (images.shape, images.dtype) == ((4, 3, SIZE, SIZE), torch.float64)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, feed.finish(feed.inputs(0, 0, 4)[0]))


def test_an_image_that_cannot_be_decoded_stops_with_its_place_or_is_blank(
    tmp_path: Path, encode: Callable[..., bytes]
) -> None:
    write_images(tmp_path / "set", zip([encode(), encode()[:300], encode()], range(3)), "ofrecord")
    dataset = open_dataset(tmp_path / "set")
    with pytest.raises(DataError, match=r"part-00000, record 1 at byte 1,050 is not an image"):
        feed_of(dataset, 3).inputs(0, 0, 3)
    (images,) = feed_of(dataset, 3, is_training=False, on_corrupt="skip").inputs(0, 0, 3)
    assert [bool(image.eq(118).all()) for image in images] == [False, True, False]


class Stuck:
    """A dataset on a disk that does not answer for a while."""

    file_starts = ()

    def __len__(self) -> int:
        return 4

    def encoded(self, index: int) -> bytes:
        time.sleep(1.5)
        return b""


def test_a_disk_that_does_not_answer_is_an_error_after_a_while() -> None:
    with pytest.raises(DataError, match=r"rows of batch 0 were not read within 0\.1 s"):
        feed_of(Stuck(), 4, Settings(timeout_s=0.1)).inputs(0, 0, 4)
