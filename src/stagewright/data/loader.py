"""Batches of an epoch, from any position, with rows decoded ahead of time by threads.

    epoch order   17 4 88 │ 23 9 61 │ 5 …          position 3 = the second batch of three
    row ranges       ▔▔▔▔      ▔▔▔▔                (1, 3): this worker needs the last two rows of each batch
    threads       read, decode, crop, resize     →   bytes (rows, size, size, 3), pinned
    consumer      copy to the device, normalise  →   numbers (rows, 3, size, size)

Threads, not the processes of torch's DataLoader: decoding and resizing run without the interpreter's lock (two threads
decode twice as much), no process is forked under running collectives, and bytes land in the tensor that is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stagewright.data.order import Draw, draw_uniform, epoch_order
from stagewright.data.pixels import TrainTransform, Transform, normalise, read_crop
from stagewright.data.source import Dataset, OnCorrupt
from stagewright.errors import DataError, UsageError

Range: TypeAlias = tuple[int, int]
Want: TypeAlias = Literal["images", "labels", "both"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one batch that were asked for: a tensor a range, or () for what was not wanted."""

    position: int
    rows: int
    images: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]


@dataclass(kw_only=True)
class Loader:
    """The batches of one epoch from `start` on; what a row holds depends on (seed, epoch, position) alone.

    `row_ranges` gives the rows that are needed here of a batch of so many rows. With a `device`, bytes are copied
    there and normalised there; without, tensors stay here.
    """

    dataset: Dataset
    batch: int
    row_ranges: Callable[[int], tuple[Range, ...]]
    want: Want = "both"
    transform: Transform = field(default_factory=TrainTransform)
    seed: int = 0
    epoch: int = 0
    start: int = 0
    shuffle: bool = True
    keep_last: bool = False
    num_workers: int = 0
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    on_corrupt: OnCorrupt = "stop"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.batch < 1 or not 0 <= self.start <= len(self.dataset):
            raise UsageError(f"batch {self.batch} or start {self.start} is not in an epoch of {len(self.dataset)} rows")
        self._ranges(self.batch)
        self._order = epoch_order(self.dataset, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        self.position, self.skipped = self.start, 0

    def __len__(self) -> int:
        """The batches that are left."""
        return len(self._positions())

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left, in order; leaving the loop early ends the threads."""
        pool = ThreadPoolExecutor(self.num_workers, "stagewright-data") if self.num_workers else None
        begun: deque[tuple[Batch, list[Callable[[], int]]]] = deque()
        try:
            for position in self._positions():
                begun.append(self._begin(position, pool))
                if len(begun) == (2 if pool else 1):
                    yield self._finish(*begun.popleft())
            while begun:
                yield self._finish(*begun.popleft())
        finally:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def for_epoch(self, epoch: int, start: int = 0) -> Loader:
        """The same loader for another epoch."""
        return replace(self, epoch=epoch, start=start)

    def _positions(self) -> range:
        """Where the batches that are left begin; an incomplete last one counts only where it is kept."""
        left = len(self.dataset) - self.position
        return range(self.position, self.position + (left if self.keep_last else left - left % self.batch), self.batch)

    def _ranges(self, rows: int) -> tuple[Range, ...]:
        ranges = self.row_ranges(rows)
        for start, stop in ranges:
            if not 0 <= start <= stop <= rows:
                raise UsageError(f"row range ({start}, {stop}) does not fit a batch of {rows} rows")
        return ranges

    # ── one batch ───────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, position: int, pool: ThreadPoolExecutor | None) -> tuple[Batch, list[Callable[[], int]]]:
        """The batch at this position as bytes still to be read, and calls that end when some of them are."""
        rows = min(self.batch, len(self.dataset) - position)
        ranges, side = self._ranges(rows), self.transform.size
        empty = partial(torch.empty, pin_memory=self.device is not None and self.device.type == "cuda")
        images = tuple(
            empty((stop - start, side, side, 3), dtype=torch.uint8) for start, stop in ranges if self.want != "labels"
        )
        labels = tuple(empty(stop - start, dtype=torch.int64) for start, stop in ranges if self.want != "images")
        jobs: list[Callable[[], int]] = []
        for place, (start, stop) in enumerate(ranges):
            for first in range(0, stop - start, 8):
                some = slice(first, first + 8)
                outs = (images[place][some] if images else None, labels[place][some] if labels else None)
                jobs.append(partial(self._fill, position + start + first, *outs))
        if pool is not None:
            jobs = [partial(self._wait, pool.submit(job), position) for job in jobs]
        return Batch(position=position, rows=rows, images=images, labels=labels), jobs

    def _wait(self, future: Future[int], position: int) -> int:
        """What the job gave, which is not waited for for ever; its exception is raised here."""
        try:
            return future.result(timeout=self.timeout_s)
        except FutureTimeoutError as error:
            raise DataError(
                f"the batch at position {position} was not read within {self.timeout_s:g} s",
                "look at the disk it comes from, or allow more with timeout_s",
            ) from error

    def _finish(self, batch: Batch, jobs: list[Callable[[], int]]) -> Batch:
        """The batch when it has been read, as numbers on the device."""
        self.skipped += sum(job() for job in jobs)
        images = map(self._placed, batch.images)
        numbers = tuple(normalise(each, dtype=self.dtype, channels_last=self.channels_last) for each in images)
        self.position = batch.position + batch.rows
        return replace(batch, images=numbers, labels=tuple(map(self._placed, batch.labels)))

    def _placed(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; the copy of a pinned one overlaps with computation."""
        return tensor if self.device is None else tensor.to(self.device, non_blocking=True)

    def _fill(self, position: int, pixels: Tensor | None, labels: Tensor | None) -> int:
        """Reads rows from this position on until the tensors are full; gives the number of images left blank."""
        num = max(len(out) for out in (pixels, labels) if out is not None)
        positions = np.arange(position, position + num)
        draws = draw_uniform(self.seed, self.epoch, Draw.CROP, positions, num=self.transform.num_draws)
        blank = 0
        for row, index in enumerate(self._order[positions].tolist()):
            if pixels is not None:
                encoded, crop_of = self.dataset.encoded(index), partial(self.transform.crop, draws=draws[row].tolist())
                try:
                    pixels[row].numpy()[...] = read_crop(encoded, crop_of, self.transform.size)
                except DataError as error:
                    if self.on_corrupt == "stop":
                        raise DataError(f"{self.dataset.where(index)} {error.what}", error.todo) from error
                    pixels[row] = 118  # ImageNet's mean brightness
                    blank += 1
            if labels is not None:
                labels[row] = self.dataset.label(index)
        return blank
