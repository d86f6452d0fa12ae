"""Rows for a run: any worker reads any rows of any batch, and every worker agrees on which they are.

DataFeed       images
TextFeed       tokens, as many a row as the batch's longest row has

The items of any map-style dataset are dataset.py's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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

                        the next token    masked ones    the answer c d to a prompt a b
    input_ids           a b c ·           a ? c ·        a b end ·
    decoder_input_ids                                    start c d ·
    labels              a b c             · b · ·        c d · ·

    Dots are padding, and −100 in labels, as what does not count; labels of the next token are shifted where the loss
    does not shift.
    """

    may_be_read_ahead = True

    def __init__(
        self, rows: TokenRows, model: Layered, *, seed: int = 0, is_training: bool = True, lengths: int = 1,
        mask: float = 0.15,
    ) -> None:  # fmt: skip
        self._rows, self._seed, self._is_training, self._mask = rows, seed, is_training, mask
        self._learns, self._start = model.learns, model.answer_start
        self._names = [_column_of(spec.name, model) for spec in model.inputs]
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
        found = self._columns(batch, start, stop)
        return [found[name] for name in self._names]

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return [self._columns(batch, start, stop)["labels"]]

    def _columns(self, batch: int, start: int, stop: int) -> dict[str, Tensor]:
        """What a model may take of some rows and what it is to learn, by name."""
        ids, counted, there = self._read(batch, start, stop)
        labels = torch.where(counted, ids, IGNORED)
        if self._learns == "masked":
            ids, labels = self._masked(batch, start, stop, ids, counted)
        elif self._learns == "answer":
            return self._answers(ids, labels)
        elif self._shifts:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)
        places = torch.arange(ids.size(1)).expand_as(ids).contiguous()
        beside = {"token_type_ids": torch.zeros_like(ids), "position_ids": places}
        return {"input_ids": ids, "attention_mask": there.long(), **beside, "labels": labels}

    def _masked(self, batch: int, start: int, stop: int, ids: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of which some are to be found again, and these; drawn anew for every epoch.

        Of those, 8 in 10 are hidden, one is another token and one stays (Devlin et al., "BERT", 2018, section 3.1).
        """
        about, epoch = self._rows.tokens.about, batch // (len(self._rows) // self._size) if self._is_training else 0
        places = self._positions(batch)[start:stop]
        drawn = draw_uniform(self._seed, Draw.MASK, epoch, places, num=3 * ids.size(1))
        choice, way, word = torch.from_numpy(drawn).reshape(*ids.shape, 3).unbind(-1)
        chosen = counted & (choice < self._mask) & ~torch.isin(ids, torch.tensor(about.special))
        others = (word * about.words).long()
        shown = torch.where(way < 0.8, torch.full_like(ids, about.mask or 0), torch.where(way < 0.9, others, ids))
        return torch.where(chosen, shown, ids), torch.where(chosen, ids, IGNORED)

    def _answers(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Prompts with their end, and what follows them, which an answer's start stands before."""
        about = self._rows.tokens.about
        prompts, answers = torch.full_like(ids, about.padding), torch.full_like(ids, about.padding)
        learned, there = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
        for row, first in enumerate(labels.ne(IGNORED).int().argmax(1).tolist()):
            prompt = [*ids[row, :first].tolist(), *([] if about.end is None else [about.end])]
            prompts[row, : len(prompt)], there[row, : len(prompt)] = torch.tensor(prompt), 1
            answers[row, 0], answers[row, 1 : ids.size(1) - first] = self._start or 0, ids[row, first:-1]
            learned[row, : ids.size(1) - first] = labels[row, first:]
        return {"input_ids": prompts, "attention_mask": there, "decoder_input_ids": answers, "labels": learned}

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


def _column_of(name: str, model: Layered) -> str:
    """What an input gets; the only one is the tokens, whatever it is called."""
    if len(model.inputs) == 1:
        return "input_ids"
    others = ("decoder_input_ids",) if model.learns == "answer" else ("token_type_ids", "position_ids")
    known = ("input_ids", "attention_mask", *others)
    if name not in known:
        raise DataError(f"the model takes '{name}', which text does not have", f"text has {', '.join(known)}")
    return name
