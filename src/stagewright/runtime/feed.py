"""Where rows come from: any worker can ask for any rows of any batch, and every worker gets the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from stagewright.errors import DataError
from stagewright.models import TensorSpec
from stagewright.models.loss import IGNORED
from stagewright.runtime.precision import AUTOCAST


class Feed(Protocol):
    """Rows of batches, by number."""

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        """The model's inputs for rows start … stop − 1 of a batch."""

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        """The loss's targets for the same rows."""


def _lengths_of(feed: Feed) -> tuple[int, ...]:
    """The lengths that the rows of a feed may have, batch by batch; none where all are as in the model's sample."""
    lengths = tuple(getattr(feed, "lengths", ()))
    return lengths if len(lengths) > 1 else ()


def _length_of(feed: Feed, batch: int) -> int | None:
    """The length of a batch's rows, which every worker knows; None where all are as in the model's sample."""
    return int(getattr(feed, "length")(batch)) if _lengths_of(feed) else None  # noqa: B009  only some feeds have it


class FunctionFeed:
    """Rows from a function of (batch, start, stop) that returns (inputs, targets)."""

    def __init__(self, rows: Callable[[int, int, int], tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
        self._rows = rows

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._rows(batch, start, stop)[0]

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._rows(batch, start, stop)[1]


class ReadAhead:
    """A feed whose rows are made ahead of time by threads, and pinned where they go to a card.

    What such a feed has left to be done with its inputs there, it says as `finish`.
    """

    def __init__(self, feed: Feed, device: torch.device, *, batches: int = 2, threads: int = 2) -> None:
        self.feed, self._device, self._batches = feed, device, batches
        self.lengths, self.length = _lengths_of(feed), partial(_length_of, feed)
        self._pool = ThreadPoolExecutor(threads, "stagewright-rows")
        self._coming: dict[tuple[str, int, int, int], Future[list[Tensor]]] = {}

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._take("inputs", batch, start, stop)

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._take("targets", batch, start, stop)

    def _take(self, which: str, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        for each in range(batch, batch + self._batches + 1):
            if (key := (which, each, start, stop)) not in self._coming:
                self._coming[key] = self._pool.submit(self._make, *key)
        given = self._coming.pop((which, batch, start, stop)).result()
        # torch keeps memory that it pinned until copies from it are over.
        moved = [each.to(self._device, non_blocking=each.is_pinned()) for each in given]
        finish = getattr(self.feed, "finish", None) if which == "inputs" else None
        return moved if finish is None else [finish(each) for each in moved]

    def _make(self, which: str, batch: int, start: int, stop: int) -> list[Tensor]:
        made = getattr(self.feed, which)(batch, start, stop)
        pins = self._device.type == "cuda"
        return [each.pin_memory() if pins and each.device.type == "cpu" else each for each in made]


class CheckedFeed:
    """A feed whose rows come to a worker's device, wherever they were made, and are what was asked for."""

    def __init__(self, feed: Feed, device: torch.device, *, all_labels_count: bool) -> None:
        """`all_labels_count` says that the loss is known as a mean over rows alone."""
        self._feed, self._device, self._all_labels_count = feed, device, all_labels_count
        self.lengths, self.length = _lengths_of(feed), partial(_length_of, feed)

    def inputs(self, specs: Sequence[TensorSpec], batch: int, start: int, stop: int) -> list[Tensor]:
        """The model's inputs for some rows, in the formats in which the first stage takes them."""
        made = self._take("inputs", specs, batch, start, stop)
        return [tensor.to(spec.dtype) for tensor, spec in zip(made, specs)]

    def targets(self, specs: Sequence[TensorSpec], batch: int, start: int, stop: int) -> list[Tensor]:
        """The loss's targets for some rows."""
        made = self._take("targets", specs, batch, start, stop)
        # Labels that most losses leave out would be counted.
        if self._all_labels_count and any(
            not each.is_floating_point() and bool(each.eq(IGNORED).any()) for each in made
        ):
            raise DataError(
                f"labels of batch {batch} are {IGNORED}, which losses leave out: sw.mean_loss does not know how many "
                "count",
                "say it: sw.mean_loss(loss, count=lambda labels: (labels != -100).sum())",
            )
        return made

    def _take(self, what: str, specs: Sequence[TensorSpec], batch: int, start: int, stop: int) -> list[Tensor]:
        """Rows on the device, as they were asked for: too few would be divided by too many, others left out."""
        given: Sequence[Tensor] = getattr(self._feed, what)(batch, start, stop)
        where = f"{what} of batch {batch}, rows {start} to {stop - 1}"
        if len(given) != len(specs):
            names = ", ".join(spec.name for spec in specs) or "none"
            raise DataError(f"the data gave {len(given)} {where}", f"the model takes {len(specs)}: {names}")
        for tensor, spec in zip(given, specs):
            expected = (stop - start, *spec.shape_per_row)
            if tuple(tensor.shape) != expected:
                raise DataError(
                    f"the data gave '{spec.name}' with shape {tuple(tensor.shape)} for the {where}",
                    f"give {expected}: rows first, and as in the sample that the model was made with",
                )
            is_rounded = tensor.dtype == torch.float32 and spec.dtype in AUTOCAST.values()
            if tensor.dtype != spec.dtype and not is_rounded:
                raise DataError(
                    f"the data gave '{spec.name}' as {tensor.dtype} for the {where}",
                    f"give {spec.dtype}, as in the sample that the model was made with",
                )
        return [_moved(tensor, self._device) for tensor in given]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; to a card it goes by a pinned copy, while the host goes on."""
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor.to(device)  # waits: whoever made a pinned tensor may fill it again for the next batch
    return tensor.pin_memory().to(device, non_blocking=True)


class SyntheticFeed:
    """Random rows that are made once, on the device, and served for every batch."""

    def __init__(
        self, inputs: Sequence[TensorSpec], targets: Sequence[TensorSpec], *,
        num_classes: int, seed: int, device: torch.device, channels_last: bool = False,
    ) -> None:  # fmt: skip
        self._inputs, self._targets, self._device = tuple(inputs), tuple(targets), device
        self._num_classes, self._seed, self._channels_last = num_classes, seed, channels_last
        self._made: dict[tuple[int, int, int], list[Tensor]] = {}

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._rows(self._inputs, 0, start, stop)

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._rows(self._targets, 1, start, stop)

    def _rows(self, specs: Sequence[TensorSpec], which: int, start: int, stop: int) -> list[Tensor]:
        if (which, start, stop) not in self._made:
            rows = [[self._row(spec, 2 * row + which) for spec in specs] for row in range(start, stop)]
            made = [torch.stack(parts).to(self._device) for parts in zip(*rows)]
            if self._channels_last:
                last = torch.channels_last
                made = [each.contiguous(memory_format=last) if each.dim() == 4 else each for each in made]
            self._made[which, start, stop] = made
        return self._made[which, start, stop]

    def _row(self, spec: TensorSpec, number: int) -> Tensor:
        # Each row has a generator of its own, so that it does not depend on who asks for which range.
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        if spec.dtype.is_floating_point:
            return torch.randn(spec.shape_per_row, generator=generator).to(spec.dtype)
        return torch.randint(self._num_classes, spec.shape_per_row, generator=generator, dtype=spec.dtype)
