"""What is known of each value of a graph, from running it on shapes alone with 2 and with 3 rows.

    a tensor [rows, ...]           is carried across a cut
    a number, a size, a dtype      is a constant, or a multiple of the rows
    what follows from no input     is recomputed in the stage that needs it (positions, causal masks)
    any other tensor without rows  cannot cross: no cut is offered there

Only the first dimension, the rows, may change; all other sizes are those of the sample.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree

from stagewright.errors import ModelError
from stagewright.models.modes import entered
from stagewright.models.operations import count_batch, rate_in
from stagewright.models.tracing import TRAINING, Traced, line_in, undisturbed

FEW, _MANY = 2, 3
_RANDOM = ("rand", "bernoulli", "normal", "multinomial", "dropout")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor that crosses a cut, with `rows` entries of `shape_per_row`."""

    name: str
    shape_per_row: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    @property
    def bytes_per_row(self) -> int:
        return torch.Size(self.shape_per_row).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Constant:
    """A value that is the same whatever the rows."""

    value: Any


@dataclass(frozen=True)
class PerRow:
    """A number that is `times` the rows."""

    times: int


@dataclass(frozen=True)
class Here:
    """The device that the stage runs on."""


@dataclass(frozen=True)
class Stuck:
    """A value that cannot cross a cut, and why."""

    why: str
    is_tensor: bool = False


_Part = TensorSpec | _Constant | PerRow | Here | Stuck


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One node's value: its parts in order, how they nest, and whether it follows from no input."""

    parts: tuple[_Part, ...]
    nesting: pytree.TreeSpec
    free: bool

    @property
    def is_constant(self) -> bool:
        return all(isinstance(part, _Constant | PerRow | Here) for part in self.parts)

    @property
    def carried(self) -> tuple[TensorSpec, ...]:
        return tuple(part for part in self.parts if isinstance(part, TensorSpec))

    @property
    def tensors(self) -> tuple[TensorSpec | Stuck, ...]:
        """The parts that are tensors, whether they can be carried or not."""
        return tuple(p for p in self.parts if isinstance(p, TensorSpec) or (isinstance(p, Stuck) and p.is_tensor))


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps every node's value."""

    def __init__(self, module: fx.GraphModule, after: Callable[[fx.Node], None] | None = None) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.after = after
        self.extra_traceback = False
        self.at: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        with entered(n.meta.get("mode")):
            value = super().run_node(n)
        if self.after is not None:
            self.after(n)
        return value


@contextmanager
def shapes_only(device: torch.device) -> Iterator[None]:
    """A setting in which tensors have shapes and no contents, and modules keep theirs."""
    if device.type == "meta":
        yield
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def run_on_shapes(
    traced: Traced,
    rows: int,
    after: Callable[[fx.Node], None] | None = None,
    finally_: Callable[[Mapping[fx.Node, Any]], None] | None = None,
    training: bool = True,
) -> dict[fx.Node, Any]:
    """Every node's value on `rows` rows of the sample's shapes.

    `after` is called after each node, `finally_` with all values while they still have shapes only.
    """
    recorder = _Recorder(traced.module(), after)
    with undisturbed(recorder.module), shapes_only(traced.device):
        if not training:
            recorder.module.eval()
        inputs = [torch.empty((rows, *t.shape[1:]), dtype=t.dtype, device=t.device) for t in traced.tensors]
        try:
            recorder.run(*inputs)
        except Exception as error:
            raise _does_not_run(rows, recorder.at, error) from error
        if finally_ is not None:
            finally_(recorder.env)
    return dict(recorder.env)


def _does_not_run(rows: int, node: fx.Node | None, error: Exception) -> ModelError:
    """What a model that does not run on shapes alone is refused with: the line of its code, and why."""
    place = line_in(node.meta.get("stack_trace")) if node is not None else None
    at = f" at {place}" if place else f" at '{node.name}'" if node is not None else ""
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        return ModelError(
            f"the number of entries that come out{at} depends on values",
            "keep one entry a row: weigh rows with a mask instead of picking some",
        )
    return ModelError(
        f"the model does not run on {rows} rows of the sample's shapes{at}: {str(error).strip().splitlines()[0]}",
        "is a number of rows written into the model? take it from the input's shape",
    )


def find_facts(traced: Traced) -> dict[fx.Node, Fact]:
    """What is known of each node's value."""
    few, many = run_on_shapes(traced, FEW), run_on_shapes(traced, _MANY)
    mutated = {node for user in traced.graph.nodes for node in mutated_by(user, traced.objects)}
    facts: dict[fx.Node, Fact] = {}
    for node in traced.graph.nodes:
        if node.op != "output":
            free = _is_free(node, traced, facts, few[node]) and node not in mutated
            facts[node] = _fact(node, few[node], many[node], free)
    return facts


def _fact(node: fx.Node, few: Any, many: Any, free: bool) -> Fact:
    leaves, nesting = pytree.tree_flatten(few)
    others = pytree.tree_leaves(many)
    if node.target in (TRAINING, rate_in):
        parts: tuple[_Part, ...] = (Stuck("depends on whether the stage trains or evaluates"),)
    elif len(leaves) != len(others):
        parts = (Stuck("changes its structure with the rows"),)
    else:
        names = _names(node, len(leaves))
        parts = tuple(map(_part, names, leaves, others))
    return Fact(parts=parts, nesting=nesting, free=free)


def _names(node: fx.Node, count: int) -> list[str]:
    return [node.name] if count == 1 else [f"{node.name}.{index}" for index in range(count)]


def _part(name: str, few: Any, many: Any) -> _Part:
    if isinstance(few, Tensor):
        return _tensor_part(name, few, many)
    if isinstance(few, torch.device):
        return Here()
    if type(few) is int and few != many:
        if many * FEW == few * _MANY:
            return PerRow(few // FEW)
        return Stuck(f"is the number {few} with {FEW} rows and {many} with {_MANY}")
    if few is None or isinstance(few, int | float | str | torch.dtype | torch.layout | slice):
        return _Constant(few)
    return Stuck(f"is a {type(few).__name__}")


def _tensor_part(name: str, few: Tensor, many: Tensor) -> _Part:
    sized = tuple(few.shape[:1]) == (FEW,) and tuple(many.shape[:1]) == (_MANY,)
    if not sized or few.shape[1:] != many.shape[1:]:
        return Stuck(f"has the shape {tuple(few.shape)} with {FEW} rows and {tuple(many.shape)} with {_MANY}", True)
    shape = tuple(int(size) for size in few.shape[1:])
    return TensorSpec(name=name, shape_per_row=shape, dtype=few.dtype, needs_grad=few.requires_grad)


def _is_free(node: fx.Node, traced: Traced, facts: dict[fx.Node, Fact], value: Any) -> bool:
    """Whether a node depends on no input, parameter or random number: only on sizes and constants."""
    if node.op == "placeholder" or any(leaf.requires_grad for leaf in _tensors(value)):
        return False
    if node.op == "get_attr":
        return not isinstance(traced.objects.get(str(node.target)), nn.Parameter)
    if _is_random(node, traced.objects) or mutated_by(node, traced.objects) or _has_parameters(node, traced):
        return False
    return all(facts[arg].free or facts[arg].is_constant for arg in node.all_input_nodes)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _has_parameters(node: fx.Node, traced: Traced) -> bool:
    if node.op != "call_module":
        return False
    return next(traced.objects[str(node.target)].parameters(), None) is not None


def _is_random(node: fx.Node, objects: Any) -> bool:
    """Whether a node draws random numbers."""
    if node.op == "call_module":
        return isinstance(objects[str(node.target)], nn.modules.dropout._DropoutNd)
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return node.op.startswith("call") and any(word in name for word in _RANDOM)


def mutated_by(node: fx.Node, objects: Any) -> list[fx.Node]:
    """The nodes whose values a node changes in place."""
    target, args = node.target, node.args
    first = [arg for arg in args[:1] if isinstance(arg, fx.Node)]
    if isinstance(target, torch._ops.OpOverload):
        return _written(target, args, node.kwargs)
    if node.op == "call_module":
        return first if getattr(objects[str(node.target)], "inplace", False) else []
    if node.op == "call_method":
        name = str(node.target)
        return first if name.endswith("_") and not name.endswith("__") else []
    if node.op == "call_function":
        return first if node.kwargs.get("inplace") is True or target in _IN_PLACE else []
    return []


_IN_PLACE = (count_batch, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)


def _written(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Any) -> list[fx.Node]:
    named = target._schema.arguments
    values = [*args, *(kwargs.get(argument.name) for argument in named[len(args) :])]
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in named]
    return [value for value, write in zip(values, writes) if write and isinstance(value, fx.Node)]
