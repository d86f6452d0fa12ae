"""Batches of an epoch, from any position, with rows decoded ahead of time by threads.

    epoch order   17 4 88 │ 23 9 61 │ 5 …          position 3 = the second batch of three
    row ranges       ▔▔▔▔      ▔▔▔▔                (1, 3): this worker needs the last two rows of each batch
    threads       read, decode, crop, resize     →   bytes (rows, size, size, 3), pinned
    consumer      copy to the device, normalise  →   numbers (rows, 3, size, size)

Threads, not processes: decoding and resizing run without the interpreter's lock (two threads decode twice as much),
nothing is pickled, no process can be left behind, and bytes land in the very tensor that is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from stagewright.data.augment import TrainTransform, Transform, normalise
from stagewright.data.order import SHUFFLE_BUFFER, epoch_order
from stagewright.data.pixels import choose_decoder
from stagewright.data.reading import RowReader
from stagewright.data.source import Dataset, OnCorrupt
from stagewright.data.synthetic import SyntheticImages
from stagewright.errors import DataError, UsageError

Range: TypeAlias = tuple[int, int]
_RowRanges: TypeAlias = tuple[Range, ...] | Callable[[int], tuple[Range, ...]]
Want: TypeAlias = Literal["images", "labels", "both"]
_ROWS_PER_JOB = 8


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one batch that were asked for: a tensor a range, or () for what was not wanted."""

    position: int
    rows: int
    images: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A batch that is being read: the tensors to fill, and waits that give the number of images left blank."""

    position: int
    rows: int
    pixels: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    waits: tuple[Callable[[], int], ...]


@dataclass(kw_only=True)
class Loader:
    """The batches of one epoch from `start` on; what a row holds depends on (seed, epoch, position) alone.

    `row_ranges` are the rows of a batch that are needed here, or a function of the batch's rows where the last,
    smaller batch is kept. With a `device`, bytes are copied there and normalised there; without, tensors stay here.
    """

    dataset: Dataset
    batch: int
    row_ranges: _RowRanges
    want: Want = "both"
    transform: Transform = field(default_factory=TrainTransform)
    seed: int = 0
    epoch: int = 0
    start: int = 0
    shuffle: bool = True
    shuffle_buffer: int = SHUFFLE_BUFFER
    keep_last: bool = False
    num_workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    decoder: str = "auto"
    on_corrupt: OnCorrupt = "stop"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._check()
        self.decoder = decoder = choose_decoder(self.decoder)
        order = epoch_order(
            self.dataset, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle, buffer=self.shuffle_buffer
        )
        self._reader = RowReader(
            dataset=self.dataset,
            order=order,
            seed=self.seed,
            epoch=self.epoch,
            transform=self.transform,
            decoder=decoder,
            on_corrupt=self.on_corrupt,
        )
        self.position = self.start
        self.skipped = 0

    def __len__(self) -> int:
        """The batches that are left."""
        return len(self._positions())

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left, in order; leaving the loop early ends the threads."""
        positions = iter(self._positions())
        pool = ThreadPoolExecutor(self.num_workers, "stagewright-data") if self.num_workers else None
        ahead = self.prefetch if pool else 1
        pending: deque[_Pending] = deque()
        try:
            while True:
                while len(pending) < ahead and (position := next(positions, None)) is not None:
                    pending.append(self._begin(position, pool))
                if not pending:
                    return
                batch = self._finish(pending.popleft())
                self.position = batch.position + batch.rows
                yield batch
        finally:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def state(self) -> dict[str, int]:
        """Where the epoch stands after the batches given out: seed, epoch, and the `start` that goes on from here."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def for_epoch(self, epoch: int, start: int = 0) -> Loader:
        """The same loader for another epoch."""
        return replace(self, epoch=epoch, start=start)

    # ── one batch ───────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, position: int, pool: ThreadPoolExecutor | None) -> _Pending:
        """Tensors for the batch at this position, and the jobs that fill them, under way where there is a pool."""
        rows = min(self.batch, len(self.dataset) - position)
        ranges = self._ranges(rows)
        files = not isinstance(self.dataset, SyntheticImages)
        shape = (self.transform.size, self.transform.size, 3)
        pixels = tuple(self._empty(stop - start, *shape) for start, stop in ranges if files and self.want != "labels")
        labels = tuple(self._empty(stop - start) for start, stop in ranges if files and self.want != "images")
        jobs = self._jobs(position, ranges, pixels, labels) if files else ()
        waits = tuple(self._wait_for(pool.submit(job), position) if pool else job for job in jobs)
        return _Pending(position=position, rows=rows, pixels=pixels, labels=labels, waits=waits)

    def _jobs(
        self, position: int, ranges: tuple[Range, ...], pixels: tuple[Tensor, ...], labels: tuple[Tensor, ...]
    ) -> Iterator[Callable[[], int]]:
        """A job for every few rows of every range."""
        for place, (start, stop) in enumerate(ranges):
            for first in range(0, stop - start, _ROWS_PER_JOB):
                rows = slice(first, first + _ROWS_PER_JOB)
                images_out = pixels[place][rows] if pixels else None
                labels_out = labels[place][rows] if labels else None
                yield partial(self._reader.fill, position + start + first, images_out, labels_out)

    def _wait_for(self, future: Future[int], position: int) -> Callable[[], int]:
        """A call that waits for the job's end, but not for ever; its exception is raised here."""

        def wait() -> int:
            try:
                return future.result(timeout=self.timeout_s)
            except FutureTimeoutError as error:
                raise DataError(
                    f"the batch at position {position} was not read within {self.timeout_s:g} s",
                    "look at the disk it comes from, or allow more with timeout_s",
                ) from error

        return wait

    def _finish(self, pending: _Pending) -> Batch:
        """The batch when it has been read, as numbers."""
        self.skipped += sum(wait() for wait in pending.waits)
        if isinstance(self.dataset, SyntheticImages):
            return self._made(self.dataset, pending.position, pending.rows)
        return Batch(
            position=pending.position,
            rows=pending.rows,
            images=tuple(self._numbers(pixels) for pixels in pending.pixels),
            labels=tuple(self._placed(labels) for labels in pending.labels),
        )

    def _made(self, dataset: SyntheticImages, position: int, rows: int) -> Batch:
        """A batch of rows that no file holds, made on the device."""
        images: list[Tensor] = []
        labels: list[Tensor] = []
        for start, stop in self._ranges(rows):
            indices = torch.from_numpy(self._reader.order[position + start : position + stop]).to(self.device)
            if self.want != "labels":
                layout = torch.channels_last if self.channels_last else torch.contiguous_format
                images.append(dataset.images(indices, self.dtype).contiguous(memory_format=layout))
            if self.want != "images":
                labels.append(dataset.labels(indices))
        return Batch(position=position, rows=rows, images=tuple(images), labels=tuple(labels))

    # ── tensors ─────────────────────────────────────────────────────────────────────────────────────────

    def _empty(self, rows: int, *shape: int) -> Tensor:
        """Room for bytes of pixels, or for labels where there is no shape; pinned where the device is a GPU."""
        dtype = torch.uint8 if shape else torch.int64
        return torch.empty((rows, *shape), dtype=dtype, pin_memory=self._pinned())

    def _numbers(self, pixels: Tensor) -> Tensor:
        """The pixels as numbers, on the device."""
        images = normalise(self._placed(pixels), self.transform, dtype=self.dtype, channels_last=self.channels_last)
        return images.pin_memory() if self._pinned() and self.device is None else images

    def _placed(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; the copy of a pinned one overlaps with computation."""
        return tensor if self.device is None else tensor.to(self.device, non_blocking=True)

    def _pinned(self) -> bool:
        return self.pin_memory and torch.cuda.is_available()

    # ── rows ────────────────────────────────────────────────────────────────────────────────────────────

    def _positions(self) -> range:
        """Where the batches that are left begin; an incomplete last one counts only where it is kept."""
        left = len(self.dataset) - self.position
        return range(self.position, self.position + (left if self.keep_last else left - left % self.batch), self.batch)

    def _ranges(self, rows: int) -> tuple[Range, ...]:
        """The ranges needed of a batch of this many rows."""
        ranges = self.row_ranges(rows) if callable(self.row_ranges) else self.row_ranges
        for start, stop in ranges:
            if not 0 <= start <= stop <= rows:
                raise UsageError(
                    f"row range ({start}, {stop}) does not fit a batch of {rows} rows",
                    "give row_ranges as a function of the rows, or drop the last batch",
                )
        return tuple(ranges)

    def _check(self) -> None:
        """Refuses numbers that mean nothing, before anything is read."""
        if self.batch < 1 or self.num_workers < 0 or self.prefetch < 1:
            raise UsageError(
                f"batch {self.batch}, num_workers {self.num_workers} and prefetch {self.prefetch} cannot be",
                "give at least 1, 0 and 1",
            )
        if not 0 <= self.start <= len(self.dataset):
            raise UsageError(f"start {self.start} is not in an epoch of {len(self.dataset)} images")
        if self.want not in ("images", "labels", "both") or self.on_corrupt not in ("stop", "skip"):
            raise UsageError(
                f"want {self.want!r} or on_corrupt {self.on_corrupt!r} is not known",
                "give images, labels or both; stop or skip",
            )
        self._ranges(self.batch)
