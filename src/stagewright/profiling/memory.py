"""What a model's layers hold, found on shapes alone: what forward leaves for backward, and what comes and goes.

Every storage is noted when an operator makes it and when it is freed, as on a card: with autocast's casts, a fused
attention, dropout by sample, and backward's gradients in between.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.models.running import row_keys, rows_drawn
from stagewright.profiling.layers import DTYPES, Pieces, Unit, run_backward, shortened

_NARROW = frozenset({
    "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu", "scaled_dot_product_attention",
})  # fmt: skip
"""What autocast runs in the narrow format, by name: products. The lists are those of torch.amp's documentation."""
_WIDE = frozenset({
    "layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "rsqrt",
    "pow", "__pow__", "exp", "log", "sum", "cumsum", "prod", "norm", "binary_cross_entropy_with_logits", "softplus",
})  # fmt: skip
"""What it runs in single precision."""


class LayerMemory(NamedTuple):
    """What one unit holds on so many rows."""

    saved: float
    """What its forward leaves behind for backward, of storages that no unit before it has left."""
    before: float
    """What of the tensors that enter it units before it have left behind already."""
    workspace: float
    """The most that comes and goes while it runs, beside what is saved and the gradients of its weights."""
    widths: Mapping[str, int]
    """By name the bytes of a number of each tensor that enters it."""


class _Casts(TorchFunctionMode):
    """What autocast does on a card, for tensors of any device; and attention by a fused kernel."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype, self.known = dtype, dict[int, Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        wanted = None if self.dtype is None else self.dtype if name in _NARROW else None
        if self.dtype is not None and name in _WIDE:
            wanted = torch.float32
        if wanted is not None:
            args, kwargs = pytree.tree_map_only(Tensor, lambda each: self.cast(each, wanted), (args, kwargs))
        if name == "scaled_dot_product_attention":
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor in a format; a weight's copy serves all who ask."""
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad and dtype == self.dtype):
            return tensor.to(dtype)
        if id(tensor) not in self.known:
            self.known[id(tensor)] = tensor.to(dtype)
        return self.known[id(tensor)]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention that saves its inputs, its output and a number a query."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mask = None if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(query.dtype)
    made: Tensor = fused(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
    return made


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that are alive, parameters left out."""

    def __init__(self, skipped: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.skipped = {_storage_of(tensor) for tensor in skipped}
        self.alive: dict[int, Any] = {}
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self.note(tensor)
        if "convolution" in func._overloadpacket.__name__:
            # cuDNN and oneDNN turn the layout of what goes in and comes out, in memory of their own.
            turned = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)][:2]
            self.most = max(self.most, self.now + sum(map(_size, turned[:1])) + sum(map(_size, tensors[:1])))
        return made

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = _storage_of(tensor), storage.nbytes()
        if key in self.alive or key in self.skipped:
            return

        def free(_: object) -> None:
            del self.alive[key]
            self.now -= size

        self.alive[key] = weakref.ref(storage, free)
        self.now += size
        self.most = max(self.most, self.now)

    def take(self) -> int:
        """The most that was alive since the last time."""
        most, self.most = self.most, self.now
        return most


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage_of(tensor: Tensor) -> int:
    """What tells a tensor's storage from others that are alive."""
    return int(tensor.untyped_storage()._cdata)


class _Saved:
    """Counts the storages that autograd keeps, each once, parameters left out."""

    def __init__(self, skipped: Sequence[Tensor]) -> None:
        self.seen = {_storage_of(tensor) for tensor in skipped}
        self.alive: list[Tensor] = []  # a freed storage's address may come again
        self.num_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        key = _storage_of(tensor)
        if key not in self.seen:
            self.seen.add(key)
            self.alive.append(tensor.detach())
            self.num_bytes += tensor.untyped_storage().nbytes()
        return tensor


def record_memory(pieces: Pieces, rows: int) -> tuple[LayerMemory, ...]:
    """What every unit holds on so many rows, forward and then backward."""
    short, places = shortened(pieces)
    units, known = _shapes_of(short)
    inputs, targets = ([each.to("meta") for each in some] for some in pieces.rows(rows))
    live, saved = _Live(known), _Saved(known)
    for tensor in (*inputs, *targets):
        live.note(tensor)
    with (
        rows_drawn(row_keys(0, 0, 0, rows, torch.device("meta"))), live, _Casts(DTYPES.get(pieces.precision)),
        torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor),
    ):  # fmt: skip
        found = _forward(units, inputs, targets, live, saved)
        del saved.alive[:]
        made = _backward(units, found, live)
    names = [[spec.name for spec in unit.module.inputs] for unit in pieces.units]
    pairs = zip(places, names)
    return tuple(made[at]._replace(widths=dict(zip(own, made[at].widths.values()))) for at, own in pairs)


def _shapes_of(pieces: Pieces) -> tuple[list[Unit], list[Tensor]]:
    """The units with shapes and no contents, in training; and their parameters and buffers."""
    known: dict[int, Tensor] = {}
    for each in (*pieces.model.model.parameters(), *pieces.model.model.buffers()):
        shape = each.detach().to("meta")
        is_parameter = isinstance(each, nn.Parameter)
        known[id(each)] = nn.Parameter(shape, requires_grad=each.requires_grad) if is_parameter else shape
    modules = [copy.deepcopy(unit.module, memo=dict(known)).train() for unit in pieces.units]
    return [replace(unit, module=made) for unit, made in zip(pieces.units, modules)], list(known.values())


class _Passed(NamedTuple):
    """What a unit's forward has shown, and what backward needs of it."""

    entering: list[Tensor]
    outputs: list[Any]
    memory: LayerMemory


def _forward(
    units: Sequence[Unit], inputs: Sequence[Tensor], targets: Sequence[Tensor], live: _Live, saved: _Saved
) -> list[_Passed]:
    tensors, found = list(inputs), list[_Passed]()
    for unit in units:
        entering = [t.detach().requires_grad_(spec.needs_grad) for t, spec in zip(tensors, unit.module.inputs)]
        before = sum(each.untyped_storage().nbytes() for each in entering if _storage_of(each) in saved.seen)
        live.take()
        first, kept = live.now, saved.num_bytes
        tensors = list(unit.module(*entering, *(targets if unit.module.has_loss else ())))
        edges = [get_gradient_edge(each) if each.requires_grad else None for each in tensors]
        own = saved.num_bytes - kept
        widths = {spec.name: each.element_size() for spec, each in zip(unit.module.inputs, entering)}
        memory = LayerMemory(own, before, max(live.take() - first - own, 0), widths)
        found.append(_Passed(entering, edges, memory))
    return found


def _backward(units: Sequence[Unit], found: list[_Passed], live: _Live) -> tuple[LayerMemory, ...]:
    made, gradients = list[LayerMemory](), list[Tensor | None]([None] * len(found[-1].outputs))
    for unit in reversed(units):
        passed = found.pop()
        live.take()
        given = sum(_size(each) for each in gradients if each is not None)
        first, weights = live.now, sum(_size(each) for each in unit.module.parameters() if each.requires_grad)
        gradients = run_backward(unit, passed.entering, passed.outputs, gradients, accumulate=False, weights=True)
        workspace = live.take() - first + given - weights
        made.append(passed.memory._replace(workspace=max(workspace, passed.memory.workspace)))
        del passed
    return tuple(reversed(made))
