"""Rows for a run: any worker reads any rows of any batch, and every worker agrees on which they are.

DataFeed       images
TextFeed       tokens, as many a row as the batch's longest row has

The items of any map-style dataset are dataset.py's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from stagewright.data.order import Draw, draw_uniform, epoch_order
from stagewright.data.packing import TokenRows, bucket_lengths, padded_to, rows_of_batch
from stagewright.data.pixels import EvalTransform, TrainTransform, Transform, normalise, read_crop
from stagewright.data.source import Dataset, Indices, OnCorrupt
from stagewright.errors import DataError
from stagewright.models import Layered
from stagewright.models.loss import IGNORED
from stagewright.plan import Plan
from stagewright.runtime.settings import Settings

_MAX_THREADS = 8
"""Threads that read images for one worker, at most."""
_IMAGENET_GREY = 118
"""The mean brightness of ImageNet, for an image that cannot be read."""


class DataFeed:
    """Rows of a dataset, epoch after epoch; what a row holds depends on the seed, the epoch and its place there alone.

    Threads, not the processes of torch's DataLoader: decoding and resizing run without the interpreter's lock (two
    threads decode twice as much), and no process is forked under running collectives. What they make are bytes, which
    `finish` makes numbers of, where a card does that.
    """

    may_be_read_ahead = True

    def __init__(
        self, dataset: Dataset, *, size: int, seed: int = 0, is_training: bool = True, crop_area: float = 0.08,
        on_corrupt: OnCorrupt = "stop",
    ) -> None:  # fmt: skip
        self.dataset, self._seed, self._is_training, self._on_corrupt = dataset, seed, is_training, on_corrupt
        self._transform: Transform = TrainTransform(size=size, area=(crop_area, 1.0))
        if not is_training:
            self._transform = EvalTransform(size=size, shorter=max(size, size * 256 // 224))
        self._order = lru_cache(2)(self._find_order)

    @property
    def about(self) -> str:
        """Which data these are, in short."""
        return f"{len(self.dataset):,} images, the first in {self.dataset.where(0)}"

    def settle(self, plan: Plan, settings: Settings) -> None:
        """Learns how many rows a batch has, and what is made of them."""
        self._batch, self._timeout_s = plan.batch, settings.timeout_s
        dtype = torch.float64 if settings.precision == "fp64" else torch.float32
        self.finish = partial(normalise, dtype=dtype, channels_last=settings.channels_last)
        threads = min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // plan.replicas[0]))
        self._pool = ThreadPoolExecutor(threads, "stagewright-data")

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        """The images as bytes (rows, size, size, 3)."""
        epoch, positions = self._places(batch, start, stop)
        images = torch.empty((stop - start, *[self._transform.size] * 2, 3), dtype=torch.uint8)
        parts = [slice(first, first + 8) for first in range(0, stop - start, 8)]
        jobs = [self._pool.submit(self._fill, images[part], epoch, positions[part]) for part in parts]
        try:
            for job in jobs:
                job.result(timeout=self._timeout_s)
        except TimeoutError as error:
            raise DataError(
                f"rows of batch {batch} were not read within {self._timeout_s:g} s",
                "look at the disk that they come from, or allow more with --timeout",
            ) from error
        return (images,)

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        epoch, positions = self._places(batch, start, stop)
        return (torch.tensor([self.dataset.label(index) for index in self._order(epoch)[positions].tolist()]),)

    def _find_order(self, epoch: int) -> Indices:
        return epoch_order(self.dataset, seed=self._seed, epoch=epoch, shuffle=self._is_training)

    def _places(self, batch: int, start: int, stop: int) -> tuple[int, Indices]:
        """The epoch of some rows, and their places in it; an evaluation is one epoch, whose last batch may be short."""
        epoch, place = divmod(batch, len(self.dataset) // self._batch) if self._is_training else (0, batch)
        return epoch, np.arange(place * self._batch + start, place * self._batch + stop)

    def _fill(self, pixels: Tensor, epoch: int, positions: Indices) -> None:
        """Reads the images at some places of an epoch."""
        draws = draw_uniform(self._seed, epoch, Draw.CROP, positions, num=self._transform.num_draws)
        for row, index in enumerate(self._order(epoch)[positions].tolist()):
            encoded, crop_of = self.dataset.encoded(index), partial(self._transform.crop, draws=draws[row].tolist())
            try:
                pixels[row].numpy()[...] = read_crop(encoded, crop_of, self._transform.size)
            except DataError as error:
                if self._on_corrupt == "stop":
                    raise DataError(f"{self.dataset.where(index)} {error.what}", error.todo) from error
                pixels[row] = _IMAGENET_GREY


class TextFeed:
    """Rows of tokens, epoch after epoch; a model takes the columns that its inputs are called after.

    input_ids   a b c ·      what lacks is padding
    labels      a b c -100   the same, but for what does not count; shifted where the loss does not shift
    """

    may_be_read_ahead = True

    def __init__(
        self, rows: TokenRows, model: Layered, *, seed: int = 0, is_training: bool = True, lengths: int = 1
    ) -> None:
        self._rows, self._seed, self._is_training = rows, seed, is_training
        self._columns = [_column_of(spec.name, model) for spec in model.inputs]
        self._shifts = not getattr(model.loss, "shifts", False)
        self.lengths = bucket_lengths(rows.length, 1 if rows.is_even else lengths)
        """What rows are padded to; a batch has one of them."""
        self._size = 0
        self._positions = lru_cache(8)(self._find_positions)

    @property
    def about(self) -> str:
        """Which data these are, in short."""
        return f"{len(self._rows):,} rows of {self._rows.length:,} tokens of {', '.join(self._rows.tokens.about.files)}"

    def settle(self, plan: Plan, settings: Settings) -> None:
        """Learns how many rows a batch has."""
        self._size = plan.batch

    def length(self, batch: int) -> int:
        """The tokens that each row of a batch is padded to; every worker finds the same."""
        if len(self.lengths) == 1:
            return self.lengths[0]
        return padded_to(self._rows.lengths(self._positions(batch)).tolist(), self.lengths)

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        found = self._read(batch, start, stop)
        return [column(*found) for column in self._columns]

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        ids, counted, _ = self._read(batch, start, stop)
        labels = torch.where(counted, ids, IGNORED)
        if self._shifts:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)
        return [labels]

    def _find_positions(self, batch: int) -> Indices:
        """Which rows a batch has: of an evaluation those at its place, the last batch fewer."""
        if not self._is_training:
            return np.arange(batch * self._size, min((batch + 1) * self._size, len(self._rows)))
        windows = 16 if len(self.lengths) > 1 else None  # so many batches share out rows of about one length each
        return rows_of_batch(self._rows, batch, size=self._size, seed=self._seed, windows=windows)

    def _read(self, batch: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of some rows with their padding; which of them count; and which are no padding."""
        shape, padding = (stop - start, self.length(batch)), self._rows.tokens.about.padding
        ids = np.full(shape, padding, dtype=np.int64)
        counted, there = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        for row, position in enumerate(self._positions(batch)[start:stop].tolist()):
            found, counts = self._rows.read(position)
            ids[row, : len(found)], counted[row, : len(found)], there[row, : len(found)] = found, counts, True
        return torch.from_numpy(ids), torch.from_numpy(counted), torch.from_numpy(there)


_COLUMNS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "input_ids": lambda ids, counted, there: ids,
    "attention_mask": lambda ids, counted, there: there.long(),
    "token_type_ids": lambda ids, counted, there: torch.zeros_like(ids),
    "position_ids": lambda ids, counted, there: torch.arange(ids.size(1)).expand_as(ids).contiguous(),
}
"""What a model's input of this name gets."""


def _column_of(name: str, model: Layered) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What an input gets; the only one is the tokens, whatever it is called."""
    if len(model.inputs) == 1:
        return _COLUMNS["input_ids"]
    if name not in _COLUMNS:
        raise DataError(f"the model takes '{name}', which text does not have", f"text has {', '.join(_COLUMNS)}")
    return _COLUMNS[name]
