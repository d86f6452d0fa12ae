"""Losses that return the sum over what they are given, and count what the batch's sum is divided by.

    gradient of the batch = (Σ over microbatches of the gradient of their sums) / (what the whole batch counts)

A sum adds up over microbatches of any sizes; a mean does not as soon as they are uneven. Most losses count rows; a loss
of tokens counts the tokens whose label is not −100.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from stagewright.errors import ModelError

Loss = Callable[..., Tensor]
"""`loss(*outputs, *targets)`: a scalar, the sum over the rows."""

LOSS_PATH = "_loss_of_stage"
"""The path of the module of the loss, which no model uses itself."""

IGNORED = -100
"""The label of a token that does not count, as in `torch.nn.functional.cross_entropy`."""

_NOT_A_LABEL = -(2**31)
"""An `ignore_index` that no label has, so that none is left out unnoticed."""


def count_of(loss: Loss | None) -> Callable[..., Tensor] | None:
    """What counts the targets of a loss that is not divided by rows: its `count(*targets)`, if it has one.

    Counts of the parts of a batch add up to the batch's.
    """
    return getattr(loss, "count", None)


def _wide(logits: Tensor) -> Tensor:
    """Logits in at least single precision: sums over many rows need it."""
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True, kw_only=True)
class _CrossEntropySum:
    """The cross entropy of logits [rows, classes] and labels [rows], summed over the rows; every label counts."""

    label_smoothing: float = 0.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            _wide(logits), labels, reduction="sum", label_smoothing=self.label_smoothing, ignore_index=_NOT_A_LABEL
        )


@dataclass(frozen=True, kw_only=True)
class _TokenCrossEntropySum:
    """The cross entropy of logits [rows, tokens, words] and labels [rows, tokens], summed over the tokens.

    Labels of -100 do not count. Where it shifts, the label of a token is that of the one after it.
    """

    label_smoothing: float = 0.0
    shifts: bool = False

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        labels = self._own(labels)
        # Token by token in one long row: with the words in the middle, as a transpose would put them, sums over them
        # jump through memory and take twice as long.
        logits, labels = logits.flatten(0, 1), labels.flatten()
        if self.label_smoothing:
            return F.cross_entropy(
                _wide(logits), labels, reduction="sum", label_smoothing=self.label_smoothing, ignore_index=IGNORED
            )
        # Logits are widened inside the kernel: autocast would write them down once more, and their gradient too.
        with nullcontext() if logits.is_meta else torch.autocast(logits.device.type, enabled=False):
            wide = None if logits.dtype == torch.float64 else torch.float32
            return F.nll_loss(F.log_softmax(logits, -1, dtype=wide), labels, ignore_index=IGNORED, reduction="sum")

    def count(self, labels: Tensor) -> Tensor:
        return self._own(labels).ne(IGNORED).sum()

    def _own(self, labels: Tensor) -> Tensor:
        """Labels at the places of the scores that are compared with them."""
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED) if self.shifts else labels


@dataclass(frozen=True)
class MeanLoss:
    """A loss that returns a mean, turned into a sum: mean × rows, or × what `count(*targets)` says it is over."""

    mean: Loss
    count: Callable[..., Tensor] | None = None

    def __call__(self, *outputs_and_targets: Tensor) -> Tensor:
        return self.total(outputs_and_targets[:1], outputs_and_targets[1:])

    def total(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """The sum over these rows."""
        if self.count is None:
            return torch.mul(self.mean(*outputs, *targets), (*targets, *outputs)[0].size(0))
        counted = self.count(*targets)
        guarded = [_Guarded.apply(each, counted) for each in outputs]  # type: ignore[no-untyped-call]
        return torch.where(counted > 0, self.mean(*guarded, *targets) * counted, 0.0)


class _Guarded(torch.autograd.Function):
    """Outputs whose gradient is 0 where nothing counts: there the mean is 0 / 0, and its gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, counted: Tensor) -> Tensor:
        ctx.save_for_backward(counted)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (counted,) = ctx.saved_tensors
        return torch.where(counted > 0, gradients[0], 0.0), None


@dataclass(frozen=True)
class _LabelledLoss:
    """torch's cross entropy or likelihood as a sum: labels that it ignores do not count, the others by their weight."""

    function: Loss
    weight: Tensor | None
    ignored: int

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(outputs)
        return self.function(outputs, labels, weight=weight, ignore_index=self.ignored, reduction="sum")

    def count(self, labels: Tensor) -> Tensor:
        if labels.is_floating_point():  # probabilities of classes: every row counts
            return torch.tensor(labels.numel() // labels.size(1), device=labels.device)
        counted = labels.ne(self.ignored)
        if self.weight is None:
            return counted.sum()
        return self.weight.to(labels.device)[labels.where(counted, 0)].where(counted, 0.0).sum()


def cross_entropy_sum(label_smoothing: float = 0.0) -> Loss:
    """The loss of a classifier: `loss(logits, labels)`."""
    return _CrossEntropySum(label_smoothing=label_smoothing)


def token_cross_entropy_sum(label_smoothing: float = 0.0, *, shifts: bool = False) -> Loss:
    """The loss of a language model: `loss(logits, labels)`, labels already shifted, or where their tokens are."""
    return _TokenCrossEntropySum(label_smoothing=label_smoothing, shifts=shifts)


def smoothed(loss: Loss, label_smoothing: float) -> Loss:
    """The same cross entropy, with labels that keep 1 − label_smoothing and share the rest among all classes."""
    if not isinstance(loss, _CrossEntropySum | _TokenCrossEntropySum):
        raise ModelError(
            f"label smoothing of {label_smoothing:g} needs a cross entropy, and the loss is {loss}",
            "smooth the labels in the loss itself",
        )
    return replace(loss, label_smoothing=label_smoothing)


def mean_loss(mean: Loss, count: Callable[..., Tensor] | None = None) -> Loss:
    """The sum loss of a loss that returns the mean over the rows it is given.

    torch's cross entropy leaves labels of `ignore_index` out of the mean, and so does this. Another loss whose mean is
    not over rows says over what: `count=lambda labels: (labels != -100).sum()`.
    """
    return (_labelled(mean) if count is None else None) or MeanLoss(mean, count)


def _labelled(mean: Loss) -> Loss | None:
    """torch's own losses of labels, whose mean is not over rows where labels are ignored or weighted."""
    if type(mean) in (nn.CrossEntropyLoss, nn.NLLLoss) and mean.reduction == "mean":  # type: ignore[attr-defined]
        given: dict[str, Any] = {"weight": mean.weight, "ignore_index": mean.ignore_index}  # type: ignore[attr-defined]
        smoothing = getattr(mean, "label_smoothing", None)
        function: Loss = F.nll_loss if smoothing is None else partial(F.cross_entropy, label_smoothing=smoothing)
    elif isinstance(mean, partial) and mean.func in (F.cross_entropy, F.nll_loss) and not mean.args:
        given, function = dict(mean.keywords), mean.func
    elif mean in (F.cross_entropy, F.nll_loss):
        given, function = {}, mean
    else:
        return None
    weight, ignored = given.pop("weight", None), given.pop("ignore_index", IGNORED)
    if given.pop("reduction", "mean") != "mean":
        return None
    return _LabelledLoss(partial(function, **given) if given else function, weight, ignored)


def as_sum(loss: Loss, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Loss:
    """Any loss as one that returns the sum over its rows, as it is found to be on some rows of outputs and targets.

    A mean over rows, as torch's own losses return it, is taken times the rows; what is neither mean nor sum is refused.
    """
    known = loss if count_of(loss) is not None or isinstance(loss, MeanLoss) else _labelled(loss)
    if known is not None:
        return known
    how = how_it_adds_up(loss, outputs, targets, "the loss")
    if how is None:
        raise ModelError(
            "the loss of some rows together is neither the mean nor the sum of theirs, so that it would depend on how "
            "a batch is divided",
            "give a mean or a sum over rows; where some rows count more, sw.mean_loss(loss, count=lambda targets: …)",
        )
    return loss if how == "sum" else MeanLoss(loss)


def how_it_adds_up(
    function: Callable[..., Tensor], outputs: Sequence[Tensor], targets: Sequence[Tensor], called: str
) -> Literal["mean", "sum"] | None:
    """Whether a function of rows is their mean or their sum; None where it is neither."""
    rows = outputs[0].size(0)
    wide = [[each.double() if each.is_floating_point() else each for each in some] for some in (outputs, targets)]

    def of(part: slice) -> float:
        for given in (wide, [outputs, targets]):  # weights of a loss may be in single precision
            try:
                made = function(*(each[part] for some in given for each in some))
                break
            except Exception as fault:
                last = fault
        else:
            raise ModelError(
                f"{called} fails on the model's outputs and the data's targets: {last}",
                "it is called as loss(*outputs, *targets), rows first",
            )
        if not isinstance(made, Tensor) or made.numel() != 1:
            what = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise ModelError(
                f"{called} returns {what}, not one number", "return its mean: reduction='mean', or .mean()"
            )
        return float(made)

    whole, ways = of(slice(None)), {"mean", "sum"}
    for cut in {1, rows // 2} - {0}:
        first, rest = of(slice(cut)), of(slice(cut, None))
        expected = {"mean": (cut * first + (rows - cut) * rest) / rows, "sum": first + rest}
        ways = {way for way in ways if isclose(whole, expected[way], rel_tol=1e-5, abs_tol=1e-9)}
    return "mean" if "mean" in ways else "sum" if ways else None


class LossModule(nn.Module):
    """The layer of the loss: from the model's outputs and the targets to the sum over the rows."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, outputs: Any, targets: tuple[Tensor, ...]) -> Tensor:
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if isinstance(self.loss, MeanLoss):
            return self.loss.total(tensors, targets)
        return self.loss(*tensors, *targets)
