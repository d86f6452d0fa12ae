"""What is known of each value of a graph, from running it on shapes alone with 2 and with 3 rows, and back once.

    a tensor [rows, ...]           is carried across a cut
    a number, a size, a dtype      is a constant, or a multiple of the rows
    what follows from no input     is recomputed in the stage that needs it (positions, causal masks)
    any other tensor without rows  cannot cross: no cut is offered there

Only the first dimension, the rows, may change; all other sizes are those of the sample.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree

from stagewright.errors import ModelError
from stagewright.models.running import entered
from stagewright.models.tracing import TRAINING, Traced, first_line, line_in, tensors_in, undisturbed

FEW, MANY = 2, 3
"""The rows that models are looked at with; one row would be taken for a dimension to broadcast."""
_RANDOM = ("rand", "bernoulli", "normal", "multinomial", "dropout")


def rate_in(rate: float, training: bool) -> float:
    """The rate of a dropout, which is none while evaluating."""
    return rate if training else 0.0


def count_batch(num_batches_tracked: Tensor, training: bool) -> Tensor:
    """Counts one more batch seen by a batch norm in training."""
    return num_batches_tracked.add_(1) if training else num_batches_tracked


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
    """A value that is the same whatever the rows; a device is the one that the stage runs on."""

    value: Any


@dataclass(frozen=True)
class PerRow:
    """A number that is `times` the rows."""

    times: int


@dataclass(frozen=True)
class _Stuck:
    """A value that cannot cross a cut, and why."""

    why: str
    is_tensor: bool = False


_Part = TensorSpec | _Constant | PerRow | _Stuck


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One node's value: its parts in order, how they nest, and whether it follows from no input."""

    parts: tuple[_Part, ...]
    nesting: pytree.TreeSpec
    free: bool

    @property
    def is_constant(self) -> bool:
        return all(isinstance(part, _Constant | PerRow) for part in self.parts)

    @property
    def carried(self) -> tuple[TensorSpec, ...]:
        return tuple(part for part in self.parts if isinstance(part, TensorSpec))

    @property
    def tensors(self) -> tuple[TensorSpec | _Stuck, ...]:
        """The parts that are tensors, whether they can be carried or not."""
        return tuple(p for p in self.parts if isinstance(p, TensorSpec) or (isinstance(p, _Stuck) and p.is_tensor))


# Running on shapes


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


def shapes_only(device: torch.device) -> AbstractContextManager[Any]:
    """A setting in which tensors have shapes and no contents, and modules keep theirs."""
    return nullcontext() if device.type == "meta" else FakeTensorMode(allow_non_fake_inputs=True)


def run_on_shapes(
    traced: Traced, rows: int, after: Callable[[fx.Node], None] | None = None,
    finally_: Callable[[Mapping[fx.Node, Any]], None] | None = None, training: bool = True,
) -> dict[fx.Node, Any]:  # fmt: skip
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
        f"the model does not run on {rows} rows of the sample's shapes{at}: {first_line(error)}",
        "is a number of rows written into the model? take it from the input's shape",
    )


# Facts


def find_facts(traced: Traced) -> dict[fx.Node, Fact]:
    """What is known of each node's value."""
    few, many = run_on_shapes(traced, FEW), run_on_shapes(traced, MANY)
    mutated = {node for user in traced.graph.nodes for node in mutated_by(user, traced.objects)}
    facts: dict[fx.Node, Fact] = {}
    for node in traced.graph.nodes:
        if node.op != "output":
            leaves, nesting = pytree.tree_flatten(few[node])
            parts = _parts(node, leaves, pytree.tree_leaves(many[node]))
            free = _is_free(node, traced, facts, few[node]) and node not in mutated
            facts[node] = Fact(parts=parts, nesting=nesting, free=free)
    return facts


def _parts(node: fx.Node, few: Sequence[Any], many: Sequence[Any]) -> tuple[_Part, ...]:
    if node.target in (TRAINING, rate_in):
        return (_Stuck("depends on whether the stage trains or evaluates"),)
    if len(few) != len(many):
        return (_Stuck("changes its structure with the rows"),)
    names = [node.name] if len(few) == 1 else [f"{node.name}.{index}" for index in range(len(few))]
    return tuple(map(_part, names, few, many))


def _part(name: str, few: Any, many: Any) -> _Part:
    if isinstance(few, Tensor):
        if few.shape[:1] != (FEW,) or many.shape[:1] != (MANY,) or few.shape[1:] != many.shape[1:]:
            return _Stuck(f"has the shape {tuple(few.shape)} with {FEW} rows and {tuple(many.shape)} with {MANY}", True)
        shape = tuple(int(size) for size in few.shape[1:])
        return TensorSpec(name=name, shape_per_row=shape, dtype=few.dtype, needs_grad=few.requires_grad)
    if type(few) is int and few != many:
        if many * FEW == few * MANY:
            return PerRow(few // FEW)
        return _Stuck(f"is the number {few} with {FEW} rows and {many} with {MANY}")
    if few is None or isinstance(few, int | float | str | torch.device | torch.dtype | torch.layout | slice):
        return _Constant(few)
    return _Stuck(f"is a {type(few).__name__}")


def _is_free(node: fx.Node, traced: Traced, facts: dict[fx.Node, Fact], value: Any) -> bool:
    """Whether a node depends on no input, parameter or random number: only on sizes and constants."""
    if node.op == "placeholder" or any(each.requires_grad for each in tensors_in(value)):
        return False
    thing = traced.objects.get(str(node.target))
    if node.op == "get_attr":
        return not isinstance(thing, nn.Parameter)
    if node.op == "call_module" and next(thing.parameters(), None) is not None:  # type: ignore[union-attr]
        return False
    if _is_random(node, thing) or mutated_by(node, traced.objects):
        return False
    return all(facts[arg].free or facts[arg].is_constant for arg in node.all_input_nodes)


def _is_random(node: fx.Node, module: Any) -> bool:
    """Whether a node draws random numbers."""
    if node.op == "call_module":
        return isinstance(module, nn.modules.dropout._DropoutNd)
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op.startswith("call") and any(word in name for word in _RANDOM)


def mutated_by(node: fx.Node, objects: Any) -> list[fx.Node]:
    """The nodes whose values a node changes in place."""
    target, args = node.target, node.args
    if isinstance(target, torch._ops.OpOverload):
        named = target._schema.arguments
        values = [*args, *(node.kwargs.get(argument.name) for argument in named[len(args) :])]
        writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in named]
        return [value for value, write in zip(values, writes) if write and isinstance(value, fx.Node)]
    is_written = False
    if node.op == "call_module":
        is_written = getattr(objects[str(target)], "inplace", False)
    elif node.op == "call_method":
        is_written = str(target).endswith("_") and not str(target).endswith("__")
    elif node.op == "call_function":
        is_written = node.kwargs.get("inplace") is True or target in _IN_PLACE
    return [arg for arg in args[:1] if is_written and isinstance(arg, fx.Node)]


_IN_PLACE = (count_batch, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)


# What flows, and back


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The nodes that compute something, in order, and how long each value is needed."""

    order: tuple[fx.Node, ...]
    facts: Mapping[fx.Node, Fact]
    last_use: Mapping[fx.Node, int]
    made_at: Mapping[fx.Node, int]

    def crossing(self, position: int) -> list[fx.Node]:
        """The values that are made before a position and needed at or after it."""
        return [n for n, made in self.made_at.items() if made < position <= self.last_use.get(n, -1)]

    def stuck(self, position: int) -> list[tuple[fx.Node, _Stuck]]:
        """The values that cannot be carried across a position."""
        crossing = self.crossing(position)
        return [(n, part) for n in crossing for part in self.facts[n].parts if isinstance(part, _Stuck)]

    def stuck_at(self, name: str, position: int) -> ModelError:
        """What a cut before the layer of this name is refused with, where a value cannot be carried across."""
        node, stuck = self.stuck(position)[0]
        return ModelError(
            f"no cut before '{name}': the value '{node.name}' would cross it, and it {stuck.why}",
            "what crosses a cut has one entry a row in its first dimension; cut before or after",
        )

    def widths(self) -> list[int]:
        """The number of tensors that cross each position."""
        change = [0] * (len(self.order) + 2)
        for node, made in self.made_at.items():
            if self.last_use.get(node, -1) > made:
                change[made + 1] += len(self.facts[node].parts)
                change[self.last_use[node] + 1] -= len(self.facts[node].parts)
        return list(accumulate(change))


def find_flow(traced: Traced, facts: Mapping[fx.Node, Fact]) -> Flow:
    """The order of a graph's nodes, with the values that need carrying; inputs are made at -1."""
    order, output = traced.computing, traced.graph.output_node()
    position = {node: index for index, node in enumerate(order)}
    last_use: dict[fx.Node, int] = {}
    for index, user in enumerate((*order, output)):
        if user is output or not (facts[user].free or facts[user].is_constant):
            last_use.update(dict.fromkeys(user.all_input_nodes, index))
    carried = [n for n in facts if n.op != "get_attr" and not (facts[n].free or facts[n].is_constant)]
    made_at = {node: position.get(node, -1) for node in carried}
    return Flow(order=order, facts=facts, last_use=last_use, made_at=made_at)


@dataclass(frozen=True)
class Layout:
    """The dimensions of a tensor and of its gradient from the slowest to the fastest in memory; empty: as they come."""

    value: tuple[int, ...] = ()
    gradient: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What one backward pass tells: which tensors and parameters it reaches, and how tensors lie in memory."""

    layouts: Mapping[fx.Node, tuple[Layout, ...]]
    reaches: Mapping[fx.Node, tuple[bool, ...]]
    """For each tensor of a node whether a gradient comes back to it."""
    unreached: frozenset[str]
    """The parameters whose gradient stays None."""


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
        layouts={
            node: tuple(Layout(_order(t), _order(found.get(id(t)))) for t in some) for node, some in of_node.items()
        },
        reaches={node: tuple(found.get(id(t), t) is not None for t in some) for node, some in of_node.items()},
        unreached=frozenset(name for name, each in parameters.items() if found.get(id(each), each) is None),
    )


def _order(tensor: Tensor | None) -> tuple[int, ...]:
    """The order of a tensor's dimensions in memory, empty where it is the usual one."""
    if tensor is None:
        return ()
    strides, sizes = tensor.stride(), tensor.shape
    large = [d for d in range(tensor.dim()) if sizes[d] > 1 and strides[d] > 0]
    by_stride = sorted(large, key=lambda d: (-strides[d], d))
    if by_stride == large:
        return ()
    ranks = iter(by_stride)
    return tuple(next(ranks) if d in large else d for d in range(tensor.dim()))
