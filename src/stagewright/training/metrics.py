"""Figures beside the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stagewright.models import Layered
from stagewright.models.loss import IGNORED

METRICS = ("top_1", "top_k")
_TOP_K = 5


def has_accuracy(model: Layered) -> bool:
    """Whether a model's first output has a score for every class of its first target."""
    if not model.predictions or not model.targets or model.targets[0].dtype.is_floating_point:
        return False
    scores, labels = model.predictions[0].shape_per_row, model.targets[0].shape_per_row
    return len(scores) == len(labels) + 1 and labels in (scores[:-1], scores[1:])


def accuracy_sums(predictions: Sequence[Tensor], targets: Sequence[Tensor], *, shifts: bool = False) -> Tensor:
    """How many rows have their label first, and among the first five, as sums over the rows.

    Several labels a row count as their mean, those that do not count left out; classes are last, or after the rows.
    Where the loss shifts, the scores of a token are for the next one's label.
    """
    scores, labels = predictions[0], targets[0]
    if shifts:
        scores, labels = scores[:, :-1], labels[:, 1:]
    if scores.shape[:-1] != labels.shape:
        scores = scores.movedim(1, -1)
    best = scores.topk(min(_TOP_K, scores.size(-1)), dim=-1).indices
    hits = best.eq(labels.unsqueeze(-1))
    each = torch.stack([hits[..., 0].double(), hits.any(-1).double()])
    if each.dim() == 2:
        return each.sum(-1)
    number = labels.ne(IGNORED).flatten(1).sum(-1).clamp(min=1)
    return (each.flatten(2).sum(-1) / number).sum(-1)
