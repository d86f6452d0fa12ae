"""Turns a module into a graph: one node a computation, in the order in which they run.

    nn.Sequential            ─▶ one node a child
    what torch.fx can trace  ─▶ one node a childless module or function
    everything else          ─▶ torch.export: one node an operator  (exporting.py)

Each node's `meta["path"]` is the tuple of dotted paths of the modules it runs inside, outermost first.
Parameters stay the model's own, under the model's own names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from stagewright.errors import ModelError

TRACED_ROWS, CHECKED_ROWS = 2, 3
"""Rows while tracing (one row would be taken for a dimension to broadcast) and while checking."""

TRAINING = "training"
"""The attribute a graph reads to know whether the stage trains or evaluates."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Example inputs of a model: tensors have one entry a row, everything else is a constant."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ModelError("the sample holds no tensor", "give the inputs of one call of the model")
        rows = self.tensors[0].shape[:1]
        for tensor in self.tensors:
            if tensor.shape[:1] != rows or not tensor.dim():
                raise ModelError(
                    f"the sample's tensors differ in rows: {_shapes(self.tensors)}",
                    "give every input one entry a row in its first dimension, or leave it out",
                )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tensors_in((self.args, dict(self.kwargs)))

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def with_rows(self, rows: int) -> Sample:
        """The same sample with another number of rows: its own, repeated."""
        take = torch.arange(rows, device=self.device) % max(1, self.tensors[0].size(0))
        resized = [leaf[take] if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(resized, self._spec)
        return Sample(args=args, kwargs=kwargs)

    @property
    def _leaves(self) -> list[Any]:
        return pytree.tree_leaves((self.args, dict(self.kwargs)))

    @property
    def _spec(self) -> pytree.TreeSpec:
        return pytree.tree_structure((self.args, dict(self.kwargs)))


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model as a graph, what its nodes refer to under the model's own names, and example inputs."""

    graph: fx.Graph
    objects: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    evaluates: bool = True

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in self.graph.nodes if node.op == "placeholder")

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def module(self) -> fx.GraphModule:
        """The whole graph as one module that takes the example inputs."""
        return fx.GraphModule({**self.objects, TRAINING: True}, self.graph)


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """The tensors of a nested value, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def trace_sequential(model: nn.Sequential, sample: Sample) -> Traced:
    """A chain of calls of the children, those of nested sequential containers included."""
    if len(sample.tensors) != 1 or len(sample.args) != 1:
        raise ModelError(
            f"a sequential model takes one input, the sample has {len(sample.tensors)}",
            "give the sample as a tuple of one tensor",
        )
    graph = fx.Graph()
    value = graph.placeholder("input")
    for path in _sequential_paths(model):
        value = graph.call_module(path, (value,))
        value.meta["path"] = (path,)
    graph.output((value,))
    return Traced(graph=graph, objects=referred(model, graph), tensors=sample.tensors)


def _sequential_paths(model: nn.Sequential, prefix: str = "") -> Iterator[str]:
    for name, child in model._modules.items():
        if isinstance(child, nn.Sequential) and len(child):
            yield from _sequential_paths(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


class ModuleTracer(fx.Tracer):
    """Traces modules down to those without children, torch's own, and the given leaves."""

    def __init__(self, leaves: Sequence[str]) -> None:
        super().__init__()
        self.leaves = frozenset(leaves)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.leaves or next(m.children(), None) is None:
            return True
        return super().is_leaf_module(m, module_qualified_name)


def trace_symbolic(model: nn.Module, sample: Sample, leaves: Sequence[str] = ()) -> Traced:
    """The graph as torch.fx sees it; what is no tensor in the sample is a constant."""
    given = _bound(model, sample)
    constants = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
    names = [_name_of(tensor, given) for tensor in sample.tensors]
    own = set(vars(model))
    found = ModuleTracer(leaves).trace(model, concrete_args=constants or None)
    graph = _without_constants(found, names)
    objects = referred(model, graph)
    for name in set(vars(model)) - own:  # torch.fx leaves the tensor constants it met on the model
        delattr(model, name)
    return Traced(graph=graph, objects=objects, tensors=sample.tensors)


def _bound(model: nn.Module, sample: Sample) -> dict[str, Any]:
    """The arguments of the forward pass by name, refused where torch.fx would guess."""
    signature = inspect.signature(model.forward)
    simple = inspect.Parameter.POSITIONAL_OR_KEYWORD
    bound = signature.bind(*sample.args, **sample.kwargs)
    bound.apply_defaults()
    nested = any(tensors_in(v) for v in bound.arguments.values() if not isinstance(v, Tensor))
    if nested or any(parameter.kind != simple for parameter in signature.parameters.values()):
        raise ModelError(f"{type(model).__name__} takes arguments that cannot be traced symbolically")
    return dict(bound.arguments)


def _name_of(tensor: Tensor, given: Mapping[str, Any]) -> str:
    return next(name for name, value in given.items() if value is tensor)


def _without_constants(found: fx.Graph, tensors: Sequence[str]) -> fx.Graph:
    """A copy of the graph with the inputs in the sample's order, without constants and checks on them."""
    graph = fx.Graph()
    inputs = {node.target: node for node in found.nodes if node.op == "placeholder"}
    copies = {inputs[name]: graph.placeholder(name) for name in tensors}
    for node in found.nodes:
        if node.op == "placeholder" or not set(node.all_input_nodes) <= set(copies):
            continue
        copies[node] = graph.node_copy(node, lambda old: copies[old])
        stack = node.meta.get("nn_module_stack") or {}
        copies[node].meta["path"] = tuple(path for path, _ in stack.values() if path)
    return graph


def referred(model: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    """What the graph's nodes refer to, by its path in the model."""
    paths = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
    return {path: attribute(model, path) for path in paths if path != TRAINING}


def attribute(model: nn.Module, path: str) -> Any:
    """What a model holds at a dotted path."""
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def reproduces(traced: Traced, model: nn.Module, sample: Sample, training: bool) -> bool:
    """Whether the graph gives the model's outputs: bit for bit in training, to rounding in evaluation.

    Evaluation may take other kernels, such as the fused ones of torch's own transformer layers.
    """
    if sample.device.type == "meta":
        return True
    sample, module = sample.with_rows(CHECKED_ROWS), traced.module()
    with undisturbed(model), torch.no_grad():
        if model.training != training:
            model.train(training)
        module.training = training
        torch.manual_seed(0)
        expected = tensors_in(model(*sample.args, **sample.kwargs))
        torch.manual_seed(0)
        found = tensors_in(module(*sample.tensors))
    same = torch.equal if training else _close
    return len(found) == len(expected) and all(same(*map(torch.nan_to_num, p)) for p in zip(found, expected))


def _close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts back the model's modes and buffers, and the random numbers, on the way out."""
    modes = {module: module.training for module in model.modules()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            with torch.no_grad():
                for buffer, before in buffers.items():
                    buffer.copy_(before)
