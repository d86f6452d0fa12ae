"""Weight gradients of linear layers, several microbatches in one product.

A microbatch has few rows and a linear layer many weights: its weight gradient takes longer to write, and to add to that
of the microbatches before, than to compute. So a layer keeps the rows of several microbatches, its inputs X and its
outputs' gradients G, and multiplies them at once:

    backward of microbatch     0          1           2           3, the batch's last
    rows kept                  0         0 1         0 1 2        0 1 2 3 ── sent ── += G(0…3)ᵀ X(0…3) ── update

The rows that a layer keeps are never more than a share of its own weights, so few rows fold and many do not. Products
come after the microbatch's gradients have gone to the stage before, which waits for these and not for them; only where
replicas add gradients up do they belong to the batch's last backward, so that the first buckets start while it runs;
there a gradient is made in its bucket's memory at once, and never copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.cost import KEPT_SHARE


class Folding:
    """The linear layers of one copy of a stage, and whether they may keep rows at the moment."""

    def __init__(self, module: nn.Module) -> None:
        linears = [each for each in module.modules() if isinstance(each, nn.Linear) and can_fold(each)]
        self.layers = [LinearRows(self, each) for each in linears]
        self.is_on = False
        """Off outside a stage's own backward: whoever else asks for gradients gets them at once."""
        self.at_once = False

    @contextmanager
    def backward(self, *, at_once: bool) -> Iterator[None]:
        """Inside, backward of a microbatch keeps its rows, or makes all products that are left at once."""
        self.is_on, self.at_once = True, at_once
        try:
            yield
        finally:
            self.is_on = False
        if at_once:
            self.fold()  # what this backward did not pass by

    def fold(self, *, only_full: bool = False) -> None:
        """Makes the products that are left, or those of layers that may not keep another microbatch like the last."""
        for layer in reversed(self.layers):
            if layer.rows and (layer.is_full or not only_full):
                layer.weight.grad = layer.fold()

    def put(self, places: Mapping[Tensor, Tensor]) -> None:
        """Makes gradients where they are wanted, weight by weight, instead of wherever there is memory."""
        for layer in self.layers:
            layer.place = places.get(layer.weight, layer.place)

    def close(self) -> None:
        """Makes the layers ordinary ones again."""
        for layer in self.layers:
            del layer.module.forward


class LinearRows:
    """A linear layer, and the rows whose weight gradient is still to be made."""

    def __init__(self, folding: Folding, module: nn.Linear) -> None:
        self.folding, self.module = folding, module
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.place: Tensor | None = None
        """Where the gradient is wanted, if anywhere."""
        self.most_rows = int(KEPT_SHARE * module.weight.numel() / (module.in_features + module.out_features))
        module.forward = partial(forward, self)  # type: ignore[method-assign]

    @property
    def weight(self) -> Tensor:
        """The layer's weight."""
        return self.module.weight

    def weight_gradient(self, gradients: Tensor, inputs: Tensor) -> Tensor | None:
        """The gradient of the batch so far with these rows in it, or None where they are kept for later."""
        if not self.folding.is_on:
            return gradients.t() @ inputs
        self.rows.append((gradients.detach(), inputs.detach()))  # without what made them
        return self.fold() if self.folding.at_once else None

    @property
    def is_full(self) -> bool:
        """Whether another microbatch like the last would be too much."""
        return sum(len(kept) for kept, _ in self.rows) + len(self.rows[-1][0]) > self.most_rows

    @torch.no_grad()
    def fold(self) -> Tensor:
        """The gradient so far with all kept rows in it; it is taken from the weight, for autograd to put it back."""
        gradients, inputs = (part[0] if len(part) == 1 else torch.cat(part) for part in zip(*self.rows))
        self.rows.clear()
        so_far, self.weight.grad = self.weight.grad, None
        if so_far is not None:
            return so_far.addmm_(gradients.t(), inputs)
        if self.place is None:
            return gradients.t() @ inputs
        # A tensor of its own on that memory, for autograd keeps only what nobody else holds.
        return torch.mm(gradients.t(), inputs, out=self.place.detach())


def can_fold(module: nn.Linear) -> bool:
    """Whether this is a plain linear layer whose weight nobody else listens to."""
    weight = module.weight
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    return weight.requires_grad and not weight._backward_hooks and not weight._post_accumulate_grad_hooks


def forward(layer: LinearRows, inputs: Tensor) -> Tensor:
    """What the layer computes."""
    weight, bias = layer.module.weight, layer.module.bias
    if inputs.dim() < 2 or inputs.dtype != weight.dtype or torch.is_autocast_enabled(inputs.device.type):
        return nn.functional.linear(inputs, weight, bias)
    made: Tensor = Product.apply(inputs, weight, bias, layer)  # type: ignore[no-untyped-call]
    return made


class Product(torch.autograd.Function):
    """A linear layer whose weight gradient may come later."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearRows) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer = layer
        return nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient, (inputs, weight) = outputs[0], ctx.saved_tensors
        to_inputs, to_weight, to_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            gradient @ weight if to_inputs else None,
            ctx.layer.weight_gradient(rows, inputs.flatten(0, -2)) if to_weight else None,
            rows.sum(0) if to_bias else None,
            None,
        )
