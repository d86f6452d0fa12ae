"""One stage of a model: consecutive layers as a module from tensors to tensors.

Tensors travel between stages contiguous. Where the whole model holds one in another order of dimensions
(a permuted image, say), kernels sum in another order, and the last bits differ. So a stage puts
what arrives, and the gradient of what departs, back into the order it has in the whole.

    stage 0 … departs ─── contiguous ──▶ laid out … stage 1
    stage 0 … order'  ◀── contiguous ─── gradient   stage 1
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from stagewright.errors import ModelError
from stagewright.models.loss import LOSS_PATH
from stagewright.models.running import KEPT, runnable
from stagewright.models.tracing import TRAINING, Traced, paths_in
from stagewright.models.values import Fact, Layout, PerRow, TensorSpec, mutated_by


class StageModule(nn.Module):
    """Consecutive layers: `stage(*inputs, *targets) -> tuple of tensors`.

        stage(*inputs)            -> outputs               the inputs of the next stage
        stage(*inputs, *targets)  -> (loss, *predictions)  where the stage holds the layer "loss"

    `inputs`, `targets` and `outputs` are TensorSpecs in the order of the call. The loss is the sum over the
    rows; the predictions, the model's own outputs, come detached. Parameters carry the whole model's names.
    """

    _parts: nn.Module

    def __init__(
        self, graph: fx.Graph, objects: Mapping[str, Any], persistent: Set[str], *, layer_names: tuple[str, ...],
        inputs: tuple[TensorSpec, ...], targets: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...],
        evaluates: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.evaluates = evaluates
        self.layer_names, self.inputs, self.targets, self.outputs = layer_names, inputs, targets, outputs
        # The parts are this module's own, and yet reached through another one: a model may well
        # have a child called `inputs`.
        parts = _assembled(objects, persistent)
        self._modules, self._parameters, self._buffers = parts._modules, parts._parameters, parts._buffers
        self._non_persistent_buffers_set = parts._non_persistent_buffers_set
        self.__dict__["_parts"] = parts  # not by setattr, which would make it a child
        self.draws = any("place" in node.meta for node in graph.nodes)
        """Whether anything may be drawn at random."""
        places = {path: nn.Identity() for path in (*paths_in(graph), TRAINING)}
        self.called = tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "call_module"))
        """The paths of the parts that it calls; what else it uses of parameters it reads by itself."""
        self.read = frozenset(str(node.target) for node in graph.nodes if node.op == "get_attr")
        self._compute: Callable[..., Any] = type(fx.GraphModule({**places}, runnable(graph))).forward
        """The graph as a function of a module that holds its parts, and of the inputs."""

    @property
    def has_loss(self) -> bool:
        return LOSS_PATH in self._modules

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        expected = self.inputs + self.targets
        if len(tensors) != len(expected):
            raise ModelError(
                f"stage '{self.layer_names[0]}' … '{self.layer_names[-1]}' takes {len(expected)} tensors, "
                f"got {len(tensors)}",
                f"give {', '.join(spec.name for spec in expected)}",
            )
        if not self.training and not self.evaluates:
            raise ModelError(
                "the model branches on `training`, so its stages only train",
                "evaluate the whole model instead: it shares its weights with the stages",
            )
        self._parts.training = self.training
        result: tuple[Tensor, ...] = self._compute(self._parts, *tensors)
        return result


def _assembled(objects: Mapping[str, Any], persistent: Set[str]) -> nn.Module:
    """A module that holds modules, parameters and buffers at the paths they have in the whole model."""
    parts = nn.Module()
    for path, thing in objects.items():
        *owners, name = path.split(".")
        holder = parts
        for owner in owners:
            if owner not in holder._modules:
                holder.add_module(owner, nn.Module())
            holder = holder.get_submodule(owner)
        if isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter):
            holder.register_buffer(name, thing, persistent=path in persistent)
        else:
            setattr(holder, name, thing)
    return parts


class StageGraph:
    """The graph of one stage while it is being written.

    inputs ─▶ [values carried in] ─▶ nodes of its layers ─▶ [values carried out]
                    └─ what follows from no input is computed again
    """

    def __init__(
        self, traced: Traced, facts: Mapping[fx.Node, Fact], layouts: Mapping[fx.Node, tuple[Layout, ...]],
        carried: Sequence[fx.Node],
    ) -> None:  # fmt: skip
        self.graph = fx.Graph()
        self.traced, self.facts, self.layouts = traced, facts, layouts
        self.copies: dict[fx.Node, Any] = {}
        self._of_first: dict[str, fx.Node] = {}
        """What is asked of the first input: the rows, and the device."""
        placeholders = {
            node: [self.graph.placeholder(spec.name.replace(".", "_")) for spec in facts[node].carried]
            for node in carried
        }
        self.first = next((each for made in placeholders.values() for each in made), None)
        for node, tensors in placeholders.items():
            arrived = [
                self.graph.call_function(_laid_out, (tensor, layout.value)) if layout.value else tensor
                for tensor, layout in zip(tensors, self._layouts(node, len(tensors)))
            ]
            self.copies[node] = self._rebuilt(node, arrived)

    def _layouts(self, node: fx.Node, count: int) -> Sequence[Layout]:
        return self.layouts.get(node, (Layout(),) * count)

    def departing(self, node: fx.Node) -> list[Any]:
        """The tensors of a value, to be carried to the next stage."""
        tensors = self.tensors(node)
        return [
            tensor if layout == Layout() else self.graph.call_function(_depart, (tensor, layout.gradient))
            for tensor, layout in zip(tensors, self._layouts(node, len(tensors)))
        ]

    def _rebuilt(self, node: fx.Node, tensors: list[fx.Node]) -> Any:
        """A value as it was before the cut, from its tensors and constants."""
        fact, left = self.facts[node], iter(tensors)
        leaves = [next(left) if isinstance(part, TensorSpec) else self._constant(part) for part in fact.parts]
        return pytree.tree_unflatten(leaves, fact.nesting)

    def _constant(self, part: Any) -> Any:
        if isinstance(part, PerRow):
            if "rows" not in self._of_first:
                self._of_first["rows"] = self.graph.call_method("size", (self.first, 0))
            return self.graph.call_function(operator.mul, (self._of_first["rows"], part.times))
        return self._argument(part.value)

    def _here(self) -> fx.Node:
        """The device that the stage runs on."""
        if "device" not in self._of_first:
            self._of_first["device"] = self.graph.call_function(getattr, (self.first, "device"))
        return self._of_first["device"]

    def value(self, node: fx.Node) -> Any:
        """What stands for a node of the whole graph in this one."""
        if node not in self.copies:
            fact = self.facts[node]
            self.copies[node] = self._rebuilt(node, []) if fact.is_constant else self.add(node)
        return self.copies[node]

    def add(self, node: fx.Node) -> fx.Node:
        """A copy of a node, computed in this stage."""
        for changed in mutated_by(node, self.traced.objects):
            received = self.copies.get(changed)
            if isinstance(received, fx.Node) and received.op == "placeholder":
                # autograd forbids to change what was received
                self.copies[changed] = self.graph.call_function(torch.clone, (received,))
        args = fx.node.map_aggregate((node.args, dict(node.kwargs)), self._argument)
        copy = self.graph.create_node(node.op, node.target, *args, name=node.name)
        copy.meta.update({key: node.meta[key] for key in KEPT if key in node.meta})
        self.copies[node] = copy
        return copy

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self.value(arg)
        return self._here() if isinstance(arg, torch.device) else arg

    def tensors(self, node: fx.Node) -> list[Any]:
        """The tensors of a value, one by one, to be carried out."""
        fact, value = self.facts[node], self.value(node)
        if len(fact.parts) == 1 and fact.nesting.is_leaf():
            return [value]
        leaves = self.graph.call_function(pytree.tree_leaves, (value,))
        picked = [index for index, part in enumerate(fact.parts) if part in fact.tensors]
        return [self.graph.call_function(operator.getitem, (leaves, index)) for index in picked]


def _laid_out(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor with its dimensions in another order in memory."""
    inverse = [order.index(dimension) for dimension in range(len(order))]
    return tensor.permute(*order).contiguous().permute(inverse)


class _Departure(torch.autograd.Function):
    """A tensor made contiguous to be sent; its gradient is laid out as in the whole model."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: tuple[int, ...]) -> Tensor:
        ctx.order = order
        return tensor.contiguous() if not tensor.is_contiguous() else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return (_laid_out(gradients[0], ctx.order) if ctx.order else gradients[0]), None


def _depart(tensor: Tensor, order: Sequence[int]) -> Tensor:
    sent: Tensor = _Departure.apply(tensor, tuple(order))  # type: ignore[no-untyped-call]
    return sent
