"""How tensors lie in memory in the whole model, so that a stage can lay them out the same.

Tensors travel between stages contiguous. Where the whole model holds one in another order of dimensions
(a permuted image, say), kernels sum in another order, and the last bits differ. So a stage puts
what arrives, and the gradient of what departs, back into the order it has in the whole.

    stage 0 … depart ─── contiguous ──▶ arrive … stage 1
    stage 0 … order' ◀── contiguous ─── gradient  stage 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from stagewright.models.tracing import Traced, tensors_in
from stagewright.models.values import FEW, run_on_shapes

Order = tuple[int, ...]
"""The dimensions of a tensor from the slowest to the fastest in memory; empty: as they come."""


@dataclass(frozen=True)
class Layout:
    """The order in memory of a tensor and of its gradient."""

    value: Order = ()
    gradient: Order = ()


def find_layouts(traced: Traced, nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[Layout, ...]]:
    """The layouts of the tensors of some nodes, from one pass forward and backward on shapes."""
    gradients: dict[int, Tensor] = {}

    def backward(values: Mapping[fx.Node, Any]) -> None:
        wanted = [t for node in nodes for t in tensors_in(values[node]) if t.requires_grad]
        results = [t for t in tensors_in(values[_output(traced)]) if t.requires_grad]
        with suppress(RuntimeError, NotImplementedError):  # an operator without a backward pass on shapes
            found = torch.autograd.grad(results, wanted, [*map(_ones, results)], allow_unused=True)
            gradients.update({id(t): g for t, g in zip(wanted, found) if g is not None})

    values = run_on_shapes(traced, FEW, finally_=backward)
    return {node: tuple(_layout(t, gradients.get(id(t))) for t in tensors_in(values[node])) for node in nodes}


def _output(traced: Traced) -> fx.Node:
    output: fx.Node = traced.graph.output_node()
    return output


def _ones(result: Tensor) -> Tensor:
    return torch.ones_like(result)


def _layout(tensor: Tensor, gradient: Tensor | None) -> Layout:
    return Layout(order_of(tensor), order_of(gradient) if gradient is not None else ())


def order_of(tensor: Tensor) -> Order:
    """The order of a tensor's dimensions in memory, empty where it is the usual one."""
    strides, sizes = tensor.stride(), tensor.shape
    large = [d for d in range(tensor.dim()) if sizes[d] > 1 and strides[d] > 0]
    by_stride = sorted(large, key=lambda d: (-strides[d], d))
    if by_stride == large:
        return ()
    ranks = iter(by_stride)
    return tuple(next(ranks) if d in large else d for d in range(tensor.dim()))


def laid_out(tensor: Tensor, order: Order) -> Tensor:
    """The tensor with its dimensions in another order in memory."""
    inverse = [order.index(dimension) for dimension in range(len(order))]
    return tensor.permute(order).contiguous().permute(inverse)


def arrive(tensor: Tensor, order: Order) -> Tensor:
    """A received tensor, laid out as in the whole model."""
    return laid_out(tensor, tuple(order))


class Departure(torch.autograd.Function):
    """A tensor made contiguous to be sent; its gradient is laid out as in the whole model."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return tensor.contiguous() if not tensor.is_contiguous() else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return (laid_out(gradients[0], ctx.order) if ctx.order else gradients[0]), None


def depart(tensor: Tensor, order: Order) -> Tensor:
    """A tensor to be sent."""
    sent: Tensor = Departure.apply(tensor, tuple(order))  # type: ignore[no-untyped-call]
    return sent
