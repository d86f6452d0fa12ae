"""Images for a run: each worker reads the rows it needs, ahead of time, and every worker agrees on which they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stagewright.data.augment import EvalTransform, TrainTransform
from stagewright.data.loader import Batch, Loader, Range, Want
from stagewright.data.opening import open_dataset
from stagewright.data.source import Dataset
from stagewright.plan import Plan
from stagewright.runtime.settings import Settings

DEFAULT_SIZE = 224


class DataFeed:
    """Rows of a dataset, epoch after epoch; images where the first stage is, labels where the last one is."""

    def __init__(self, dataset: Dataset, *, size: int, seed: int, is_training: bool, num_workers: int = 2) -> None:
        self.dataset, self._seed, self._is_training = dataset, seed, is_training
        self._size, self._num_workers = size, num_workers
        self._streams: dict[Want, _Stream] = {}

    @property
    def num_rows(self) -> int:
        """The images of an epoch."""
        return len(self.dataset)

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return self.dataset.num_classes

    def settle(self, plan: Plan, settings: Settings) -> None:
        """Learns which rows this worker needs."""
        worker = int(os.environ.get("RANK", "0"))
        transform = (
            TrainTransform(size=self._size)
            if self._is_training
            else EvalTransform(size=self._size, shorter=max(self._size, self._size * 256 // 224))
        )
        wants: tuple[tuple[Want, int], ...] = (("images", 0), ("labels", len(plan.stages) - 1))
        for want, stage in wants:
            loader = Loader(
                dataset=self.dataset, batch=plan.batch, row_ranges=_Rows(plan, stage, worker), want=want,
                transform=transform, seed=self._seed, shuffle=self._is_training, keep_last=not self._is_training,
                num_workers=self._num_workers if want == "images" else 0, device=target_device(settings),
                dtype=torch.float64 if settings.precision == "fp64" else torch.float32,
                channels_last=settings.channels_last, timeout_s=settings.timeout_s,
            )  # fmt: skip
            self._streams[want] = _Stream(loader)

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return (self._streams["images"].rows(batch, start, stop),)

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return (self._streams["labels"].rows(batch, start, stop),)


class _Rows:
    """The row ranges that a worker has in a stage, for a batch of any size."""

    def __init__(self, plan: Plan, stage: int, worker: int) -> None:
        self.plan, self.stage, self.worker = plan, stage, worker

    def __call__(self, rows: int) -> tuple[Range, ...]:
        members = self.plan.workers[self.stage]
        if self.worker not in members:
            return ()
        plan = replace(self.plan, batch=rows, num_microbatches=min(rows, self.plan.num_microbatches))
        shares = (share for number in range(plan.num_microbatches) for share in plan.shares(self.stage, number))
        own = members.index(self.worker)
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
        ranges = self._loader.row_ranges
        wanted = ranges(batch.rows) if callable(ranges) else ranges
        self._kept[self._next] = dict(zip(wanted, tensors, strict=True))
        self._next += 1


def target_device(settings: Settings) -> torch.device | None:
    """Where the rows are wanted; None leaves them on the host."""
    return torch.device("cuda", torch.cuda.current_device()) if settings.device == "cuda" else None


def open_feed(path: str, options: Mapping[str, Any], *, is_training: bool = True) -> DataFeed:
    """The images of a folder as a feed."""
    return DataFeed(
        open_dataset(path), size=options["image_size"] or DEFAULT_SIZE, seed=options["seed"], is_training=is_training
    )
