"""One stage of a model: consecutive layers as a module from tensors to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from stagewright.errors import ModelError
from stagewright.models.layouts import Layout, arrive, depart
from stagewright.models.loss import LOSS_PATH
from stagewright.models.modes import KEPT, runnable
from stagewright.models.operations import count_rows, device_of, leaves_of, pick, times
from stagewright.models.tracing import TRAINING, Traced
from stagewright.models.values import Fact, Here, PerRow, TensorSpec, mutated_by


class StageModule(nn.Module):
    """Consecutive layers: `stage(*inputs, *targets) -> tuple of tensors`.

        stage(*inputs)            -> outputs               the inputs of the next stage
        stage(*inputs, *targets)  -> (loss, *predictions)  where the stage holds the layer "loss"

    `inputs`, `targets` and `outputs` are TensorSpecs in the order of the call. The loss is the sum over the
    rows; the predictions, the model's own outputs, come detached. Parameters carry the whole model's names.
    """

    layer_names: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    targets: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    _parts: nn.Module

    def __init__(
        self,
        graph: fx.Graph,
        parts: nn.Module,
        *,
        layer_names: tuple[str, ...],
        inputs: tuple[TensorSpec, ...],
        targets: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        evaluates: bool = True,
    ) -> None:
        super().__init__()
        self.evaluates = evaluates
        self.layer_names, self.inputs, self.targets, self.outputs = layer_names, inputs, targets, outputs
        # The parts are this module's own, and yet reached through another one: a model may well
        # have a child called `inputs`.
        self._modules, self._parameters, self._buffers = parts._modules, parts._parameters, parts._buffers
        self._non_persistent_buffers_set = parts._non_persistent_buffers_set
        self.__dict__["_parts"] = parts  # not by setattr, which would make it a child
        self.draws = any("place" in node.meta for node in graph.nodes)
        """Whether anything may be drawn at random."""
        self._compute = _compiled(graph)

    @property
    def has_loss(self) -> bool:
        return LOSS_PATH in self._modules

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self._check(len(tensors))
        self._parts.training = self.training
        result: tuple[Tensor, ...] = self._compute(self._parts, *tensors)
        return result

    def _check(self, num_tensors: int) -> None:
        expected = self.inputs + self.targets
        if num_tensors != len(expected):
            first, last = self.layer_names[0], self.layer_names[-1]
            raise ModelError(
                f"stage '{first}' … '{last}' takes {len(expected)} tensors, got {num_tensors}",
                f"give {', '.join(spec.name for spec in expected)}",
            )
        if not self.training and not self.evaluates:
            raise ModelError(
                "the model branches on `training`, so its stages only train",
                "evaluate the whole model instead: it shares its weights with the stages",
            )


def _compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a function of a module that holds its parts, and of the inputs."""
    graph = runnable(graph)
    paths = {str(node.target): nn.Identity() for node in graph.nodes if node.op in ("call_module", "get_attr")}
    function: Callable[..., Any] = type(fx.GraphModule({**paths}, graph)).forward
    return function


def assembled(objects: Mapping[str, Any], persistent: Set[str]) -> nn.Module:
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
        self,
        traced: Traced,
        facts: Mapping[fx.Node, Fact],
        layouts: Mapping[fx.Node, tuple[Layout, ...]],
        carried: Sequence[fx.Node],
    ) -> None:
        self.graph = fx.Graph()
        self.traced, self.facts, self.layouts = traced, facts, layouts
        self.copies: dict[fx.Node, Any] = {}
        self.first: fx.Node | None = None
        self.inputs: list[TensorSpec] = []
        self.rows: fx.Node | None = None
        self.here: fx.Node | None = None
        placeholders = {node: self._placeholders(node) for node in carried}
        for node, parts in placeholders.items():
            self.copies[node] = self._rebuilt(node, self._arrived(node, parts))

    def _placeholders(self, node: fx.Node) -> list[fx.Node]:
        """One input of the stage for each tensor of a value that is carried in."""
        specs = self.facts[node].carried
        self.inputs += specs
        made = [self.graph.placeholder(spec.name.replace(".", "_")) for spec in specs]
        self.first = self.first or (made[0] if made else None)
        return made

    def _arrived(self, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
        """The tensors of a value that is carried in, laid out as in the whole model."""
        layouts = self.layouts.get(node, (Layout(),) * len(tensors))
        return [
            self.graph.call_function(arrive, (tensor, layout.value)) if layout.value else tensor
            for tensor, layout in zip(tensors, layouts)
        ]

    def departing(self, node: fx.Node) -> list[Any]:
        """The tensors of a value, to be carried to the next stage."""
        tensors = self.tensors(node)
        layouts = self.layouts.get(node, (Layout(),) * len(tensors))
        return [
            tensor if layout == Layout() else self.graph.call_function(depart, (tensor, layout.gradient))
            for tensor, layout in zip(tensors, layouts)
        ]

    def _rebuilt(self, node: fx.Node, tensors: list[fx.Node]) -> Any:
        """A value as it was before the cut, from its tensors and constants."""
        fact, left = self.facts[node], iter(tensors)
        leaves = [next(left) if isinstance(part, TensorSpec) else self._constant(part) for part in fact.parts]
        return pytree.tree_unflatten(leaves, fact.nesting)

    def _constant(self, part: Any) -> Any:
        if isinstance(part, PerRow):
            return self.graph.call_function(times, (self._rows(), part.times))
        return self._here() if isinstance(part, Here) else part.value

    def _rows(self) -> fx.Node:
        if self.rows is None:
            self.rows = self.graph.call_function(count_rows, (self.first,))
        return self.rows

    def _here(self) -> fx.Node:
        if self.here is None:
            self.here = self.graph.call_function(device_of, (self.first,))
        return self.here

    def value(self, node: fx.Node) -> Any:
        """What stands for a node of the whole graph in this one."""
        if node not in self.copies:
            fact = self.facts[node]
            self.copies[node] = self._rebuilt(node, []) if fact.is_constant else self.add(node)
        return self.copies[node]

    def add(self, node: fx.Node) -> fx.Node:
        """A copy of a node, computed in this stage."""
        for changed in mutated_by(node, self.traced.objects):
            self._own(changed)
        args = fx.node.map_aggregate((node.args, dict(node.kwargs)), self._argument)
        copy = self.graph.create_node(node.op, node.target, *args, name=node.name)
        copy.meta.update({key: node.meta[key] for key in KEPT if key in node.meta})
        self.copies[node] = copy
        return copy

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self.value(arg)
        return self._here() if isinstance(arg, torch.device) else arg

    def _own(self, node: fx.Node) -> None:
        """Copies a carried tensor before it is changed: autograd forbids it on what was received."""
        received = self.copies.get(node)
        if isinstance(received, fx.Node) and received.op == "placeholder":
            self.copies[node] = self.graph.call_function(torch.clone, (received,))

    def tensors(self, node: fx.Node) -> list[Any]:
        """The tensors of a value, one by one, to be carried out."""
        fact, value = self.facts[node], self.value(node)
        if len(fact.parts) == 1 and fact.nesting.is_leaf():
            return [value]
        leaves = self.graph.call_function(leaves_of, (value,))
        picked = [index for index, part in enumerate(fact.parts) if part in fact.tensors]
        return [self.graph.call_function(pick, (leaves, index)) for index in picked]

    def objects(self) -> dict[str, Any]:
        """What the graph's nodes refer to, by its path in the whole model."""
        paths = [str(node.target) for node in self.graph.nodes if node.op in ("call_module", "get_attr")]
        return {path: self.traced.objects[path] for path in dict.fromkeys(paths) if path != TRAINING}
