"""Images for a run: each worker reads the rows it needs, ahead of time, and every worker agrees on which they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stagewright.data.augment import EvalTransform, TrainTransform, Transform
from stagewright.data.loader import Batch, Loader, Range, Want
from stagewright.data.source import Dataset, OnCorrupt
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

    @property
    def num_rows(self) -> int:
        """The images of an epoch."""
        return len(self.dataset)

    def settle(self, plan: Plan, settings: Settings) -> None:
        """Learns which rows this worker needs."""
        worker = int(os.environ.get("RANK", "0"))
        threads = min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // plan.replicas[0]))
        wants: tuple[tuple[Want, int, int], ...] = (("images", 0, threads), ("labels", len(plan.stages) - 1, 0))
        for want, stage, num_workers in wants:
            loader = Loader(
                dataset=self.dataset, batch=plan.batch, row_ranges=_Rows(plan, stage, worker), want=want,
                transform=self._transform, seed=self._seed, shuffle=self._is_training, keep_last=not self._is_training,
                num_workers=num_workers, device=_target_device(settings),
                dtype=torch.float64 if settings.precision == "fp64" else torch.float32, on_corrupt=self._on_corrupt,
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
        self._kept[self._next] = dict(zip(self._loader.row_ranges(batch.rows), tensors, strict=True))
        self._next += 1


def _target_device(settings: Settings) -> torch.device | None:
    """Where the rows are wanted: on this worker's card, or None, which leaves them on the host."""
    return pick_device(settings) if settings.device == "cuda" else None
