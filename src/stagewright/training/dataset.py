"""Rows of any torch dataset: which items a batch has, in which order, and which of their parts the model takes.

DataLoader(dataset, collate_fn, sampler)  ─▶  Items  ─▶  DatasetFeed: any rows of any batch, on any worker
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from stagewright.data.packing import permuted
from stagewright.data.source import Indices
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


@dataclass(frozen=True, kw_only=True)
class Items:
    """The items of a dataset, how several of them become rows, and in which order they come."""

    dataset: MapStyle
    collate: Collate = default_collate
    shuffle: bool = True
    weights: tuple[float, ...] | None = None
    """How often each item is drawn, of those of an epoch; None where each comes once."""
    replacement: bool = True
    """Whether an item that is drawn by weight may be drawn again in the same epoch."""
    epoch: int = 0
    """How many items an epoch has."""
    batch: int | None = None
    """The rows of a batch, where a loader has said it."""

    faults: tuple[str, ...] = ()
    """One sentence for every item that was skipped: none is."""

    def __len__(self) -> int:
        return self.epoch

    @property
    def about(self) -> str:
        """Which data these are, in short."""
        return f"{len(self.dataset):,} items of {type(self.dataset).__name__}"

    def rows(self, positions: Sequence[int]) -> Any:
        """What the items at some places of the dataset are together."""
        return self.collate([self.dataset[index] for index in positions])

    def spread(self, number: int) -> list[int]:
        """So many places from all over the dataset, or all."""
        return list(dict.fromkeys(np.linspace(0, len(self.dataset) - 1, number).round().astype(int).tolist()))


def items_of(data: Any, collate_fn: Collate | None = None, *, shuffle: bool = True) -> Items:
    """The items of a dataset, or of a loader, with the loader's own collate_fn and order."""
    if isinstance(data, DataLoader):
        return _items_of_loader(data, collate_fn)
    if isinstance(data, IterableDataset) or not isinstance(data, MapStyle) or isinstance(data, str):
        raise UsageError(
            f"{type(data).__name__} gives no item by its index, so that no worker could get rows of its own",
            "give a map-style dataset, with __len__ and __getitem__, or a function of (batch, start, stop)",
        )
    if len(data) == 0:
        raise DataError(f"{type(data).__name__} has no items", "look at how it was made")
    return Items(dataset=data, collate=collate_fn or default_collate, shuffle=shuffle, epoch=len(data))


def _items_of_loader(loader: DataLoader[Any], collate_fn: Collate | None) -> Items:
    """A loader's items; a way to choose them that no other worker could repeat is refused."""
    sampler: Any = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    if sampler is not None and (loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler):
        raise UsageError(
            "the DataLoader makes batches by a batch_sampler of its own, which divides no batch among workers",
            "give the dataset, batch=ROWS, and weights or an order by the loader's sampler",
        )
    dataset: Any = loader.dataset
    if isinstance(sampler, SubsetRandomSampler):
        dataset = Subset(dataset, list(sampler.indices))
    found = items_of(dataset, collate_fn or loader.collate_fn)
    chosen: dict[str, Any] = {"shuffle": True}
    if isinstance(sampler, WeightedRandomSampler):
        weights = torch.as_tensor(sampler.weights).double().tolist()
        if len(weights) != len(found):
            raise UsageError(f"the sampler has {len(weights):,} weights for {found.about}", "give one an item")
        chosen = {"weights": tuple(weights), "replacement": sampler.replacement, "epoch": sampler.num_samples}
    elif isinstance(sampler, RandomSampler):
        if sampler.replacement or sampler.num_samples != len(found):
            evenly = (1.0,) * len(found)
            chosen = {"weights": evenly, "replacement": sampler.replacement, "epoch": sampler.num_samples}
    elif isinstance(sampler, SequentialSampler | DistributedSampler):
        chosen = {"shuffle": getattr(sampler, "shuffle", False)}
    elif not isinstance(sampler, SubsetRandomSampler):
        raise UsageError(
            f"the DataLoader's {type(sampler).__name__} draws items in a way that other workers cannot repeat",
            "give the dataset itself, shuffle=True, a WeightedRandomSampler, or torch.utils.data.Subset",
        )
    values = {"epoch": len(found), **chosen, "batch": loader.batch_size}
    return Items(dataset=found.dataset, collate=found.collate, **values)


# ── which parts of an item the model takes ──────────────────────────────────────────────────────────────


def divided(model: nn.Module, made: Any) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Tensor, ...]]:
    """Rows as what the model is called with, by place and by name, and the loss's targets.

    Of (x, y) and (a, b, y) the last part is the target, unless the model takes it; ((a, b), (y, z)) says it itself. Of
    columns with names the model takes those that its forward names, and the one called labels or target is the target.
    """
    taken = inspect.signature(model.forward).parameters.values()
    if isinstance(made, Mapping):
        names = [each.name for each in taken if each.name in made and each.name not in _TARGETS]
        targets = [name for name in made if name in _TARGETS] or [name for name in made if name not in names]
        if not names or len(targets) > 1:
            wanted = ", ".join(each.name for each in taken)
            raise DataError(
                f"items have the columns {', '.join(map(str, made))}, and {type(model).__name__} takes {wanted}",
                "name the inputs as the model does and the target 'labels', or give a collate_fn that returns (x, y)",
            )
        return (), {name: made[name] for name in names}, tuple(made[name] for name in targets)
    if not isinstance(made, list | tuple):
        return (made,), {}, ()
    if len(made) == 2 and any(isinstance(part, list | tuple) for part in made):
        return tuple(_flat(made[0])), {}, tuple(_flat(made[1]))
    parts = _flat(made)
    places = [each for each in taken if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = sum(each.default is each.empty for each in places)
    most = len(parts) if any(each.kind is each.VAR_POSITIONAL for each in taken) else len(places)
    if len(parts) < needed:
        raise DataError(
            f"an item has {len(parts)} parts, and {type(model).__name__} takes {needed} inputs",
            "give (inputs …, target), or a collate_fn that does",
        )
    number = min(max(len(parts) - 1, needed), most)
    return tuple(parts[:number]), {}, tuple(parts[number:])


class DatasetFeed:
    """The items of a dataset, drawn anew for every epoch; they are read ahead of time by a few threads.

    An item is (inputs …, targets …) in the model's order, or a mapping with a column for each of them by its name.
    """

    may_be_read_ahead = True

    def __init__(
        self,
        dataset: MapStyle | DataLoader[Any] | Items,
        model: Layered,
        *,
        collate_fn: Collate | None = None,
        shuffle: bool = True,
        seed: int = 0,
        is_training: bool = True,
    ) -> None:
        self.items = dataset if isinstance(dataset, Items) else items_of(dataset, collate_fn, shuffle=shuffle)
        self._seed, self._is_training = seed, is_training
        self._model = model
        self._inputs = tuple(spec.name for spec in model.inputs)
        self._targets = tuple(spec.name for spec in model.targets)
        self._size = 0
        self._rows = lru_cache(0)(self._read)
        self._drawn = lru_cache(2)(self._draw)

    @property
    def about(self) -> str:
        """Which data these are, in short."""
        return self.items.about

    def settle(self, plan: Plan, settings: Settings) -> None:
        """Learns how many rows a batch has; rows are kept for a while where this worker asks for both their columns."""
        worker, self._size = int(os.environ.get("RANK", "0")), plan.batch
        takes_both = worker in plan.workers[0] and worker in plan.workers[-1]
        self._rows = lru_cache(4 * plan.num_microbatches if takes_both else 0)(self._read)
        if self._is_training and len(self.items) < plan.batch:
            raise DataError(f"{self.about} are fewer than the batch of {plan.batch:,}", "use a smaller batch")

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._rows(batch, start, stop)[0]

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._rows(batch, start, stop)[1]

    def look(self, number: int) -> _Columns:
        """So many rows from all over the dataset, or all."""
        return self._columns(self.items.rows(self.items.spread(number)))

    def fingerprint(self) -> str:
        """The same on every worker that would get the same targets: another worker gives their inputs."""
        targets = [each.tolist() for each in self.look(4)[1]]
        return hashlib.sha256(repr((len(self.items), targets)).encode()).hexdigest()

    def check_rows(self) -> None:
        """Refuses rows of other shapes or kinds of numbers than the model takes, before anything starts."""
        rows = self.look(2)
        for specs, given in zip((self._model.inputs, self._model.targets), rows):
            for spec, tensor in zip(specs, given):
                if tuple(tensor.shape[1:]) != spec.shape_per_row or tensor.dtype != spec.dtype:
                    raise DataError(
                        f"{self.about} give '{spec.name}' as {tensor.dtype} of shape {tuple(tensor.shape[1:])} a row",
                        f"give {spec.dtype} of shape {spec.shape_per_row}, as the model takes it",
                    )

    def check_targets_stay(self) -> None:
        """Refuses items whose targets are others each time that they are read."""
        if self.fingerprint() != self.fingerprint():
            raise DataError(
                f"targets of {self.about} are others each time that they are read, and the worker that reads inputs is "
                "not the one that reads targets",
                "draw what is random from the index: torch.Generator().manual_seed(index)",
            )

    def _read(self, batch: int, start: int, stop: int) -> _Columns:
        if self._is_training:
            epoch, place = divmod(batch, len(self.items) // self._size)
            positions = np.arange(place * self._size + start, place * self._size + stop)
            positions = self._in_order(positions, epoch)
        else:
            positions = np.arange(batch * self._size + start, batch * self._size + stop)
        return self._columns(self.items.rows(positions.tolist()))

    def _in_order(self, positions: Indices, epoch: int) -> Indices:
        """Which items stand at some places of an epoch."""
        if self.items.weights is not None:
            return self._drawn(epoch)[positions]
        if not self.items.shuffle:
            return positions
        return permuted(positions, len(self.items), seed=self._seed, use="dataset", epoch=epoch)

    def _draw(self, epoch: int) -> Indices:
        """The items of an epoch, drawn by their weights; every worker draws the same ones."""
        weights = np.array(self.items.weights)
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        shares = weights / weights.sum()
        return generator.choice(len(weights), len(self.items), replace=self.items.replacement, p=shares)

    def _columns(self, made: Any) -> _Columns:
        if isinstance(made, Mapping):
            return [_column(made, name) for name in self._inputs], [
                _column(made, name, *(_TARGETS if len(self._targets) == 1 else ())) for name in self._targets
            ]
        tensors = _flat(made)
        wanted = len(self._inputs) + len(self._targets)
        if len(tensors) != wanted:
            names = ", ".join((*self._inputs, *self._targets))
            raise DataError(f"an item of {type(self.items.dataset).__name__} has {len(tensors)} parts", f"give {names}")
        return tensors[: len(self._inputs)], tensors[len(self._inputs) :]


def _column(made: Mapping[str, Any], *names: str) -> Tensor:
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


def as_feed(
    data: Any, model: Layered, settings: Settings, collate_fn: Collate | None = None, *, is_training: bool = True
) -> Any:
    """A dataset or a loader as a feed; a function, a feed or nothing stays what it is."""
    is_dataset = isinstance(data, Items | DataLoader) or not (callable(data) or hasattr(data, "inputs"))
    if data is not None and is_dataset:
        make = partial(DatasetFeed, data, model, collate_fn=collate_fn)
        return make(seed=settings.seed, is_training=is_training)
    if collate_fn is not None:
        raise UsageError("collate_fn makes batches of a dataset's items, and data is none", "leave it out")
    return data
