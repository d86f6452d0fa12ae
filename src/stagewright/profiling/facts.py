"""What a model's layers are, whatever they run on: bytes, operations, and which layer reads which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor, nn

from stagewright.models.layered import Layered
from stagewright.models.roles import parameter_roles
from stagewright.models.values import TensorSpec
from stagewright.profile import LayerProfile, Precision
from stagewright.profiling.layers import Pieces, Unit
from stagewright.profiling.operators import UnitWork, Work, float_bytes, record_saved, record_work


def find_facts(pieces: Pieces) -> tuple[LayerProfile, ...]:
    """A profile without times for every unit of a model, called by its last layer."""
    # The difference tells what grows with rows and what does not; batch norm refuses one row.
    few, many = record_work(pieces, 2), record_work(pieces, 4)
    outputs, inputs = _read_crossings(pieces)
    seen: set[int] = set()
    named, roles = dict(pieces.model.model.named_parameters()), parameter_roles(pieces.model)
    role_of = {id(parameter): roles[name] for name, parameter in named.items()}
    facts = []
    for number, (unit, work) in enumerate(zip(pieces.units, many)):
        own = [parameter for parameter in unit.module.parameters() if id(parameter) not in seen]
        seen.update(map(id, own))
        is_loss = unit.module.has_loss and unit.last - unit.first == 1
        facts.append(
            LayerProfile(
                name=pieces.model.names[unit.last - 1], kind="loss" if is_loss else _kind_of(work.forward),
                forward_s=(), backward_s=(), weight_share=weight_share(unit, work), output_bytes=outputs[number],
                saved_bytes=max(0.0, (work.saved_bytes - few[number].saved_bytes) / 2),
                parameter_bytes=_num_bytes(own), trained_bytes=_trained_by_role(own, role_of),
                buffer_bytes=_num_bytes(list(unit.module.buffers())),
                flops=sum(each.flops for each in work.forward) / 4, inputs=inputs[number],
            )
        )  # fmt: skip
    return tuple(facts)


def _trained_by_role(parameters: Sequence[nn.Parameter], role_of: Mapping[int, str]) -> dict[str, int]:
    """The bytes of the parameters that are trained, by role."""
    sizes: dict[str, int] = {}
    for each in parameters:
        if each.requires_grad:
            role = role_of[id(each)]
            sizes[role] = sizes.get(role, 0) + _num_bytes([each])
    return sizes


def saved_by_row(model: Layered, edges: Sequence[int], precision: Precision) -> list[float]:
    """Bytes that the layers between each two edges save of a row for their backward; what all rows share is divided."""
    units = (Unit(first=a, last=b, module=model.stage(a, b)) for a, b in pairwise(edges))
    pieces = Pieces(model=model, units=tuple(units), precision=precision)
    return [saved / 4 for saved in record_saved(pieces, 4)]


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _kind_of(works: Sequence[Work]) -> str:
    """The kind of work that most operations go into."""
    totals = {kind: sum(work.flops for work in works if work.kind == kind) for kind in ("conv", "matmul")}
    return max(totals, key=lambda kind: totals[kind]) if any(totals.values()) else "memory"


def weight_share(unit: Unit, work: UnitWork) -> float:
    """The share of backward that only weights need: what forward's operations are of backward's.

    A convolution or matrix product costs as much again for each of its two gradients.
    """
    if not any(parameter.requires_grad for parameter in unit.module.parameters()):
        return 0.0
    if not any(spec.needs_grad for spec in unit.module.inputs):
        return 1.0
    forward, backward = (sum(each.flops for each in works) for works in (work.forward, work.backward))
    return min(0.5, forward / backward) if backward else 0.0


def _read_crossings(pieces: Pieces) -> tuple[list[float], list[tuple[str, ...] | None]]:
    """For each unit the bytes a row of what it makes, and the layers that it is the last to read.

    cut 3 carries {a, b}, cut 4 carries {b, c}:  unit 3 is the last to read a, and makes c
    """
    model, edges = pieces.model, [unit.first for unit in pieces.units]
    crossing = [_named(model, edge) for edge in edges]
    makers: dict[str, int] = {}
    outputs, inputs = [0.0] * len(edges), [list[int]() for _ in edges]
    for number in range(1, len(edges)):
        for name, spec in crossing[number].items():
            if name not in makers and name not in crossing[0]:
                makers[name] = number - 1
                outputs[number - 1] += _row_bytes(spec, pieces.precision)
        later = crossing[number + 1] if number + 1 < len(edges) else {}
        inputs[number] = sorted({makers[name] for name in crossing[number] if name in makers and name not in later})
    names = [model.names[unit.last - 1] for unit in pieces.units]
    read = (None if each == [n - 1] or not n else tuple(names[i] for i in each) for n, each in enumerate(inputs))
    return outputs, list(read)


def _named(model: Layered, cut: int) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in model.carried(cut)}


def _row_bytes(spec: TensorSpec, precision: Precision) -> float:
    plain = float(spec.bytes_per_row)
    return plain * float_bytes(precision) / 4 if spec.dtype.is_floating_point else plain


def layer_profiles(
    pieces: Pieces,
    facts: Sequence[LayerProfile],
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    *,
    weight_s: Sequence[Sequence[float]] | None = None,
    spread: Sequence[float] | None = None,
) -> tuple[LayerProfile, ...]:
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
        timed = replace(
            fact, forward_s=tuple(forward_s[number]), backward_s=tuple(backward_s[number]),
            weight_s=() if weight_s is None else _part_of(backward_s[number], fact.weight_share, weight_s[number]),
            spread=0.0 if spread is None else spread[number],
        )  # fmt: skip
        layers.append(replace(timed, inputs=None, cuttable=False) if before else timed)
    return tuple(layers)


def _part_of(backward_s: Sequence[float], share: float, measured_s: Sequence[float]) -> tuple[float, ...]:
    """What of backward only weights need: none or all of it where that is known, else what was measured."""
    if share in (0.0, 1.0):
        return tuple(seconds * share for seconds in backward_s)
    return tuple(map(min, measured_s, backward_s))
