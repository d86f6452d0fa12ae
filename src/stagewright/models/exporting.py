"""Turns a module that torch.fx cannot trace into a graph of operators, by torch.export.

torch.export writes down one mode of the model. Here the graph is given both back:

    dropout(x, p, True)        ─▶ dropout(x, p, training)
    batch_norm(…, True, …)     ─▶ batch_norm(…, training, …)
    blocks without gradient    ─▶ their operators, each marked
    parameters as inputs       ─▶ parameters by their names
"""

from __future__ import annotations

import inspect
import operator
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from stagewright.errors import ModelError
from stagewright.models.functions import Kept, is_kept, keeping
from stagewright.models.kernels import ATTENTION, use_kernels
from stagewright.models.modes import Mode, inference_as_no_grad
from stagewright.models.operations import count_batch, rate_in
from stagewright.models.tracing import TRAINING, Sample, Traced, attribute, is_library, undisturbed

_aten = torch.ops.aten
_WITH_FLAG = {
    _aten.dropout.default: 2,
    _aten.feature_dropout.default: 2,
    _aten.alpha_dropout.default: 2,
    _aten.feature_alpha_dropout.default: 2,
    _aten.batch_norm.default: 5,
}
"""Operators that behave differently in training, and the index of the argument that says so."""

_MOVE = _aten.to.dtype_layout
"""What `tensor.to(device)` becomes, which says no number format: all of a stage is on one device."""
_CHECKS = ("_assert", "sym_constrain", "_guards")


def trace_exported(model: nn.Module, sample: Sample, whole: Mapping[str, nn.Module] | None = None) -> Traced:
    """The graph of operators of a model in training, any number of rows; the modules named `whole` are a node each."""
    if not whole:
        _check_hooks(model)
    with torch.enable_grad(), inference_as_no_grad(), keeping(modules=whole) as kept:
        program = _export(model, sample)
    graph = _OperatorGraph(program, model, kept)
    use_kernels(graph.graph, graph.objects)
    return Traced(graph=graph.graph, objects=graph.objects, tensors=sample.tensors)


def _check_hooks(model: nn.Module) -> None:
    """Refuses backward hooks of modules, which operators do not have."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ModelError(
                f"the module '{name}' has a backward hook, and {type(model).__name__} can only be cut operator by "
                "operator, which loses it",
                "leave the hook out, or make the model one that torch.fx can trace (no branch on sizes or values)",
            )


def _export(model: nn.Module, sample: Sample) -> torch.export.ExportedProgram:
    bound = inspect.signature(model.forward).bind(*sample.args, **sample.kwargs).arguments
    shapes = {name: pytree.tree_map(_free_rows, value) for name, value in bound.items()}
    with undisturbed(model), warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        if not model.training:
            model.train()
        try:
            return torch.export.export(model, sample.args, dict(sample.kwargs), dynamic_shapes=shapes, strict=False)
        except Exception as error:
            place = _line_of(error)
            raise ModelError(
                f"{type(model).__name__} cannot be traced{f' at {place}' if place else ''}: {_first_line(error)}",
                "a branch on values, or a size that depends on them, cannot be cut: choose by torch.where, or put that "
                "part into a module without children, which is kept whole",
            ) from error


def _free_rows(leaf: Any) -> Any:
    return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) else None


def _line_of(error: BaseException | None) -> str | None:
    """The line of the user's own code that an error comes from: the innermost outside of torch and of this library."""
    while error is not None:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not is_library(each.filename)]
        if frames:
            return f"{frames[-1].filename}:{frames[-1].lineno} ({(frames[-1].line or '').strip()})"
        error = error.__cause__ or error.__context__
    return None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class _OperatorGraph:
    """The graph of an exported program while it is being rewritten."""

    def __init__(self, program: torch.export.ExportedProgram, model: nn.Module, kept: Kept) -> None:
        self.program, self.model, self.kept = program, model, kept
        self.graph = fx.Graph()
        self.objects: dict[str, Any] = dict(kept.modules)
        nodes = list(program.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        pairs = list(zip(inputs, program.graph_signature.input_specs))
        copies = {node: self._input(spec) for node, spec in pairs if spec.kind == InputKind.USER_INPUT}
        copies |= {node: self._named(spec) for node, spec in pairs if spec.kind != InputKind.USER_INPUT}
        self._add_all(nodes[len(inputs) :], copies, program.graph_module, Mode())

    def _input(self, spec: InputSpec) -> Any:
        """A tensor input of the model, or the constant given in its place."""
        if isinstance(spec.arg, TensorArgument):
            return self.graph.placeholder(spec.arg.name)
        return getattr(spec.arg, "value", None)

    def _named(self, spec: InputSpec) -> fx.Node:
        """A parameter or buffer of the model, or a constant that tracing met."""
        name = str(spec.target)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            self.objects[name] = attribute(self.model, name)
        elif isinstance(constant := self.program.constants.get(name), Tensor):
            name = name.replace(".", "_")
            self.objects[name] = constant
        else:
            raise ModelError(f"the model holds '{name}', which is no tensor", "make it part of a module")
        return self.graph.get_attr(name)

    def _add_all(
        self, nodes: list[fx.Node], copies: dict[fx.Node, Any], owner: nn.Module, mode: Mode
    ) -> tuple[Any, ...]:
        """Copies nodes, those of nested blocks in their place; returns the values of the output."""
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda old: copies[old])
            if node.op == "output":
                return self._output(args[0], nested=owner is not self.program.graph_module)
            if node.op == "get_attr":
                copies[node] = attribute(owner, str(node.target))
            elif not any(check in str(node.target) for check in _CHECKS):
                copies[node] = self._copy(node, args, kwargs, mode)
        return ()

    def _output(self, values: Any, nested: bool) -> tuple[Any, ...]:
        if not nested:
            specs = self.program.graph_signature.output_specs
            for value, spec in zip(values, specs, strict=True):
                if spec.kind == OutputKind.BUFFER_MUTATION:  # forward assigned the buffer
                    self.objects[str(spec.target)] = attribute(self.model, str(spec.target))
                    self.graph.call_function(_aten.copy_.default, (self.graph.get_attr(str(spec.target)), value))
            made = [value for value, spec in zip(values, specs) if spec.kind == OutputKind.USER_OUTPUT]
            self.graph.output(tuple(value for value in made if isinstance(value, fx.Node)))
        return tuple(values) if isinstance(values, tuple | list) else (values,)

    def _copy(self, node: fx.Node, args: Any, kwargs: Any, mode: Mode) -> Any:
        if node.target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        if node.target is _MOVE and _dtype_of(node) == _dtype_of(node.args[0]):
            return args[0]  # with the number format written down, another one that the stage computes in would be lost
        if is_kept(node.target):
            path, args, kwargs = self.kept.called(*args)
            if path not in self.objects:
                self.objects[path] = attribute(self.model, path)
            copy = self.graph.call_module(path, tuple(args), kwargs)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._block(node, args, mode)
        else:
            target, args, kwargs = self._both_modes(node.target, args, kwargs)
            copy = self.graph.create_node("call_function", target, tuple(args), kwargs, name=node.name)
        copy.meta["path"] = tuple(path for path in _stack(node) if path)
        copy.meta["stack_trace"] = node.meta.get("stack_trace")
        if mode:
            copy.meta["mode"] = mode
        return copy

    def _block(self, node: fx.Node, args: Any, mode: Mode) -> tuple[Any, ...]:
        """A block of nodes that runs without gradient or without autocast."""
        inner, block, values = _block_of(node, args)
        nodes = list(block.graph.nodes)
        inputs = [each for each in nodes if each.op == "placeholder"]
        return self._add_all(nodes[len(inputs) :], dict(zip(inputs, values)), block, inner.inside(mode))

    def _both_modes(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """An operator that follows the stage's mode where it was traced in training."""
        index = _WITH_FLAG.get(target)
        if index is not None and args[index] is True:
            return target, (*args[:index], self._training(), *args[index + 1 :]), kwargs
        if target is ATTENTION and len(args) > 4 and args[4]:
            rate = self.graph.call_function(rate_in, (args[4], self._training()))
            return target, (*args[:4], rate, *args[5:]), kwargs
        if target is ATTENTION and kwargs.get("dropout_p"):
            rate = self.graph.call_function(rate_in, (kwargs["dropout_p"], self._training()))
            return target, args, {**kwargs, "dropout_p": rate}
        if target is _aten.add_.Tensor and str(getattr(args[0], "target", "")).endswith("num_batches_tracked"):
            return count_batch, (args[0], self._training()), {}
        return target, args, kwargs

    def _training(self) -> fx.Node:
        return self.graph.get_attr(TRAINING)


def _dtype_of(node: Any) -> Any:
    """The number format of a node's value as it was traced; None where it is no tensor."""
    return getattr(node.meta.get("val"), "dtype", None) if isinstance(node, fx.Node) else None


def _stack(node: fx.Node) -> Iterator[str]:
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if not path.startswith("_empty"):
            yield path


def _block_of(node: fx.Node, args: Any) -> tuple[Mode, fx.GraphModule, Any]:
    """The mode, the block and the inputs of a higher-order operator."""
    name = str(node.target)
    if name == "wrap_with_set_grad_enabled":
        return Mode(gradient=bool(args[0])), args[1], args[2:]
    if name == "wrap_with_autocast":
        kind, dtype, enabled = args[:3]
        return Mode(autocast=((kind, bool(enabled), dtype or torch.get_autocast_dtype(kind)),)), args[4], args[5:]
    raise ModelError(f"the model uses '{name}', which cannot be cut", "leave control flow to the caller of the model")
