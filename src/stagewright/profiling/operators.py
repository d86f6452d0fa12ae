"""What each layer's operators do, found on shapes alone: operations, bytes moved, bytes kept for backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stagewright.profile import ROW_BYTES, Precision
from stagewright.profiling.kinds import WorkKind
from stagewright.profiling.layers import Pieces, run_forward, run_units


@dataclass(frozen=True)
class Work:
    """One operator's call."""

    kind: WorkKind
    flops: float
    num_bytes: float
    spared_bytes: float = 0.0
    """What of the bytes need not be moved if the operator is fused with the one beside it."""


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """The operators of one unit's forward and backward, and the bytes that forward leaves for backward."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    saved_bytes: float


class WorkRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator that moves or computes something; views are free."""

    def __init__(self, float_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.float_bytes = float_bytes
        self.works: list[Work] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not _is_view(func):
            self.works.append(self.work_of(func, args, kwargs or {}, made))
        return made

    def work_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> Work:
        packet = func._overloadpacket
        count = flop_registry.get(packet)
        flops = float(count(*args, **kwargs, out_val=made)) if count is not None else 0.0
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)]
        moved = sum(tensor.numel() * self.size_of(tensor) for tensor in tensors)
        kind: WorkKind = "memory" if not flops else "conv" if _is_wide(packet.__name__, args) else "matmul"
        spared = self.spared(made, moved) if torch.Tag.pointwise in func.tags else 0.0
        return Work(kind, flops, float(moved), spared)

    def spared(self, made: Any, moved: float) -> float:
        """Bytes of an operator on single elements that fusing saves: one operand's reading, and the writing."""
        written = sum(
            leaf.numel() * self.size_of(leaf) for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)
        )
        return float(min(2 * written, moved))

    def size_of(self, tensor: Tensor) -> int:
        return self.float_bytes if tensor.dtype == torch.float32 else tensor.element_size()

    def take(self) -> tuple[Work, ...]:
        """What was noted since the last time."""
        works, self.works = tuple(self.works), []
        return works


def _is_wide(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operator is a convolution over more than one point: with 1 × 1 kernels it is a matrix product."""
    if "conv" not in name:
        return False
    weight = args[2 if "backward" in name else 1]
    return any(size > 1 for size in weight.shape[2:])


def _is_view(func: Any) -> bool:
    """Whether an operator returns its input in another shape, or moves nothing at all."""
    returns = func._schema.returns
    alias = [value.alias_info is not None and not value.alias_info.is_write for value in returns]
    return (bool(alias) and all(alias)) or func._overloadpacket.__name__ in ("detach", "empty", "empty_like")


class _Keeper:
    """Counts the storages that autograd keeps, each once, parameters left out."""

    def __init__(self, skipped: Sequence[Tensor], float_bytes: int) -> None:
        self.seen = {_storage_of(tensor) for tensor in skipped}
        self.alive: list[Tensor] = []  # a freed storage's address may come again
        self.float_bytes = float_bytes
        self.num_bytes = 0.0

    def pack(self, tensor: Tensor) -> Tensor:
        key = _storage_of(tensor)
        if key not in self.seen:
            self.seen.add(key)
            self.alive.append(tensor)
            share = self.float_bytes / 4 if tensor.dtype == torch.float32 else 1.0
            self.num_bytes += tensor.untyped_storage().nbytes() * share
        return tensor

    def take(self) -> float:
        """The bytes since the last time."""
        num_bytes, self.num_bytes = self.num_bytes, 0.0
        return num_bytes


def _storage_of(tensor: Tensor) -> int:
    """What identifies the memory of a tensor."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _only_shapes(device: torch.device) -> Iterator[None]:
    """A setting in which nothing is computed; a model on the device `meta` needs none."""
    if device.type == "meta":
        yield
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def record_work(pieces: Pieces, rows: int) -> tuple[UnitWork, ...]:
    """The work of every unit on so many rows."""
    device = pieces.model.sample[0].device
    # a precision below fp32 is counted here by its bytes, so that the shapes may run on any device
    plain = Pieces(model=pieces.model, units=pieces.units, precision="fp32")
    size = float_bytes(pieces.precision)
    forward: list[tuple[Work, ...]] = []
    backward: list[tuple[Work, ...]] = []
    saved: list[float] = []
    with _only_shapes(device):
        inputs, targets = plain.rows(rows)
        recorder, keeper = WorkRecorder(size), _Keeper([*pieces.model.model.parameters()], size)

        def mark(unit: int, is_backward: bool) -> None:
            (backward if is_backward else forward).append(recorder.take())
            if not is_backward:
                saved.append(keeper.take())

        with recorder, torch.autograd.graph.saved_tensors_hooks(keeper.pack, _unpacked):
            run_units(plain, inputs, targets, mark, accumulate=False)
    triples = zip(forward, reversed(backward), saved)
    return tuple(UnitWork(forward=f, backward=b, saved_bytes=s) for f, b, s in triples)


def record_saved(pieces: Pieces, rows: int) -> list[float]:
    """The bytes that every unit saves of so many rows for its backward."""
    plain = Pieces(model=pieces.model, units=pieces.units, precision="fp32")
    saved: list[float] = []
    with _only_shapes(pieces.model.sample[0].device):
        keeper = _Keeper([*pieces.model.model.parameters()], float_bytes(pieces.precision))
        with torch.autograd.graph.saved_tensors_hooks(keeper.pack, _unpacked):
            run_forward(plain, *plain.rows(rows), lambda unit, is_backward: saved.append(keeper.take()))
    return saved


def _unpacked(tensor: Tensor) -> Tensor:
    """What was packed, unchanged."""
    return tensor


def float_bytes(precision: Precision) -> int:
    """Bytes of what fp32 tensors are in this precision."""
    return min(ROW_BYTES[precision], 4) if precision != "fp64" else 8
