"""Models that are easy to get wrong, each with the rows of its batches: every plan must train them as a plain loop does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stagewright.models import Layered, cross_entropy_sum, make_layered
from tests.runtime.reference import Tower, rows_of_batch

WIDTH, CLASSES = 6, 4
Tensors = tuple[Tensor, ...]


class Tail(nn.Sequential):
    """What comes after the part that is tested, so that there is something to cut off."""

    def __init__(self) -> None:
        hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        super().__init__(*hidden, nn.Linear(WIDTH, CLASSES))


class Reused(nn.Module):
    """A linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.tail = nn.Linear(WIDTH, WIDTH), Tail()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(torch.tanh(self.a(torch.tanh(self.a(x)))))


class Siamese(nn.Module):
    """Both halves of a row go through one encoder, and two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.first, self.second = nn.Linear(WIDTH // 2, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6)
        self.second.weight = self.first.weight
        self.tail = Tail()

    def forward(self, x: Tensor) -> Tensor:
        left, right = (torch.tanh(self.encoder(half)) for half in x.chunk(2, dim=-1))
        return self.tail(self.second(torch.tanh(self.first(left))) * right)


class AppliedTwice(nn.Module):
    """A transformer layer that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.tail = Tail()

    def forward(self, x: Tensor) -> Tensor:
        words = torch.stack([x, x.flip(-1), x * x], dim=1)
        return self.tail(self.layer(self.layer(words)).mean(dim=1))


@dataclass(frozen=True)
class Model:
    """How to build a model, its loss, and the rows of its batches."""

    build: Callable[[], nn.Module]
    rows: Callable[[int, int], tuple[Tensors, Tensors]]
    loss: Any
    mean: Callable[..., Tensor]
    """The loss of a plain loop: the mean over the batch."""

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model with the same weights every time."""
        torch.manual_seed(0)
        return self.build().to(dtype)

    def layered(self, dtype: torch.dtype = torch.float64) -> Layered:
        """The model as layers, with its loss."""
        inputs, targets = self.rows(0, 2)
        inputs = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)
        return make_layered(self.make(dtype), inputs, loss=self.loss, targets=targets)


def classified(batch: int, num_rows: int) -> tuple[Tensors, Tensors]:
    """The inputs and labels of a batch."""
    inputs, labels = rows_of_batch(batch, num_rows)
    return (inputs,), (labels,)


def classifier(build: Callable[[], nn.Module]) -> Model:
    """A model of rows of numbers and their labels."""
    return Model(build, classified, cross_entropy_sum(), F.cross_entropy)


MODELS = {
    "tower": classifier(Tower),
    "reused": classifier(Reused),
    "siamese": classifier(Siamese),
    "applied twice": classifier(AppliedTwice),
}
