"""Deferred weight gradients: a linear layer's, for several microbatches in one product.

A microbatch has few rows and a linear layer many weights: its weight gradient takes longer to write, and to add to that
of the microbatches before, than to compute. So the rows of several microbatches are kept, inputs X and gradients of the
outputs G, and multiplied at once:

    backward of microbatch     0          1           2           3, the batch's last
    rows kept                  0         0 1         0 1 2        0 1 2 3 ── sent ── += G(0…3)ᵀ X(0…3) ── update

The rows kept are never more than a share of the weights. Products come after the microbatch's gradients have gone to
the stage before, which waits for these; where replicas reduce gradients they belong to the batch's last backward, and
are made in their bucket's memory.

Measured gain: AlexNet's 7-1 step on slices of a card took 170 ms instead of 195 (docs/results.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.cost import KEPT_SHARE


class DeferredGradients:
    """The linear weights of one copy of a stage, and whether their rows may be kept at the moment."""

    def __init__(self, module: nn.Module, apart: Collection[int] = ()) -> None:
        """`apart` are the ids of weights that are left to autograd."""
        linears = [each for each in module.modules() if isinstance(each, nn.Linear) and _can_defer(each)]
        self._linears = [each for each in linears if id(each.weight) not in apart]
        self.weights: dict[Tensor, _KeptRows] = {}
        self.is_on = self.at_once = False
        """Off outside a stage's own backward: whoever else asks for gradients gets them at once."""
        for linear in self._linears:
            kept = self.weights.setdefault(linear.weight, _KeptRows(self, linear.weight))
            linear.forward = partial(_forward, linear, kept)  # type: ignore[method-assign]

    @contextmanager
    def backward(self, *, at_once: bool) -> Iterator[None]:
        """Inside, backward of a microbatch keeps its rows, or makes all products that are left at once."""
        self.is_on, self.at_once = True, at_once
        for kept in self.weights.values():
            kept.is_made = False
        try:
            yield
        finally:
            self.is_on = False
        if at_once:
            self.make()  # what this backward did not pass by

    def make(self, *, only_full: bool = False) -> None:
        """Makes the products that are left, or those of weights that may not keep another microbatch like the last."""
        for kept in reversed(self.weights.values()):
            if kept.rows and (kept.is_full or not only_full):
                kept.weight.grad = kept.product()

    def put(self, places: Mapping[Tensor, Tensor]) -> None:
        """Makes gradients where they are wanted, weight by weight, instead of wherever there is memory."""
        for weight, kept in self.weights.items():
            kept.place = places.get(weight, kept.place)

    def close(self) -> None:
        """Makes the layers ordinary ones again."""
        for linear in self._linears:
            del linear.forward


class _KeptRows:
    """A weight, and the rows of all linear layers that use it whose product is still to be made."""

    def __init__(self, owner: DeferredGradients, weight: Tensor) -> None:
        self.owner, self.weight = owner, weight
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.place: Tensor | None = None
        """Where the gradient is wanted, if anywhere."""
        self.is_made = False
        """Whether this backward has made a product already: autograd holds it, and adds those of further uses."""
        self._most_rows = int(KEPT_SHARE * weight.numel() / sum(weight.shape))

    def gradient(self, gradients: Tensor, inputs: Tensor) -> Tensor | None:
        """The gradient of the batch so far with these rows in it, or None where they are kept for later."""
        if not self.owner.is_on:
            return gradients.t() @ inputs
        self.rows.append((gradients.detach(), inputs.detach()))  # without what made them
        return self.product() if self.owner.at_once else None

    @property
    def is_full(self) -> bool:
        """Whether another microbatch like the last would be too much."""
        return sum(len(kept) for kept, _ in self.rows) + len(self.rows[-1][0]) > self._most_rows

    @torch.no_grad()
    def product(self) -> Tensor:
        """The gradient so far with all kept rows in it; it is taken from the weight, for autograd to put it back."""
        gradients, inputs = (part[0] if len(part) == 1 else torch.cat(part) for part in zip(*self.rows))
        self.rows.clear()
        is_first, self.is_made = not self.is_made, self.owner.is_on
        so_far, self.weight.grad = self.weight.grad, None
        if so_far is not None:
            return so_far.addmm_(gradients.t(), inputs)
        if self.place is None or not is_first:
            return gradients.t() @ inputs
        # A tensor of its own on that memory, for autograd keeps only what nobody else holds.
        return torch.mm(gradients.t(), inputs, out=self.place.detach())


def _can_defer(module: nn.Linear) -> bool:
    """Whether this is a plain linear layer with a weight of its own, which nobody else listens to."""
    weight = module.weight
    if type(module) is not nn.Linear or "forward" in module.__dict__ or "weight" not in module._parameters:
        return False
    return weight.requires_grad and not weight._backward_hooks and not weight._post_accumulate_grad_hooks


def _forward(linear: nn.Linear, kept: _KeptRows, inputs: Tensor) -> Tensor:
    """What the layer computes."""
    weight, bias = linear.weight, linear.bias
    casts = inputs.dtype != weight.dtype or torch.is_autocast_enabled(inputs.device.type)
    is_other = weight is not kept.weight  # whoever computes with other weights wants plain autograd
    if inputs.dim() < 2 or casts or is_other:
        return nn.functional.linear(inputs, weight, bias)
    return _Linear.apply(inputs, weight, bias, kept)  # type: ignore[no-untyped-call, no-any-return]


class _Linear(torch.autograd.Function):
    """A linear layer whose weight gradient may come later."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, kept: _KeptRows) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.kept = kept
        return nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient, (inputs, weight) = outputs[0], ctx.saved_tensors
        to_inputs, to_weight, to_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            gradient @ weight if to_inputs else None,
            ctx.kept.gradient(rows, inputs.flatten(0, -2)) if to_weight else None, rows.sum(0) if to_bias else None,
            None,
        )  # fmt: skip
