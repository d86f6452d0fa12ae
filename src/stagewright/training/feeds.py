"""Rows for a run: each worker reads those that it needs, and every worker agrees on which they are.

DataFeed       images, by threads of its own
TextFeed       tokens, as many a row as the batch's longest row has

The items of any map-style dataset are dataset.py's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from stagewright.data.loader import Batch, Loader, Range, Want
from stagewright.data.packing import TokenRows, bucket_lengths, padded_to, rows_of_batch
from stagewright.data.pixels import EvalTransform, TrainTransform, Transform
from stagewright.data.source import Dataset, Indices, OnCorrupt
from stagewright.errors import DataError
from stagewright.models import Layered
from stagewright.models.loss import IGNORED
from stagewright.plan import Plan
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import pick_device

_MAX_THREADS = 8
"""Threads that read images for one worker, at most."""


class DataFeed:
    """Rows of a dataset, epoch after epoch; images where the first stage is, labels where the last one is."""

    def __init__(
        self, dataset: Dataset, *, size: int, seed: int = 0, is_training: bool = True, crop_area: float = 0.08,
        on_corrupt: OnCorrupt = "stop",
    ) -> None:  # fmt: skip
        self.dataset, self._seed, self._is_training, self._on_corrupt = dataset, seed, is_training, on_corrupt
        self._transform: Transform = TrainTransform(size=size, area=(crop_area, 1.0))
        if not is_training:
            self._transform = EvalTransform(size=size, shorter=max(size, size * 256 // 224))
        self._streams: dict[Want, _Stream] = {}

    @property
    def about(self) -> str:
        """Which data these are, in short."""
        return f"{len(self.dataset):,} images, the first in {self.dataset.where(0)}"

    def settle(self, plan: Plan, settings: Settings) -> None:
        """Learns which rows this worker needs."""
        worker = int(os.environ.get("RANK", "0"))
        threads = min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // plan.replicas[0]))
        device = pick_device(settings) if settings.device == "cuda" else None  # which leaves them on the host
        wants: tuple[tuple[Want, int, int], ...] = (("images", 0, threads), ("labels", len(plan.stages) - 1, 0))
        for want, stage, num_workers in wants:
            loader = Loader(
                dataset=self.dataset, batch=plan.batch, row_ranges=partial(_ranges, plan, stage, worker), want=want,
                transform=self._transform, seed=self._seed, shuffle=self._is_training, keep_last=not self._is_training,
                num_workers=num_workers, device=device,
                dtype=torch.float64 if settings.precision == "fp64" else torch.float32, on_corrupt=self._on_corrupt,
                channels_last=settings.channels_last, timeout_s=settings.timeout_s,
            )  # fmt: skip
            self._streams[want] = _Stream(loader)

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return (self._streams["images"].rows(batch, start, stop),)

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return (self._streams["labels"].rows(batch, start, stop),)


def _ranges(plan: Plan, stage: int, worker: int, rows: int) -> tuple[Range, ...]:
    """The row ranges that a worker has in a stage, of a batch of so many rows."""
    members = plan.workers[stage]
    if worker not in members:
        return ()
    plan = replace(plan, batch=rows, num_microbatches=min(rows, plan.num_microbatches))
    shares = (share for number in range(plan.num_microbatches) for share in plan.shares(stage, number))
    own = members.index(worker)
    return tuple((share.start, share.stop) for share in shares if share.replica == own)


class _Stream:
    """One kind of rows, batch after batch; batches that are asked for out of order are kept meanwhile."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._per_epoch = len(loader)
        self._next = 0
        self._batches: Iterator[Batch] = iter(())
        self._kept: dict[int, dict[Range, Tensor]] = {}

    def rows(self, batch: int, start: int, stop: int) -> Tensor:
        """The rows start … stop − 1 of a batch, given out once."""
        if batch not in self._kept and batch != self._next:
            self._kept.clear()
            self._begin(batch)
        while batch not in self._kept:
            self._read()
        found = self._kept[batch].pop((start, stop))
        if not self._kept[batch]:
            del self._kept[batch]
        return found

    def _begin(self, batch: int) -> None:
        epoch, place = divmod(batch, self._per_epoch)
        self._batches = iter(self._loader.for_epoch(epoch, place * self._loader.batch))
        self._next = batch

    def _read(self) -> None:
        if self._next % self._per_epoch == 0:
            self._begin(self._next)
        batch = next(self._batches)
        tensors = batch.images if self._loader.want == "images" else batch.labels
        self._kept[self._next] = dict(zip(self._loader.row_ranges(batch.rows), tensors, strict=True))
        self._next += 1


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
