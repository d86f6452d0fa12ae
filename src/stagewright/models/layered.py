"""Any module as ordered layers that can be cut.

model ─▶ trace ─▶ facts ─▶ layers      Layered.stage(first, last) ─▶ StageModule

conv1 │ conv2 │ fc1 │ loss             stage(0, 2), stage(2, 4): run in turn, they give the outputs and
0       1       2     3                the gradients of the whole, bit for bit
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, fx, nn

from stagewright.errors import ModelError
from stagewright.models.loss import LOSS_PATH, Loss, LossModule
from stagewright.models.stage import StageGraph, StageModule
from stagewright.models.tracing import Traced, paths_in
from stagewright.models.values import Flow, Gradients, TensorSpec, find_facts, find_flow, find_gradients

_FOUND = ("flow", "_gradients", "_names_by_layer", "tied")
"""What is found out when first asked for, and stays true of copies."""
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Under autocast these compute in its format, whatever they are given."""
Learns = Literal["next", "masked", "answer"]
_Again = Callable[[Callable[[Tensor], Tensor]], "Layered"]


class _Weights(Protocol):
    """Where the numbers come from of a model that has shapes alone."""

    def fill(self, model: nn.Module, names: Iterable[str], device: torch.device | str) -> None:
        """Puts those of some parameters and buffers into the model, on a device."""


@dataclass(frozen=True)
class Layer:
    """The name of a layer and the position of its first node."""

    name: str
    start: int


@dataclass(frozen=True, kw_only=True)
class Layered:
    """A model as ordered layers; a stage is any run of them between two cuts."""

    model: nn.Module
    traced: Traced
    layers: tuple[Layer, ...]
    evaluates: bool = True
    """Whether the stages do in evaluation what the model does."""
    again: _Again | None = None
    """Finds the layers of the same model anew, with its example tensors changed."""
    weights: _Weights | None = None
    """Where they come from, while the model has shapes alone: `load` gets those of a stage."""
    learns: Learns = "next"
    """What it learns of text: the next token, masked ones, or the answer to a prompt."""
    answer_start: int | None = None
    """The token that an answer begins with."""

    @cached_property
    def flow(self) -> Flow:
        """The values that flow between the layers; found when first asked for."""
        return find_flow(self.traced, find_facts(self.traced))

    @property
    def names(self) -> tuple[str, ...]:
        """The layers' names in order; the last is "loss" once a loss is attached."""
        return tuple(layer.name for layer in self.layers)

    @cached_property
    def order(self) -> tuple[fx.Node, ...]:
        """What the layers compute, node by node."""
        return self.traced.computing

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_loss(self) -> bool:
        return self.loss is not None

    @property
    def loss(self) -> Loss | None:
        """The loss that was attached, if one was."""
        module = self.traced.objects.get(LOSS_PATH)
        return module.loss if isinstance(module, LossModule) else None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs, in the order in which the first stage takes them."""
        return self._carried(self.traced.inputs)

    @property
    def only_multiplied(self) -> tuple[bool, ...]:
        """For each input whether linear layers and convolutions are all that read it."""
        nodes = self.traced.inputs
        if len(nodes) != len(self.inputs):  # one of them is a nest of several
            return (False,) * len(self.inputs)
        modules = {node: self.traced.objects[str(node.target)] for node in self.order if node.op == "call_module"}
        return tuple(all(isinstance(modules.get(user), _PRODUCTS) for user in node.users) for node in nodes)

    @property
    def targets(self) -> tuple[TensorSpec, ...]:
        """The targets, in the order in which the stage of the loss takes them after its inputs."""
        return self._carried(self.traced.targets)

    @property
    def predictions(self) -> tuple[TensorSpec, ...]:
        """The model's outputs that have an entry a row."""
        return self._carried(self._results[1])

    @property
    def row_tokens(self) -> int | None:
        """How many tokens a row has; None where rows are no text: where the first input is no run of whole numbers."""
        first = self.inputs[0] if self.inputs else None
        is_text = first is not None and first.dtype in (torch.int32, torch.int64) and len(first.shape_per_row) == 1
        return first.shape_per_row[0] if is_text and first is not None else None

    @property
    def sample_name(self) -> Literal["images", "samples"]:
        """What rows are called: images, or samples where they are something else."""
        return "images" if [len(each.shape_per_row) for each in self.inputs] == [3] else "samples"

    @property
    def sample(self) -> tuple[Tensor, ...]:
        """Example inputs, as many as `inputs`."""
        return self.traced.tensors[: len(self.traced.inputs)]

    @property
    def sample_targets(self) -> tuple[Tensor, ...]:
        """Example targets, as many as `targets`."""
        return self.traced.tensors[len(self.traced.inputs) :]

    @cached_property
    def tied(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The parameters that several layers use, with those layers."""
        users: dict[str, list[int]] = {}
        for layer in range(self.num_layers):
            for name in self._names_by_layer[layer]:
                users.setdefault(name, []).append(layer)
        return tuple((name, tuple(layers)) for name, layers in users.items() if len(layers) > 1)

    def load(self, first: int, last: int, device: torch.device | str) -> None:
        """Gets the weights of the layers first … last-1 that have shapes alone, and all buffers, to a device."""
        if self.weights is not None:
            _ = self._gradients  # found on shapes alone, so while there is nothing else
            buffers = (name for name, _ in self.model.named_buffers())
            self.weights.fill(self.model, [*self.parameter_names(first, last), *buffers], device)

    def load_rest(self, device: torch.device | str) -> None:
        """Gets what no layer uses, and yet belongs to the model."""
        if self.weights is not None:
            used = {*self.parameter_names(0, self.num_layers), *(name for name, _ in self.model.named_buffers())}
            named = dict(self.model.named_parameters())
            self.weights.fill(self.model, [name for name in named if name not in used], device)

    def loaded(self, device: torch.device | str) -> Layered:
        """These layers with all weights in place, on a device; the sample is zeros there."""
        self.load(0, self.num_layers, device)
        self.load_rest(device)

        def moved(argument: Any) -> Any:  # a device that a graph on shapes alone names
            return torch.device(device) if argument == torch.device("meta") else argument

        for node in self.traced.graph.nodes:
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), moved)
        objects = self._current(self.traced.objects)
        tensors = tuple(torch.zeros_like(each, device=device) for each in self.traced.tensors)
        return self.changed(traced=replace(self.traced, objects=objects, tensors=tensors))

    def changed(self, **changes: Any) -> Layered:
        """The same layers but for some fields, with what was found out of them so far."""
        made = replace(self, **changes)
        vars(made).update({name: value for name, value in vars(self).items() if name in _FOUND})
        return made

    def at_length(self, length: int) -> Layered:
        """The same layers of the same model for rows of another length, which a trace may have written down."""
        now = self.inputs[0].shape_per_row[0]
        if self.again is None:
            raise ModelError(f"the layers were found with rows of {now}, and cannot be found anew", "use one length")

        def resized(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or tensor.size(1) != now:
                return tensor
            return tensor.index_select(1, torch.arange(length, device=tensor.device) % now)

        made = self if length == now else self.again(resized)
        if made.names != self.names:
            raise ModelError(f"the layers of rows of {length} are others than those of rows of {now}", "use one length")
        return made

    def cuts(self) -> tuple[int, ...]:
        """The layers that may begin a stage, apart from the first."""
        return tuple(cut for cut in range(1, self.num_layers) if not self.flow.stuck(self._start(cut)))

    def parameter_names(self, first: int, last: int) -> tuple[str, ...]:
        """The whole model's names of the parameters of the layers first … last-1, each once."""
        names = [name for layer in range(first, last) for name in self._names_by_layer[layer]]
        return tuple(dict.fromkeys(names))

    def carried(self, cut: int) -> tuple[TensorSpec, ...]:
        """The tensors that cross the cut before a layer."""
        return self._crossing(self._entering(cut)) if cut else self.inputs

    def stage(self, first: int, last: int) -> StageModule:
        """The layers first … last-1 as a module; it shares the model's parameters."""
        if not 0 <= first < last <= self.num_layers:
            raise ModelError(
                f"no stage from layer {first} to {last}: the model has layers 0 … {self.num_layers - 1}",
                "a stage holds at least one layer",
            )
        for cut in {first, last} - {0, self.num_layers}:
            if self.flow.stuck(self._start(cut)):
                raise self.flow.stuck_at(self.names[cut], self._start(cut))
        target_nodes = self.traced.targets if self.has_loss and last == self.num_layers else ()
        entering = self._entering(first)
        graph = StageGraph(self.traced, self.flow.facts, self._gradients.layouts, [*entering, *target_nodes])
        for node in self.order[self._start(first) : self._start(last)]:
            if node in self.flow.made_at:
                graph.add(node)
        if last < self.num_layers:
            leaving = self._entering(last)
            made = [tensor for node in leaving for tensor in graph.departing(node)]
            outputs = self._crossing(leaving)
        else:
            loss, predictions = self._results
            made = [tensor for node in predictions for tensor in graph.tensors(node)]
            if loss is not None:
                made = [graph.value(loss), *(graph.graph.call_method("detach", (each,)) for each in made)]
            outputs = self._carried(predictions)
        graph.graph.output(tuple(made))
        return StageModule(
            graph.graph,
            self._sorted(self._current({path: self.traced.objects[path] for path in paths_in(graph.graph)})),
            self._persistent, layer_names=self.names[first:last], inputs=self.carried(first),
            targets=self._carried(target_nodes), outputs=outputs, evaluates=self.evaluates,
        )  # fmt: skip

    @property
    def _results(self) -> tuple[fx.Node | None, list[fx.Node]]:
        """The node of the loss, if there is one, and those of the model's outputs."""
        nodes = self.traced.results
        return (nodes[0], nodes[1:]) if self.has_loss else (None, nodes)

    def _entering(self, layer: int) -> list[fx.Node]:
        if layer == 0:
            return list(self.traced.inputs)
        targets = self.traced.targets
        return [node for node in self.flow.crossing(self._start(layer)) if node not in targets]

    @cached_property
    def _gradients(self) -> Gradients:
        entering = [node for layer in range(1, self.num_layers) for node in self._entering(layer)]
        parameters = dict(self.model.named_parameters())
        return find_gradients(self.traced, list(dict.fromkeys(entering)), parameters, has_loss=self.has_loss)

    @property
    def unreached(self) -> frozenset[str]:
        """The parameters to which no gradient comes: a plain loop leaves them as they are, and so does every plan."""
        return self._gradients.unreached

    def _carried(self, nodes: Sequence[fx.Node]) -> tuple[TensorSpec, ...]:
        return tuple(spec for node in nodes for spec in self.flow.facts[node].carried)

    def _crossing(self, nodes: Sequence[fx.Node]) -> tuple[TensorSpec, ...]:
        """What is carried over a cut; a gradient comes back only where the loss depends on it."""
        reaches = self._gradients.reaches
        pairs = [pair for node in nodes for pair in zip(self.flow.facts[node].tensors, reaches[node], strict=True)]
        return tuple(
            replace(part, needs_grad=part.needs_grad and is_reached)
            for part, is_reached in pairs
            if isinstance(part, TensorSpec)
        )

    def _start(self, layer: int) -> int:
        return self.layers[layer].start if layer < self.num_layers else len(self.order)

    @cached_property
    def _names_by_layer(self) -> tuple[tuple[str, ...], ...]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        objects = self._current(self.traced.objects)

        def used(node: fx.Node) -> list[str]:
            if self.flow.facts[node].is_constant:  # a dtype, a size or a device is no use of a weight
                return []
            inside = objects[str(node.target)].parameters() if node.op == "call_module" else ()
            read = (objects.get(str(each.target)) for each in node.all_input_nodes if each.op == "get_attr")
            return [names[id(each)] for each in (*inside, *read) if isinstance(each, nn.Parameter)]

        layers = ((self._start(layer), self._start(layer + 1)) for layer in range(self.num_layers))
        return tuple(
            tuple(dict.fromkeys(name for node in self.order[start:end] for name in used(node))) for start, end in layers
        )

    @cached_property
    def _persistent(self) -> frozenset[str]:
        return frozenset(self.model.state_dict(keep_vars=True))

    def _current(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """What the model holds now: moving a model to another device replaces its buffers, loading its parameters."""
        now: dict[str, Any] = dict(self.model.named_buffers(remove_duplicate=False))
        now.update(self.model.named_parameters(remove_duplicate=False))
        return {path: now.get(path, thing) for path, thing in objects.items()}

    def _sorted(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Objects in the model's own order, so that a tied parameter keeps its first name."""
        ranks: dict[str, int] = {}
        for rank, (name, _) in enumerate(self.model.named_parameters(remove_duplicate=False)):
            for path in accumulate(name.split("."), lambda owner, part: f"{owner}.{part}"):
                ranks.setdefault(path, rank)
        return dict(sorted(objects.items(), key=lambda item: ranks.get(item[0], len(ranks))))
