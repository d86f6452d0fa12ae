"""Compares a model with its cut self before anything is trained: outputs, buffers, and the gradient of everything.

Both run in training and in evaluation, on two numbers of rows. A model that is too large to run here is compared on
shapes alone: which gradients are None, and which operators evaluation runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.models.comparing import compared, total, varied
from stagewright.models.counts import forward_flops
from stagewright.models.layered import Layered
from stagewright.models.loss import LossModule
from stagewright.models.signs import attributes, check_loss, warn_of
from stagewright.models.tracing import Sample, tensors_in, undisturbed
from stagewright.models.values import shapes_only

_LARGEST_FLOPS, LARGEST_BYTES = 5e8, 1 << 30
"""Operations a row and bytes of weights above which a model is compared on shapes alone: every worker does it."""


def checked(layered: Layered, sample: Sample, targets: Sequence[Tensor]) -> tuple[str | None, bool]:
    """What is wrong with a model's layers, if anything, and whether they evaluate as the model does."""
    if _is_large(layered):
        return _compared_on_shapes(layered, sample, targets)
    before, rows = attributes(layered.model), varied(sample, targets)
    fault = compared(layered, rows, training=True)
    if fault is not None:
        return fault, False
    check_loss(layered, rows)
    evaluates = compared(layered, rows, training=False) is None
    warn_of(layered, rows, before, evaluates=evaluates)
    return None, evaluates


def _is_large(layered: Layered) -> bool:
    num_bytes = sum(parameter.nbytes for parameter in layered.model.parameters())
    if layered.traced.device.type == "meta" or num_bytes > LARGEST_BYTES:
        return True
    return sum(forward_flops(layered)) > _LARGEST_FLOPS


# On shapes alone


def _compared_on_shapes(layered: Layered, sample: Sample, targets: Sequence[Tensor]) -> tuple[str | None, bool]:
    """The same for a model that is too large to run here: which gradients are None, and which operators it runs."""
    model = layered.model
    with undisturbed(model):
        model.train()
        with shapes_only(layered.traced.device):
            given, labels = _on_shapes(sample), [torch.empty_like(each) for each in targets]
            parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
            made = total(layered, tensors_in(model(*given.args, **given.kwargs)), labels)
            found = torch.autograd.grad(made, list(parameters.values()), allow_unused=True)
        unreached = {name for name, gradient in zip(parameters, found) if gradient is None}
    for name in sorted(unreached ^ (layered.unreached & parameters.keys())):
        return f"cut into layers, the gradient of '{name}' is {'not ' * (name in unreached)}None", False
    own, graphs = (_operators(layered, given, labels, whole=whole) for whole in (True, False))
    return None, +own == +graphs


def _on_shapes(sample: Sample) -> Sample:
    leaves = pytree.tree_map(
        lambda leaf: torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf, (sample.args, dict(sample.kwargs))
    )
    return Sample(args=leaves[0], kwargs=leaves[1])


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run, without those that only look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += not func.is_view
        return func(*args, **(kwargs or {}))


def _operators(layered: Layered, sample: Sample, targets: Sequence[Tensor], *, whole: bool) -> Counter[str]:
    """The operators of an evaluation, by the model itself or by its layers."""
    with undisturbed(layered.model), shapes_only(layered.traced.device), torch.no_grad(), (seen := _Operators()):
        layered.model.eval()
        if not whole:
            layered.traced.runnable().eval()(*sample.tensors, *targets)
        else:
            outputs = tensors_in(layered.model(*sample.args, **sample.kwargs))
            if layered.loss is not None:
                LossModule(layered.loss)(outputs, tuple(targets))
    return seen.counts
