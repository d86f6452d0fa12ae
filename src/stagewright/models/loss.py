"""Losses that return the sum over the rows they are given.

    gradient of the batch = (Σ over microbatches of the gradient of their sums) / rows of the batch

A sum adds up over microbatches of any sizes; a mean does not as soon as they are uneven.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from stagewright.errors import ModelError

Loss = Callable[..., Tensor]
"""`loss(*outputs, *targets)`: a scalar, the sum over the rows."""

LOSS, LOSS_PATH = "loss", "_loss_of_stage"
"""The name of the layer of the loss, and the path of its module, which no model uses itself."""

IGNORED = -100
"""The label of a token that does not count, as in `torch.nn.functional.cross_entropy`."""


def wide(logits: Tensor) -> Tensor:
    """Logits in at least single precision: sums over many rows need it."""
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True, kw_only=True)
class CrossEntropySum:
    """The cross entropy of logits [rows, classes] and labels [rows], summed over the rows."""

    label_smoothing: float = 0.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(wide(logits), labels, reduction="sum", label_smoothing=self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class TokenCrossEntropySum:
    """The cross entropy of logits [rows, tokens, words] and labels [rows, tokens].

    Σ over rows of the mean over the row's tokens; labels of -100 do not count.
    """

    label_smoothing: float = 0.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Token by token in one long row: with the words in the middle, as a transpose would put them, sums over them
        # jump through memory and take twice as long.
        each = F.cross_entropy(
            wide(logits).flatten(0, 1),
            labels.flatten(),
            reduction="none",
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        ).view_as(labels)
        counted = (labels != IGNORED).sum(dim=1).clamp(min=1)
        return (each.sum(dim=1) / counted).sum()


@dataclass(frozen=True)
class MeanLoss:
    """A loss that returns the mean over its rows, turned into their sum: mean × rows."""

    mean: Loss

    def __call__(self, *outputs_and_targets: Tensor) -> Tensor:
        rows = outputs_and_targets[0].size(0)
        return torch.mul(self.mean(*outputs_and_targets), rows)


def cross_entropy_sum(label_smoothing: float = 0.0) -> Loss:
    """The loss of a classifier: `loss(logits, labels)`."""
    return CrossEntropySum(label_smoothing=label_smoothing)


def token_cross_entropy_sum(label_smoothing: float = 0.0) -> Loss:
    """The loss of a language model: `loss(logits, labels)`, labels already shifted."""
    return TokenCrossEntropySum(label_smoothing=label_smoothing)


def smoothed(loss: Loss, label_smoothing: float) -> Loss:
    """The same cross entropy, with labels that keep 1 − label_smoothing and share the rest among all classes."""
    if not isinstance(loss, CrossEntropySum | TokenCrossEntropySum):
        raise ModelError(
            f"label smoothing of {label_smoothing:g} needs a cross entropy, and the loss is {loss}",
            "smooth the labels in the loss itself",
        )
    return replace(loss, label_smoothing=label_smoothing)


def mean_loss(mean: Loss) -> Loss:
    """The sum loss of a loss that returns the mean over the rows it is given."""
    return MeanLoss(mean)


class LossModule(nn.Module):
    """The layer of the loss: from the model's outputs and the targets to the sum over the rows."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, outputs: Any, targets: tuple[Tensor, ...]) -> Tensor:
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        return self.loss(*tensors, *targets)
