"""Figures beside the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

METRICS = ("top_1", "top_k")
TOP_K = 5


def accuracy_sums(predictions: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """How many rows have their label first, and among the first five, as sums over the rows.

    Labels of several tokens a row count as the row's mean.
    """
    logits, labels = predictions[0], targets[0]
    if logits.dim() != labels.dim() + 1 or labels.dtype.is_floating_point:
        return torch.zeros(2, device=logits.device)
    best = logits.topk(min(TOP_K, logits.size(-1)), dim=-1).indices
    hits = best.eq(labels.unsqueeze(-1))
    each = torch.stack([hits[..., 0].double(), hits.any(-1).double()])
    return each.flatten(2).mean(-1).sum(-1) if each.dim() > 2 else each.sum(-1)
