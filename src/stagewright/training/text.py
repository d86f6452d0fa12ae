"""Text for a run: each worker reads the rows it needs, and every worker knows how long those of a batch are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from stagewright.data.packing import TokenRows, bucket_lengths, pack, padded_to, rows_of_batch
from stagewright.data.source import Indices
from stagewright.data.tokens import Tokens, open_tokens, tokens_of_text
from stagewright.errors import DataError, UsageError
from stagewright.models import Layered
from stagewright.models.loss import IGNORED
from stagewright.plan import Plan
from stagewright.runtime.settings import Settings
from stagewright.training.config import TEXT, TOKENS, Config, is_text


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
        self._columns = [_column(spec.name, model) for spec in model.inputs]
        self._shifts = not getattr(model.loss, "shifts", False)
        self.lengths = bucket_lengths(rows.length, 1 if rows.is_even else lengths)
        """What rows are padded to; a batch has one of them."""
        self._size = 0
        self._positions = lru_cache(8)(self._find_positions)

    @property
    def about(self) -> str:
        """Which data these are, in short."""
        return f"{len(self._rows):,} rows of {self._rows.length:,} tokens of {', '.join(self._rows.tokens.about.files)}"

    @property
    def num_rows(self) -> int:
        """The rows of an epoch."""
        return len(self._rows)

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


def _column(name: str, model: Layered) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What an input gets; the only one is the tokens, whatever it is called."""
    if len(model.inputs) == 1:
        return _COLUMNS["input_ids"]
    if name not in _COLUMNS:
        raise DataError(f"the model takes '{name}', which text does not have", f"text has {', '.join(_COLUMNS)}")
    return _COLUMNS[name]


def check_text_options(config: Config) -> None:
    """Refuses options of text where the data is none, and text beside data that is none."""
    data = config.data
    typed = {"--validation": data.validation, "--pack": data.pack, "--tokenizer": data.tokenizer}
    given = [option for option, value in typed.items() if value is not None]
    if not data.is_text:
        if given or data.lengths > 1:
            raise UsageError(
                f"{(given or ['--lengths'])[0]} is for text, and --data is {data.data}",
                "give --data text:FILE or tokens:FOLDER",
            )
        return
    if data.evaluation_data is not None and not is_text(data.evaluation_data):
        raise UsageError(
            f"--evaluation-data {data.evaluation_data} is no text, and --data {data.data} is", "give text:FILE"
        )
    if data.evaluation_data is not None and data.validation is not None:
        raise UsageError("--validation and --evaluation-data both name rows to evaluate on", "give one of them")
    if data.lengths > 1 and config.settings.compile:
        raise UsageError("--compile makes code for one length, and --lengths asks for several", "leave one of them out")


def text_rows(config: Config, model: Layered) -> tuple[TokenRows, TokenRows | None]:
    """The rows to train on, and those to evaluate on where any are asked for."""
    data, name = config.data, config.model.name
    shape = model.inputs[0].shape_per_row if model.inputs else ()
    if len(shape) != 1 or model.inputs[0].dtype.is_floating_point:
        raise UsageError(f"{name} takes rows of shape {shape}, not tokens", "use a language model")
    made = []
    for option, given in (("--data", data.data), ("--evaluation-data", data.evaluation_data)):
        if given is not None:
            try:
                tokens = _tokens_of(given, config)
                _check_vocabulary(tokens, model, name)
                made.append(pack(tokens, shape[0], data.pack, data.on_corrupt))
            except DataError as fault:
                raise DataError(f"{option} {given}: {fault.what}", fault.todo) from None
    if data.validation is not None:
        return made[0].split(data.validation)
    return made[0], made[1] if len(made) > 1 else None


def _tokens_of(given: str, config: Config) -> Tokens:
    """The tokens that an option names."""
    if given.startswith(TOKENS):
        return open_tokens(given.removeprefix(TOKENS))
    tokenizer = config.data.tokenizer
    if tokenizer is None:
        if not config.model.name.startswith("hf:"):
            raise DataError(f"{config.model.name} has no tokenizer of its own", "name one: --tokenizer FOLDER")
        tokenizer = config.model.name.removeprefix("hf:")
    return tokens_of_text(given.removeprefix(TEXT), tokenizer, on_corrupt=config.data.on_corrupt)


def _check_vocabulary(tokens: Tokens, model: Layered, name: str) -> None:
    """Refuses tokens that the model does not know."""
    about, scores = tokens.about, model.predictions[0].shape_per_row if model.predictions else ()
    if len(scores) == 2 and about.largest >= scores[-1]:
        raise DataError(
            f"the tokenizer of {about.tokenizer} gives token {about.largest:,}, and {name} has {scores[-1]:,} words",
            "use the tokenizer that belongs to the model: --tokenizer FOLDER",
        )
