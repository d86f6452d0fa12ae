"""Turns a module that torch.fx cannot trace into a graph of operators, by torch.export.

torch.export writes down one mode of the model. Here the graph is given both back:

    dropout(x, p, True)        ─▶ dropout(x, p, training)
    batch_norm(…, True, …)     ─▶ batch_norm(…, training, …)
    blocks without gradient    ─▶ their operators, each marked
    parameters as inputs       ─▶ parameters by their names

And what it spells out becomes torch's own kernel. transformers gives attention no mask where every token sees those
before it, but while it is traced it writes the mask down, which kernels then read for every head and row. Its norms are
six operators, which on a card are six passes over the rows, and twice as many backward.
"""

from __future__ import annotations

import inspect
import operator
import traceback
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from stagewright.errors import ModelError
from stagewright.models.functions import Kept, is_kept, keeping
from stagewright.models.running import Mode, inference_as_no_grad
from stagewright.models.tracing import TRAINING, Sample, Traced, attribute, first_line, line_in, undisturbed
from stagewright.models.values import FEW, MANY, count_batch, rate_in

_aten = torch.ops.aten
ATTENTION = _aten.scaled_dot_product_attention.default
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
    for name, module in model.named_modules() if not whole else ():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ModelError(
                f"the module '{name}' has a backward hook, and {type(model).__name__} can only be cut operator by "
                "operator, which loses it",
                "leave the hook out, or make the model one that torch.fx can trace (no branch on sizes or values)",
            )
    with torch.enable_grad(), inference_as_no_grad(), keeping(modules=whole) as kept:
        program = _export(model, sample)
    graph = _OperatorGraph(program, model, kept)
    _drop_causal_masks(graph.graph, graph.objects)
    _fuse_norms(graph.graph)
    return Traced(graph=graph.graph, objects=graph.objects, tensors=sample.tensors)


def _export(model: nn.Module, sample: Sample) -> torch.export.ExportedProgram:
    bound = inspect.signature(model.forward).bind(*sample.args, **sample.kwargs).arguments
    free_rows = {0: torch.export.Dim.AUTO}
    shapes = pytree.tree_map(lambda leaf: free_rows if isinstance(leaf, Tensor) else None, dict(bound))
    with undisturbed(model), warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        if not model.training:
            model.train()
        try:
            return torch.export.export(model, sample.args, dict(sample.kwargs), dynamic_shapes=shapes, strict=False)
        except Exception as error:
            place = _line_of(error)
            raise ModelError(
                f"{type(model).__name__} cannot be traced{f' at {place}' if place else ''}: {first_line(error)}",
                "a branch on values, or a size that depends on them, cannot be cut: choose by torch.where, or put that "
                "part into a module without children, which is kept whole",
            ) from error


def _line_of(error: BaseException | None) -> str | None:
    """The line of the model's own code that an error comes from, or that of what caused it."""
    while error is not None:
        if place := line_in("".join(traceback.format_tb(error.__traceback__))):
            return place
        error = error.__cause__ or error.__context__
    return None


class _OperatorGraph:
    """The graph of an exported program while it is being rewritten."""

    def __init__(self, program: torch.export.ExportedProgram, model: nn.Module, kept: Kept) -> None:
        self.program, self.model, self.kept = program, model, kept
        self.graph = fx.Graph()
        self.objects: dict[str, Any] = dict(kept.modules)
        nodes = list(program.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        pairs = list(zip(inputs, program.graph_signature.input_specs))
        pairs.sort(key=lambda pair: pair[1].kind != InputKind.USER_INPUT)  # a graph begins with its inputs
        copies = {node: self._given(spec) for node, spec in pairs}
        values = self._add_all(nodes[len(inputs) :], copies, program.graph_module, Mode())
        specs = program.graph_signature.output_specs
        for value, spec in zip(values, specs, strict=True):
            if spec.kind == OutputKind.BUFFER_MUTATION:  # forward assigned the buffer
                self.objects[str(spec.target)] = attribute(model, str(spec.target))
                self.graph.call_function(_aten.copy_.default, (self.graph.get_attr(str(spec.target)), value))
        made = [value for value, spec in zip(values, specs) if spec.kind == OutputKind.USER_OUTPUT]
        self.graph.output(tuple(value for value in made if isinstance(value, fx.Node)))

    def _given(self, spec: InputSpec) -> Any:
        """An input of the model, or the constant in its place; a parameter or buffer; a constant that tracing met."""
        if spec.kind == InputKind.USER_INPUT:
            is_tensor = isinstance(spec.arg, TensorArgument)
            return self.graph.placeholder(spec.arg.name) if is_tensor else getattr(spec.arg, "value", None)
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
                return tuple(args[0]) if isinstance(args[0], tuple | list) else (args[0],)
            if node.op == "get_attr":
                copies[node] = attribute(owner, str(node.target))
            elif not any(check in str(node.target) for check in _CHECKS):
                copies[node] = self._copy(node, args, kwargs, mode)
        return ()

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
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        copy.meta["path"] = tuple(path for path in stack if path and not path.startswith("_empty"))
        copy.meta["stack_trace"] = node.meta.get("stack_trace")
        if mode:
            copy.meta["mode"] = mode
        return copy

    def _block(self, node: fx.Node, args: Any, mode: Mode) -> tuple[Any, ...]:
        """A block of nodes that runs without gradient or without autocast."""
        name = str(node.target)
        if name == "wrap_with_set_grad_enabled":
            own, block, values = Mode(gradient=bool(args[0])), args[1], args[2:]
        elif name == "wrap_with_autocast":
            (kind, dtype, enabled, _, block), values = args[:5], args[5:]
            own = Mode(autocast=((kind, bool(enabled), dtype or torch.get_autocast_dtype(kind)),))
        else:
            told = f"the model uses '{name}', which cannot be cut"
            raise ModelError(told, "leave control flow to the caller of the model")
        nodes = list(block.graph.nodes)
        inputs = [each for each in nodes if each.op == "placeholder"]
        return self._add_all(nodes[len(inputs) :], dict(zip(inputs, values)), block, own.inside(mode))

    def _both_modes(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """An operator that follows the stage's mode where it was traced in training."""
        index = _WITH_FLAG.get(target)
        if index is not None and args[index] is True:
            return target, (*args[:index], self.graph.get_attr(TRAINING), *args[index + 1 :]), kwargs
        if target is ATTENTION and len(args) > 4 and args[4]:
            return target, (*args[:4], self._rate(args[4]), *args[5:]), kwargs
        if target is ATTENTION and kwargs.get("dropout_p"):
            return target, args, {**kwargs, "dropout_p": self._rate(kwargs["dropout_p"])}
        if target is _aten.add_.Tensor and str(getattr(args[0], "target", "")).endswith("num_batches_tracked"):
            return count_batch, (args[0], self.graph.get_attr(TRAINING)), {}
        return target, args, kwargs

    def _rate(self, in_training: float) -> fx.Node:
        return self.graph.call_function(rate_in, (in_training, self.graph.get_attr(TRAINING)))


def _dtype_of(node: Any) -> Any:
    """The number format of a node's value as it was traced; None where it is no tensor."""
    return getattr(node.meta.get("val"), "dtype", None) if isinstance(node, fx.Node) else None


# Kernels of torch in place of what a trace spells out


def _fuse_norms(graph: fx.Graph) -> None:
    """x · rsqrt(mean(x²) + eps), which is a norm by the root of the mean square, becomes one function."""
    for node in graph.nodes:
        if node.target is _aten.mul.Tensor:
            for x, root in (node.args, node.args[::-1]):
                chain = _norm_of(x, root)
                if chain:
                    node.target, node.args = normalized, (x, chain[1].args[1])
                    for unused in chain:
                        graph.erase_node(unused)
                    break


def _norm_of(x: Any, root: Any) -> list[fx.Node]:
    """The nodes of `root` where it is rsqrt(mean(x²) + eps) over the last dimension and nothing else needs it."""
    chain = (_aten.rsqrt.default, _aten.add.Tensor, _aten.mean.dim, _aten.pow.Tensor_Scalar)
    seen: list[fx.Node] = []
    at = root
    for target in chain:
        if not isinstance(at, fx.Node) or at.target is not target or len(at.users) > 1 or at.kwargs:
            return []
        seen.append(at)
        at = at.args[0]
    _, add, mean, power = seen
    fits = at is x and power.args[1] == 2 and mean.args[1:] == ([-1], True)
    return seen if fits and isinstance(add.args[1], float) else []


def normalized(rows: Tensor, eps: float) -> Tensor:
    """Rows by the root of their mean square: one kernel on cards, and elsewhere the operators, bit for bit."""
    if rows.is_cuda:
        return F.rms_norm(rows, rows.shape[-1:], None, eps)
    return rows * torch.rsqrt(rows.pow(2).mean(-1, True) + eps)


def _drop_causal_masks(graph: fx.Graph, objects: Mapping[str, Any]) -> None:
    """Lets attention be causal by itself wherever its mask follows from no input and says just that."""
    masks: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        mask = _argument(node, 3, "attn_mask") if node.target is ATTENTION else None
        if isinstance(mask, fx.Node):
            masks.setdefault(mask, []).append(node)
    for mask, users in masks.items():
        if all(_is_causal(_value(mask, objects, rows)) for rows in (FEW, MANY)):  # it may depend on their number
            for user in users:
                rate = _argument(user, 4, "dropout_p")
                user.args = (*user.args[:3], None, 0.0 if rate is None else rate, True)
                user.kwargs = {key: each for key, each in user.kwargs.items() if key in ("scale", "enable_gqa")}


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _value(wanted: fx.Node, objects: Mapping[str, Any], rows: int) -> Tensor | None:
    """What a node holds for a number of rows, whatever is in them; None where that cannot be said."""
    made: dict[fx.Node, Any] = {}

    def run(node: fx.Node) -> Any:
        if node.op == "get_attr" and isinstance(objects.get(str(node.target)), Tensor):
            return objects[str(node.target)]
        if node.op != "call_function":
            raise NotImplementedError  # it follows from what is in the rows
        if node.target is _aten.sym_size.int and node.args[1] == 0:
            return rows
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: made[each])
        here = {"device": torch.device("cpu")} if "device" in kwargs else {}  # models without weights are nowhere
        return node.target(*args, **{**kwargs, **here})  # type: ignore[operator]

    try:
        with torch.no_grad():
            for node in _behind(wanted):
                made[node] = run(node)
    except RuntimeError:
        return None
    found = made[wanted]
    return found if isinstance(found, Tensor) and not found.is_meta else None


def _behind(wanted: fx.Node) -> list[fx.Node]:
    """The nodes that a node follows from, in their order, and itself; sizes of rows are where this ends."""
    found, to_do = {wanted}, [wanted]
    while to_do:
        node = to_do.pop()
        if node.target is _aten.sym_size.int:
            continue
        new = set(node.all_input_nodes) - found
        found |= new
        to_do += new
    return [node for node in wanted.graph.nodes if node in found]


def _is_causal(mask: Tensor | None) -> bool:
    """Whether a mask lets every token see itself and those before it, and no other."""
    if mask is None or mask.dim() < 2 or mask.size(-1) != mask.size(-2):
        return False
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and bool((mask[~seen] > torch.finfo(mask.dtype).min / 2).any()):
        return False
    before = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return bool((seen == before).all())
