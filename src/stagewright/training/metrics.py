"""Figures beside the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from stagewright.models import Layered
from stagewright.models.counts import parameter_roles
from stagewright.models.loss import IGNORED
from stagewright.profile import Precision
from stagewright.profiling.kinds import kind_called

METRICS = ("top_1", "top_k")
Metric = Callable[..., Tensor]
"""`metric(*outputs, *targets)`: the mean over the rows, or a number for each."""
_TOP_K = 5


def has_accuracy(model: Layered) -> bool:
    """Whether a model's first output has a score for every class of its first target."""
    if not model.predictions or not model.targets or model.targets[0].dtype.is_floating_point:
        return False
    scores, labels = model.predictions[0].shape_per_row, model.targets[0].shape_per_row
    return len(scores) == len(labels) + 1 and labels in (scores[:-1], scores[1:])


def own_sums(metrics: Mapping[str, Metric], predictions: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """What metrics of one's own come to, as sums over the rows."""
    rows = predictions[0].size(0)
    with torch.no_grad():
        made = [torch.as_tensor(each(*predictions, *targets)).to(predictions[0].device) for each in metrics.values()]
    return torch.stack([each.double().sum() if each.dim() else each.double() * rows for each in made])


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


def perplexity(model: Layered, loss: float) -> float | None:
    """e to the mean loss over tokens; None where labels are smoothed, or every row has one label."""
    if getattr(model.loss, "label_smoothing", 0.0) or not model.targets or not model.targets[0].shape_per_row:
        return None
    return math.exp(min(loss, 700.0))


def token_flops(model: Layered, length: int) -> float | None:
    """The floating-point operations of training on one token of a row; None where experts share out the tokens.

    6 · weights that are trained + 4 · frozen ones + 12 · layers · width · length        embeddings are looked up

    Chowdhery et al., "PaLM", 2022, appendix B; attention is left out where the model has no config that says its size.
    """
    config = getattr(model.model, "config", None)
    if getattr(config, "num_experts_per_tok", None) or getattr(config, "num_local_experts", None):
        return None
    roles, tied = parameter_roles(model), {name for name, _ in model.tied}
    counted = {name for name, role in roles.items() if role in ("matrix", "head") or name in tied}
    named = dict(model.model.named_parameters())
    weights = sum((6.0 if named[name].requires_grad else 4.0) * named[name].numel() for name in counted)
    return weights + 12.0 * length * getattr(config, "num_hidden_layers", 0) * getattr(config, "hidden_size", 0)


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """What a card can do at most by its data sheet; None for other devices, and for cards that are not known here."""
    kind = kind_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if kind is None else kind.peak(precision)
