"""Any map-style dataset as data: `train(…, data=dataset)`. Each worker gets the items of the rows that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from stagewright.data.packing import permuted
from stagewright.errors import DataError, UsageError
from stagewright.models import Layered
from stagewright.plan import Plan
from stagewright.runtime.settings import Settings

Collate = Callable[[list[Any]], Any]
_TARGETS = ("labels", "label", "targets", "target")
"""What a column may be called that holds targets."""
_Columns = tuple[Sequence[Tensor], Sequence[Tensor]]


@runtime_checkable
class MapStyle(Protocol):
    """Items by index, as torch.utils.data.Dataset has them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DatasetFeed:
    """The items of a dataset, shuffled anew for every epoch; they are read ahead of time by a few threads.

    An item is (inputs …, targets …) in the model's order, or a mapping with a column for each of them by its name.
    """

    may_be_read_ahead = True

    def __init__(
        self,
        dataset: MapStyle,
        model: Layered,
        *,
        collate_fn: Collate | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, MapStyle):
            raise UsageError(
                f"{type(dataset).__name__} gives no item by its index, so that no worker could get rows of its own",
                "give a map-style dataset, with __len__ and __getitem__, or a function of (batch, start, stop)",
            )
        self.dataset, self._collate, self._shuffle, self._seed = dataset, collate_fn or default_collate, shuffle, seed
        self._inputs = tuple(spec.name for spec in model.inputs)
        self._targets = tuple(spec.name for spec in model.targets)
        self._size = 0
        self._wanted = (True, True)
        self._lock, self._kept = Lock(), dict[tuple[int, int, int], _Columns]()

    @property
    def about(self) -> str:
        """Which data these are, in short."""
        return f"{len(self.dataset):,} items of {type(self.dataset).__name__}"

    @property
    def num_rows(self) -> int:
        """The items of an epoch."""
        return len(self.dataset)

    def settle(self, plan: Plan, settings: Settings) -> None:
        """Learns how many rows a batch has, and whether this worker asks for inputs, targets or both."""
        worker, self._size = int(os.environ.get("RANK", "0")), plan.batch
        self._wanted = worker in plan.workers[0], worker in plan.workers[-1]
        if len(self.dataset) < plan.batch:
            raise DataError(f"{self.about} are fewer than the batch of {plan.batch:,}", "use a smaller batch")

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._rows(batch, start, stop)[0]

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._rows(batch, start, stop)[1]

    def _rows(self, batch: int, start: int, stop: int) -> _Columns:
        """The rows' columns; kept for a while where this worker asks for inputs and for targets."""
        key = (batch, start, stop)
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = self._read(*key)
            with self._lock:
                if all(self._wanted):
                    self._kept = {each: rows for each, rows in self._kept.items() if each[0] > batch - 4} | {key: found}
        return found

    def _read(self, batch: int, start: int, stop: int) -> _Columns:
        epoch, place = divmod(batch, len(self.dataset) // self._size)
        positions = np.arange(place * self._size + start, place * self._size + stop)
        if self._shuffle:
            positions = permuted(positions, len(self.dataset), seed=self._seed, use="dataset", epoch=epoch)
        made = self._collate([self.dataset[index] for index in positions.tolist()])
        if isinstance(made, Mapping):
            return [_column(made, name) for name in self._inputs], [
                _column(made, name, *(_TARGETS if len(self._targets) == 1 else ())) for name in self._targets
            ]
        tensors = _flat(made)
        wanted = len(self._inputs) + len(self._targets)
        if len(tensors) != wanted:
            names = ", ".join((*self._inputs, *self._targets))
            raise DataError(f"an item of {type(self.dataset).__name__} has {len(tensors)} parts", f"give {names}")
        return tensors[: len(self._inputs)], tensors[len(self._inputs) :]


def _column(made: Mapping[str, Any], *names: str) -> Tensor:
    """The column that has one of these names."""
    for name in names:
        if name in made:
            return torch.as_tensor(made[name])
    raise DataError(
        f"items have the columns {', '.join(map(str, made))}, and none is '{names[0]}'", "add or rename one"
    )


def _flat(made: Any) -> list[Tensor]:
    """The tensors of an item, tuples in tuples one after the other."""
    if isinstance(made, list | tuple):
        return [tensor for part in made for tensor in _flat(part)]
    return [torch.as_tensor(made)]


def is_dataset(data: object) -> bool:
    """Whether data is a dataset, and neither a function nor a feed."""
    return data is not None and not callable(data) and not hasattr(data, "inputs")


def as_feed(data: Any, model: Layered, settings: Settings, collate_fn: Collate | None) -> Any:
    """A dataset as a feed; whatever else is data stays what it is."""
    if is_dataset(data):
        return DatasetFeed(data, model, collate_fn=collate_fn, seed=settings.seed)
    if collate_fn is not None:
        raise UsageError("collate_fn makes batches of a dataset's items, and data is none", "leave it out")
    return data
