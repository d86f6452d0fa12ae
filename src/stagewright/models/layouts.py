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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from stagewright.models.tracing import Traced, tensors_in
from stagewright.models.values import FEW, run_on_shapes

_Order = tuple[int, ...]
"""The dimensions of a tensor from the slowest to the fastest in memory; empty: as they come."""


@dataclass(frozen=True)
class Layout:
    """The order in memory of a tensor and of its gradient."""

    value: _Order = ()
    gradient: _Order = ()


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What one backward pass tells: which tensors and parameters it reaches, and how tensors lie in memory."""

    layouts: Mapping[fx.Node, tuple[Layout, ...]]
    reaches: Mapping[fx.Node, tuple[bool, ...]]
    """For each tensor of a node whether a gradient comes back to it."""
    unreached: frozenset[str]
    """The parameters whose gradient stays None."""

    def of_copy(self, twins: Mapping[fx.Node, fx.Node]) -> Gradients:
        """The same of a copy of the graph, node by node."""
        layouts = {twins[node]: each for node, each in self.layouts.items()}
        return replace(self, layouts=layouts, reaches={twins[node]: each for node, each in self.reaches.items()})


def find_gradients(
    traced: Traced, nodes: Sequence[fx.Node], parameters: Mapping[str, Tensor], *, has_loss: bool
) -> Gradients:
    """What backward does to some nodes and parameters, from one pass forward and backward on shapes."""
    found: dict[int, Tensor | None] = {}

    def backward(values: Mapping[fx.Node, Any]) -> None:
        results = tensors_in(values[traced.graph.output_node()])[: 1 if has_loss else None]
        results = tuple(each for each in results if each.requires_grad)
        wanted = [t for node in nodes for t in tensors_in(values[node]) if t.requires_grad]
        wanted += [parameter for parameter in parameters.values() if parameter.requires_grad]
        with suppress(RuntimeError, NotImplementedError):  # an operator without a backward pass on shapes
            gradients = torch.autograd.grad(results, wanted, [*map(torch.ones_like, results)], allow_unused=True)
            found.update({id(t): g for t, g in zip(wanted, gradients)})

    values = run_on_shapes(traced, FEW, finally_=backward)
    of_node = {node: tensors_in(values[node]) for node in nodes}
    return Gradients(
        layouts={node: tuple(_layout(t, found.get(id(t))) for t in each) for node, each in of_node.items()},
        reaches={node: tuple(found.get(id(t), t) is not None for t in each) for node, each in of_node.items()},
        unreached=frozenset(name for name, each in parameters.items() if found.get(id(each), each) is None),
    )


def _layout(tensor: Tensor, gradient: Tensor | None) -> Layout:
    return Layout(_order_of(tensor), _order_of(gradient) if gradient is not None else ())


def _order_of(tensor: Tensor) -> _Order:
    """The order of a tensor's dimensions in memory, empty where it is the usual one."""
    strides, sizes = tensor.stride(), tensor.shape
    large = [d for d in range(tensor.dim()) if sizes[d] > 1 and strides[d] > 0]
    by_stride = sorted(large, key=lambda d: (-strides[d], d))
    if by_stride == large:
        return ()
    ranks = iter(by_stride)
    return tuple(next(ranks) if d in large else d for d in range(tensor.dim()))


def _laid_out(tensor: Tensor, order: _Order) -> Tensor:
    """The tensor with its dimensions in another order in memory."""
    inverse = [order.index(dimension) for dimension in range(len(order))]
    return tensor.permute(order).contiguous().permute(inverse)


def arrive(tensor: Tensor, order: _Order) -> Tensor:
    """A received tensor, laid out as in the whole model."""
    return _laid_out(tensor, tuple(order))


class _Departure(torch.autograd.Function):
    """A tensor made contiguous to be sent; its gradient is laid out as in the whole model."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: _Order) -> Tensor:
        ctx.order = order
        return tensor.contiguous() if not tensor.is_contiguous() else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return (_laid_out(gradients[0], ctx.order) if ctx.order else gradients[0]), None


def depart(tensor: Tensor, order: _Order) -> Tensor:
    """A tensor to be sent."""
    sent: Tensor = _Departure.apply(tensor, tuple(order))  # type: ignore[no-untyped-call]
    return sent
