"""How the nodes of a graph run: in the mode that the model's code set around them, and drawing by sample.

A trace sees operations, not the `with` around them. So each node remembers the mode it was met in, and runs in it.

    with torch.no_grad():         node.meta["mode"] = Mode(gradient=False)
        h = self.backbone(x)  ─▶  backbone(x) ─▶ Within(mode, …)(backbone, x)

Which numbers a dropout drops follows from the seed, the batch, the row and the place in the model. So it is the same
under every plan, whatever microbatch, replica or stage a row is in, and when a forward runs again:

    keep[row, i] = mix(mix(mix(row ^ key(seed)) ^ key(batch)) ^ mix(i ^ key(place))) ≥ rate         key(n) = mix(n)

The place is the module that draws, by its path, and how many draws of that module came before. It holds for torch's
dropouts, `rand` and `rand_like` with one entry a row first. Attention's fused dropout and other random numbers come
from a generator that each microbatch seeds, and so do all inside compiled code.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_KINDS = ("cpu", "cuda")
"""Kinds of devices that have an autocast of their own."""

_Autocast = tuple[str, bool, torch.dtype]
"""The kind of device, whether it is on, and the format it casts to."""

_ALPHA = -1.7580993408473766
"""What alpha dropout puts in the place of a dropped number (Klambauer et al. 2017, section 1.2)."""

KEPT = ("mode", "place")
"""What a node remembers of how it runs: the mode, and where in the model it may draw at random."""


# Modes


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How an operation runs, where that is not how its surroundings run."""

    gradient: bool = True
    autocast: tuple[_Autocast, ...] = ()

    def __bool__(self) -> bool:
        return not self.gradient or bool(self.autocast)

    def inside(self, outer: Mode) -> Mode:
        """This mode inside another one."""
        kinds = {kind for kind, _, _ in self.autocast}
        kept = tuple(each for each in outer.autocast if each[0] not in kinds)
        return Mode(gradient=self.gradient and outer.gradient, autocast=kept + self.autocast)


def casts() -> dict[str, _Autocast]:
    """How autocast is set at the moment."""
    return {kind: (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS}


def mode_now(before: dict[str, _Autocast]) -> Mode:
    """The mode at the moment, against autocast as it was before with gradients on."""
    changed = tuple(now for kind, now in casts().items() if now != before[kind])
    return Mode(gradient=torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), autocast=changed)


@contextmanager
def autocast_on() -> Iterator[None]:
    """Autocast seems to be on inside, so that a model which switches it off shows that it does."""
    before = casts()
    for kind in _KINDS:
        torch.set_autocast_enabled(kind, True)
    try:
        yield
    finally:
        for kind, enabled, dtype in before.values():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """`torch.inference_mode` is `torch.no_grad` inside: the same numbers, and torch.export sees it."""

    def enter(self: Any) -> None:
        self.stagewright_mode = torch.set_grad_enabled(not self.mode and torch.is_grad_enabled())
        self.stagewright_mode.__enter__()

    def leave(self: Any, *fault: Any) -> None:
        self.stagewright_mode.__exit__(*fault)

    with patch.multiple(torch.inference_mode, __enter__=enter, __exit__=leave):
        yield


@contextmanager
def entered(mode: Mode | None) -> Iterator[None]:
    """Runs what is inside in a mode."""
    with ExitStack() as stack:
        if mode is not None and not mode.gradient:
            stack.enter_context(torch.no_grad())
        for kind, enabled, dtype in mode.autocast if mode is not None else ():
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield


class _Within:
    """A function that runs in a mode, in a place: another function, a method by its name, or its first argument."""

    __name__ = "within"

    def __init__(self, mode: Mode | None, place: int | None, operation: Callable[..., Any] | str | None) -> None:
        self.mode, self.place, self.operation = mode, place, operation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with entered(self.mode), _drawing(self.place):
            if isinstance(self.operation, str):
                return getattr(args[0], self.operation)(*args[1:], **kwargs)
            return args[0](*args[1:], **kwargs) if self.operation is None else self.operation(*args, **kwargs)


def runnable(graph: fx.Graph) -> fx.Graph:
    """The graph with every node in its mode and place, for running; the graph itself where no node has one."""
    if not any(key in node.meta for node in graph.nodes for key in KEPT):
        return graph
    made, copies = fx.Graph(), dict[fx.Node, Any]()
    for node in graph.nodes:
        if not any(key in node.meta for key in KEPT) or not node.op.startswith("call"):
            copies[node] = made.node_copy(node, copies.__getitem__)
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
        operation = node.target
        if node.op == "call_module":
            operation, args = None, (made.get_attr(str(node.target)), *args)
        mode, place = (node.meta.get(key) for key in KEPT)
        copies[node] = made.call_function(_Within(mode, place, operation), tuple(args), kwargs)
    return made


# Draws


class _Rows(threading.local):
    """The rows that this thread computes at the moment, each by a key of its own."""

    keys: Tensor | None = None


_rows = _Rows()


@contextmanager
def rows_drawn(keys: Tensor | None) -> Iterator[None]:
    """Inside, dropout is by sample: `keys` has one number a row."""
    before, _rows.keys = _rows.keys, keys
    try:
        yield
    finally:
        _rows.keys = before


def row_keys(seed: int, batch: int, start: int, stop: int, device: torch.device) -> Tensor:
    """One number for each of some rows of a batch, the same wherever they are computed."""
    rows = torch.arange(start, stop, dtype=torch.int32, device=device)
    made: Tensor = _mixed(_mixed(rows ^ _key(seed)) ^ _key(batch))
    return made


@cache
def _key(number: int) -> int:
    return int(_mixed(np.array([number & 0x7FFFFFFF], np.int32))[0])  # numpy, which runs among shapes alone too


def _mixed(numbers: Any) -> Any:
    """Numbers that look random, from 32-bit ones that do not (murmur3's finalizer, its factors as signed numbers)."""
    numbers = (numbers * -1640531527) ^ ((numbers >> 16) & 0xFFFF)
    numbers = numbers * -2048144789
    numbers = (numbers ^ ((numbers >> 13) & 0x7FFFF)) * -1028477387
    return numbers ^ ((numbers >> 16) & 0xFFFF)


def name_places(graph: fx.Graph, objects: Mapping[str, Any]) -> None:
    """Names the nodes that may draw at random: by the module they are in, and how many of its nodes came before."""
    seen: Counter[str] = Counter()
    for node in graph.nodes:
        is_module = node.op == "call_module"
        if node.op.startswith("call") and _draws(objects[str(node.target)] if is_module else node.target):
            inside = node.meta.get("path") or ("",)
            path = (str(node.target) if is_module else inside[-1]).partition("@")[0]
            node.meta["place"] = zlib.crc32(path.encode()) + seen[path] * 64  # there is room for 64 draws a node
            seen[path] += 1


def _draws(operation: Any) -> bool:
    """Whether something may draw numbers at random: a function, a method by its name, or a module."""
    if isinstance(operation, nn.Module):
        parts = list(operation.modules())
        own = any(not type(part).__module__.startswith("torch.") for part in parts)
        return own or any(isinstance(part, nn.modules.dropout._DropoutNd | nn.MultiheadAttention) for part in parts)
    return operation in _DRAWN


def _drawing(place: int | None) -> AbstractContextManager[Any]:
    """Inside, what is drawn in one place of a model is by sample, where rows have keys."""
    keys = _rows.keys
    if place is None or keys is None or torch.compiler.is_compiling():
        return nullcontext()
    return _ByRow(place, keys)


class _ByRow(TorchFunctionMode):
    """Draws dropouts by sample, in one place of a model; several in one place are counted."""

    def __init__(self, place: int, keys: Tensor) -> None:
        super().__init__()
        self.place, self.keys, self.count = place, keys, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = _DRAWN.get(func)
        made = None if drawn is None else drawn(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is None else made

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """Numbers from 0 to 1 for as many rows as there are keys; None where the shape has other rows."""
        signed = self._signed(shape)
        return None if signed is None else (signed.to(like.dtype) * 2.0**-32 + 0.5).to(like.device)

    def keep(self, shape: Sequence[int], rate: float, training: bool) -> Tensor | None:
        """Which numbers are kept; None where all are, or the shape has other rows."""
        signed = self._signed(shape) if training and 0.0 < rate < 1.0 else None
        return None if signed is None else signed >= int((rate - 0.5) * 2**32)

    def _signed(self, shape: Sequence[int]) -> Tensor | None:
        """32-bit numbers of a shape that begins with the rows, or is flat over them."""
        rows, size = len(self.keys), torch.Size(shape)
        if not size or size[0] % rows:
            return None
        place = _key(self.place + self.count)
        self.count += 1
        each = _mixed(torch.arange(size.numel() // rows, dtype=torch.int32, device=self.keys.device) ^ place)
        made: Tensor = _mixed(self.keys[:, None] ^ each)
        return made.view(size)


def _dropout(
    by: _ByRow, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True,
    shape: Sequence[int] | None = None,
) -> Tensor | None:  # fmt: skip
    keep = by.keep(input.shape if shape is None else shape, p, training and train)
    if keep is None:
        return None
    factor = keep.to(input.dtype) / (1.0 - p)
    return input.mul_(factor) if inplace else input * factor


def _channel_dropout(by: _ByRow, input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    return _dropout(by, input, *args, **kwargs, shape=(*input.shape[:2], *([1] * (input.dim() - 2))))


def _alpha_dropout(
    by: _ByRow, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False, *, train: bool = True
) -> Tensor | None:
    keep = by.keep(input.shape, p, training and train)
    if keep is None:
        return None
    scale = ((1.0 - p) * (1.0 + p * _ALPHA**2)) ** -0.5
    made = torch.where(keep, input, _ALPHA) * scale - scale * _ALPHA * p
    return input.copy_(made) if inplace else made


def _rand(by: _ByRow, *size: Any, dtype: torch.dtype | None = None, **given: Any) -> Tensor | None:
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    if not shape or set(given) - {"device"}:
        return None
    return by.uniform(shape, torch.empty(0, dtype=dtype or torch.get_default_dtype(), device=given.get("device")))


def _rand_like(by: _ByRow, input: Tensor, **given: Any) -> Tensor | None:
    return None if given else by.uniform(input.shape, input)


_DRAWN: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((F.dropout, torch.dropout, torch.ops.aten.dropout.default), _dropout),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), _channel_dropout),
    **dict.fromkeys((torch.feature_dropout, torch.ops.aten.feature_dropout.default), _channel_dropout),
    **dict.fromkeys((F.alpha_dropout, torch.alpha_dropout, torch.ops.aten.alpha_dropout.default), _alpha_dropout),
    torch.rand: _rand, torch.rand_like: _rand_like,
}  # fmt: skip
