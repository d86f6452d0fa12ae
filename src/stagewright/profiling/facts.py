"""What a model's layers are and do, found on shapes alone: bytes, operations, and which layer reads which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stagewright.models.counts import parameter_roles
from stagewright.models.layered import Layered
from stagewright.models.values import shapes_only
from stagewright.profile import ROW_BYTES, LayerProfile, Precision, Profile
from stagewright.profiling.kinds import WorkKind
from stagewright.profiling.layers import DTYPES, Pieces, Unit, make_pieces, run_units, shortened
from stagewright.profiling.memory import LayerMemory, record_memory


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
    """The operators of one unit's forward and backward."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]


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
        moved = self.bytes_of((args, kwargs, made))
        kind: WorkKind = "memory" if not flops else "conv" if _is_wide(packet.__name__, args) else "matmul"
        # Fusing an operator on single elements saves one operand's reading, and the writing.
        spared = min(2 * self.bytes_of(made), moved) if torch.Tag.pointwise in func.tags else 0.0
        return Work(kind, flops, moved, spared)

    def bytes_of(self, values: Any) -> float:
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        sizes = (self.float_bytes if each.dtype == torch.float32 else each.element_size() for each in tensors)
        return float(sum(each.numel() * size for each, size in zip(tensors, sizes)))

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


def record_work(pieces: Pieces, rows: int) -> tuple[UnitWork, ...]:
    """The work of every unit on so many rows."""
    # a precision below fp32 is counted here by its bytes, so that the shapes may run on any device
    short, places = shortened(pieces)
    plain = replace(short, precision="fp32")
    forward: list[tuple[Work, ...]] = []
    backward: list[tuple[Work, ...]] = []
    with shapes_only(pieces.model.sample[0].device):
        inputs, targets = plain.rows(rows)
        recorder = WorkRecorder(_float_bytes(pieces.precision))

        def mark(unit: int, is_backward: bool) -> None:
            (backward if is_backward else forward).append(recorder.take())

        with recorder:
            run_units(plain, inputs, targets, mark, accumulate=False)
    found = [UnitWork(forward=f, backward=b) for f, b in zip(forward, backward[::-1])]
    return tuple(found[place] for place in places)


def _float_bytes(precision: Precision) -> int:
    """Bytes of what fp32 tensors are in this precision."""
    return min(ROW_BYTES[precision], 4) if precision != "fp64" else 8


def memory_profile(model: Layered, precision: Precision) -> Profile:
    """What a model's layers hold, as a profile that says nothing of time."""
    pieces = make_pieces(model, precision)
    zeros = [(0.0,)] * len(pieces.units)
    return Profile(
        model=type(model.model).__name__.lower(), device="any", precision=precision, source="analytic",
        batch_sizes=(1,), layers=layer_profiles(pieces, find_facts(pieces, has_work=False), zeros, zeros),
        input_bytes=input_bytes(model, precision),
    )  # fmt: skip


def input_bytes(model: Layered, precision: Precision) -> float:
    """Bytes of a row of the model's inputs as they come: those that only products read are rounded before."""
    width = _float_bytes(precision) / 4
    pairs = zip(model.inputs, model.only_multiplied)
    rounded = [spec.bytes_per_row * (width if only and spec.dtype.is_floating_point else 1) for spec, only in pairs]
    return float(sum(rounded))


def find_facts(pieces: Pieces, *, has_work: bool = True) -> tuple[LayerProfile, ...]:
    """A profile without times for every unit of a model, called by its last layer; without its work only of bytes."""
    works = record_work(pieces, 4) if has_work else (UnitWork(forward=(), backward=()),) * len(pieces.units)
    # The difference tells what grows with rows and what does not; batch norm refuses one row.
    few, many = (_memory_of(pieces, rows) for rows in (2, 4))
    outputs, inputs = _read_crossings(pieces, {name: width for each in many for name, width in each.widths.items()})
    is_double = any(each.dtype == torch.float64 for each in pieces.model.model.parameters())
    size = 2 if pieces.precision == "fp64" and not is_double else 1  # twice that of the fp32 that it is made in
    seen: set[int] = set()
    named, roles = dict(pieces.model.model.named_parameters()), parameter_roles(pieces.model)
    role_of = {id(parameter): roles[name] for name, parameter in named.items()}
    facts = []
    for number, (unit, work) in enumerate(zip(pieces.units, works)):
        own = [parameter for parameter in unit.module.parameters() if id(parameter) not in seen]
        seen.update(map(id, own))
        is_loss, trained = unit.module.has_loss and unit.last - unit.first == 1, _trained_by_role(own, role_of, size)
        kind = _kind_of(work.forward) if has_work else "matmul" if "matrix" in trained else "memory"
        facts.append(
            LayerProfile(
                name=pieces.model.names[unit.last - 1], kind="loss" if is_loss else kind,
                forward_s=(), backward_s=(), weight_share=_weight_share(unit, work), output_bytes=outputs[number],
                parameter_bytes=size * _num_bytes(own), trained_bytes=trained,
                buffer_bytes=size * _num_bytes(list(unit.module.buffers())), **_held(few[number], many[number], size),
                flops=sum(each.flops for each in work.forward) / 4, inputs=inputs[number],
            )
        )  # fmt: skip
    return tuple(facts)


def _memory_of(pieces: Pieces, rows: int) -> tuple[LayerMemory, ...]:
    """What the units hold; a model that does not run as autocast has it is counted in single precision."""
    try:
        return record_memory(pieces, rows)
    except Exception:  # whatever it does with formats, on shapes alone: on a card it may well run
        if pieces.precision not in DTYPES:
            raise
        return record_memory(replace(pieces, precision="fp32"), rows)


def _held(few: LayerMemory, many: LayerMemory, size: int) -> dict[str, Any]:
    """The bytes that a layer holds, a row and whatever the rows, from what it held on 2 rows and on 4."""

    def line(first: float, second: float) -> tuple[float, int]:
        slope = max(0.0, (second - first) / 2)
        return size * slope, max(0, round(size * (second - 4 * slope)))

    saved, casts = line(few.saved, many.saved)
    workspace, scratch = line(few.workspace, many.workspace)
    return {
        "saved_bytes": saved, "cast_bytes": casts, "workspace_bytes": workspace, "scratch_bytes": scratch,
        "before_bytes": line(few.before, many.before)[0],
    }  # fmt: skip


def _trained_by_role(parameters: Sequence[nn.Parameter], role_of: Mapping[int, str], size: int) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for each in parameters:
        if each.requires_grad:
            sizes[role_of[id(each)]] += size * _num_bytes([each])
    return dict(sizes)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _kind_of(works: Sequence[Work]) -> str:
    """The kind of work that most operations go into."""
    totals = {kind: sum(work.flops for work in works if work.kind == kind) for kind in ("conv", "matmul")}
    return max(totals, key=lambda kind: totals[kind]) if any(totals.values()) else "memory"


def _weight_share(unit: Unit, work: UnitWork) -> float:
    """The share of backward that only weights need: what forward's operations are of backward's.

    A convolution or matrix product costs as much again for each of its two gradients.
    """
    if not any(parameter.requires_grad for parameter in unit.module.parameters()):
        return 0.0
    if not any(spec.needs_grad for spec in unit.module.inputs):
        return 1.0
    forward, backward = (sum(each.flops for each in works) for works in (work.forward, work.backward))
    return min(0.5, forward / backward) if backward else 0.0


def _read_crossings(pieces: Pieces, widths: Mapping[str, int]) -> tuple[list[float], list[tuple[str, ...] | None]]:
    """For each unit the bytes a row of what it makes, and the layers that it is the last to read.

    `widths` are the bytes of a number of each tensor, in the formats that the precision makes.

    cut 3 carries {a, b}, cut 4 carries {b, c}:  unit 3 is the last to read a, and makes c
    """
    model, edges = pieces.model, [unit.first for unit in pieces.units]
    crossing = [{spec.name: spec for spec in model.carried(edge)} for edge in edges]
    makers: dict[str, int] = {}
    outputs, inputs = [0.0] * len(edges), [list[int]() for _ in edges]
    for number in range(1, len(edges)):
        for name, spec in crossing[number].items():
            if name not in makers and name not in crossing[0]:
                makers[name] = number - 1
                width = 8 if pieces.precision == "fp64" and spec.dtype.is_floating_point else widths[name]
                outputs[number - 1] += spec.bytes_per_row // spec.dtype.itemsize * width
        later = crossing[number + 1] if number + 1 < len(edges) else {}
        inputs[number] = sorted({makers[name] for name in crossing[number] if name in makers and name not in later})
    names = [model.names[unit.last - 1] for unit in pieces.units]
    read = (None if each == [n - 1] or not n else tuple(names[i] for i in each) for n, each in enumerate(inputs))
    return outputs, list(read)


_Seconds = Sequence[Sequence[float]]


def layer_profiles(
    pieces: Pieces, facts: Sequence[LayerProfile], forward_s: _Seconds, backward_s: _Seconds, *,
    weight_s: _Seconds | None = None, spread: Sequence[float] | None = None,
) -> tuple[LayerProfile, ...]:  # fmt: skip
    """One entry a layer; where a unit has several, the last has the figures, and no stage may begin after the first."""
    zeros = (0.0,) * len(forward_s[0])
    layers: list[LayerProfile] = []
    for number, (unit, fact) in enumerate(zip(pieces.units, facts)):
        *before, _ = pieces.model.names[unit.first : unit.last]
        for name in before:
            is_first = name == before[0]
            silent = LayerProfile(
                name=name, forward_s=zeros, backward_s=zeros, output_bytes=0.0, saved_bytes=0.0, parameter_bytes=0,
                inputs=fact.inputs if is_first else None, cuttable=is_first,
            )  # fmt: skip
            layers.append(silent)
        whole, only_weights = tuple(backward_s[number]), tuple[float, ...]()
        if weight_s is not None:  # none or all of backward where that is known, else what was measured
            known = (seconds * fact.weight_share for seconds in whole)
            only_weights = tuple(known if fact.weight_share in (0.0, 1.0) else map(min, weight_s[number], whole))
        timed = replace(
            fact, forward_s=tuple(forward_s[number]), backward_s=whole, weight_s=only_weights,
            spread=0.0 if spread is None else spread[number],
        )  # fmt: skip
        layers.append(replace(timed, inputs=None, cuttable=False) if before else timed)
    return tuple(layers)
