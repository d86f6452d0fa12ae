"""Rows of an epoch into tensors: the part of loading that needs no order among rows, and so runs on any thread."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from stagewright.data.augment import Transform
from stagewright.data.draws import draw_uniform
from stagewright.data.pixels import DecoderName, read_crop
from stagewright.data.source import Dataset, Indices, OnCorrupt, Pixels
from stagewright.errors import DataError

CROPS = 7  # what a draw is for, beside those of the order
_BLANK = 118  # ImageNet's mean brightness: what stands for an image that cannot be decoded


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """Reads the rows of one epoch by position; a row's crop depends on (seed, epoch, position) alone."""

    dataset: Dataset
    order: Indices
    seed: int
    epoch: int
    transform: Transform
    decoder: DecoderName
    on_corrupt: OnCorrupt

    def fill(self, position: int, pixels: Tensor | None, labels: Tensor | None) -> int:
        """Reads rows from this position on until the tensors are full; gives the number of images left blank."""
        num = max(len(out) for out in (pixels, labels) if out is not None)
        positions = np.arange(position, position + num)
        draws = draw_uniform(self.seed, self.epoch, CROPS, positions, num=self.transform.num_draws)
        blank = 0
        for row, index in enumerate(self.order[positions].tolist()):
            if pixels is not None:
                blank += self._fill_image(index, draws[row].tolist(), pixels[row].numpy())
            if labels is not None:
                labels[row] = self.dataset.label(index)
        return blank

    def _fill_image(self, index: int, draws: list[float], out: Pixels) -> bool:
        """Writes one image's crop to `out`; True where it was left blank."""
        encoded = self.dataset.encoded(index)
        crop_of = partial(self.transform.crop, draws=draws)
        try:
            out[...] = read_crop(encoded, crop_of, self.transform.size, self.decoder)
        except DataError as error:
            if self.on_corrupt == "stop":
                raise DataError(f"{self.dataset.where(index)} {error.what}", error.todo) from error
            out[...] = _BLANK
            return True
        return False
