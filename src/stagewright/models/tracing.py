"""Turns a module into a graph: one node a computation, in the order in which they run.

    nn.Sequential            ─▶ one node a child
    what torch.fx can trace  ─▶ one node a childless module or function
    everything else          ─▶ torch.export: one node an operator  (exporting.py)

Each node's `meta["path"]` is the tuple of dotted paths of the modules it runs inside, outermost first.
Parameters stay the model's own, under the model's own names.
"""

from __future__ import annotations

import inspect
import linecache
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import stagewright
from stagewright.errors import ModelError
from stagewright.models.functions import keeping
from stagewright.models.running import autocast_on, casts, mode_now, runnable

TRAINING = "training"
"""The attribute a graph reads to know whether the stage trains or evaluates."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Example inputs of a model, and targets: tensors have one entry a row, everything else is a constant."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ModelError("the sample holds no tensor", "give the inputs of one call of the model")
        for tensors in (self.tensors, self.targets):
            if len({each.shape[:1] for each in tensors}) > 1 or not all(each.dim() for each in tensors):
                raise ModelError(
                    f"the sample's tensors differ in rows: {', '.join(str(tuple(each.shape)) for each in tensors)}",
                    "give every input one entry a row in its first dimension, or leave it out",
                )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The inputs, in order."""
        return tensors_in((self.args, dict(self.kwargs)))

    def map(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """The same sample with every tensor changed."""
        changed = pytree.tree_map_only(Tensor, change, (self.args, dict(self.kwargs), self.targets))
        return Sample(args=changed[0], kwargs=changed[1], targets=changed[2])

    def with_rows(self, rows: int) -> Sample:
        """The same sample with another number of rows: its own, repeated."""
        return self.map(lambda each: each[torch.arange(rows, device=each.device) % max(1, each.size(0))])

    def call(self, model: nn.Module) -> tuple[Tensor, ...]:
        """What a model makes of the inputs."""
        return tensors_in(model(*self.args, **self.kwargs))


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model as a graph, what its nodes refer to under the model's own names, and example inputs."""

    graph: fx.Graph
    objects: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    num_targets: int = 0
    """The last of the placeholders, and of the tensors, are the targets."""

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in self.graph.nodes if node.op == "placeholder")

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return self.placeholders[: len(self.placeholders) - self.num_targets]

    @property
    def targets(self) -> tuple[fx.Node, ...]:
        return self.placeholders[len(self.inputs) :]

    @property
    def computing(self) -> tuple[fx.Node, ...]:
        """The nodes that compute something, in order."""
        return tuple(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr", "output"))

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that the graph returns."""
        return [leaf for leaf in pytree.tree_leaves(self.graph.output_node().args[0]) if isinstance(leaf, fx.Node)]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def module(self, *, in_modes: bool = False) -> fx.GraphModule:
        """The whole graph as one module that takes the example inputs; to be called, with every node in its mode."""
        return fx.GraphModule({**self.objects, TRAINING: True}, runnable(self.graph) if in_modes else self.graph)


_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, stagewright))


def _is_library(filename: str) -> bool:
    """Whether code is torch's, Python's or this library's own, not the model's."""
    return filename.startswith((*_LIBRARIES, "<", sys.base_prefix))


def line_in(trace: str | None) -> str | None:
    """The innermost line of the model's own code in a stack trace."""
    found = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', trace or "")
    own = [(name, number, line) for name, number, line in found if not _is_library(name)]
    return f"{own[-1][0]}:{own[-1][1]} ({own[-1][2].strip()})" if own else None


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """The tensors of a nested value, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def attribute(model: nn.Module, path: str) -> Any:
    """What a model holds at a dotted path."""
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def paths_in(graph: fx.Graph) -> list[str]:
    """The paths of what the graph's nodes refer to, each once."""
    paths = dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr"))
    return [path for path in paths if path != TRAINING]


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
    objects = {path: attribute(model, path) for path in paths_in(graph)}
    return Traced(graph=graph, objects=objects, tensors=sample.tensors)


def _sequential_paths(model: nn.Sequential, prefix: str = "") -> Iterator[str]:
    for name, child in model._modules.items():
        if is_chain(child) and len(child):
            yield from _sequential_paths(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def is_chain(module: nn.Module | None) -> TypeGuard[nn.Sequential]:
    """Whether a module does nothing but call its children in turn: nobody listens, and forward is torch's own."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not _heard(module)


def _heard(module: nn.Module) -> bool:
    """Whether a module has hooks, which a trace through it would lose."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in hooks)


class _ModuleTracer(fx.Tracer):
    """Traces modules down to those without children or with hooks, torch's own, and the given leaves."""

    def __init__(self, leaves: Sequence[str]) -> None:
        super().__init__()
        self.leaves = frozenset(leaves)
        self.casts = casts()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.leaves or next(m.children(), None) is None or _heard(m):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that remembers the mode it was met in, and the line of the model that made it.

        torch would note the line too, but loads its compilers for that, which takes seconds.
        """
        node = super().create_node(*args, **kwargs)
        for frame, number in traceback.walk_stack(None):
            name = frame.f_code.co_filename
            if not _is_library(name):
                line = linecache.getline(name, number).strip()
                node.meta["stack_trace"] = f'File "{name}", line {number}, in {frame.f_code.co_name}\n    {line}'
                break
        if mode := mode_now(self.casts):
            node.meta["mode"] = mode
        return node


def trace_symbolic(model: nn.Module, sample: Sample, leaves: Sequence[str] = ()) -> Traced:
    """The graph as torch.fx sees it; what is no tensor in the sample is a constant."""
    given = _bound(model, sample)
    constants = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
    names = [next(name for name, value in given.items() if value is tensor) for tensor in sample.tensors]
    with torch.enable_grad(), autocast_on(), _unchanged(model):
        tracer = _ModuleTracer(leaves)
        with keeping(tracer) as kept:
            found = tracer.trace(model, concrete_args=constants or None)
        graph = _without_constants(found, names)
        own = (path for path in paths_in(graph) if path not in kept.modules)
        objects = {**{path: attribute(model, path) for path in own}, **kept.modules}
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


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back the model's attributes on the way out: torch.fx leaves constants on it, and proxies in their place."""
    stores = [vars(module) for module in model.modules()]
    stores += [vars(module)[kind] for module in model.modules() for kind in ("_buffers", "_parameters", "_modules")]
    before = [dict(store) for store in stores]
    try:
        yield
    finally:
        for store, kept in zip(stores, before):
            if store.keys() != kept.keys() or any(store[name] is not kept[name] for name in kept):
                store.clear()
                store.update(kept)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts back the model's modes and buffers, and the random numbers, on the way out."""
    modes = {module: module.training for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in modes}
    values = {buffer: buffer.clone() for buffer in model.buffers()}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            for module, training in modes.items():
                module.training = training
                module._buffers.update(buffers[module])  # forward may have assigned others
            with torch.no_grad():
                for buffer, before in values.items():
                    buffer.copy_(before)
