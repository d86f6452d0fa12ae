"""Profiles of devices that are not at hand: a roofline for every operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from stagewright.cluster import Cluster, plain_kind
from stagewright.errors import ProfileError
from stagewright.models.layered import Layered
from stagewright.models.zoo import build_model
from stagewright.profile import Precision, Profile
from stagewright.profiling.facts import find_facts, layer_profiles
from stagewright.profiling.kinds import DeviceKind, find_kind, known_kinds
from stagewright.profiling.layers import make_pieces
from stagewright.profiling.operators import UnitWork, Work, record_work


def make_analytic_profile(
    model: Layered,
    kind: DeviceKind,
    *,
    batch_sizes: Sequence[int],
    precision: Precision = "fp32",
    name: str | None = None,
) -> Profile:
    """The profile that a kind of device should show, from shapes alone."""
    pieces = make_pieces(model, precision)
    facts = find_facts(pieces)
    tables = [record_work(pieces, rows) for rows in batch_sizes]
    forward = [[seconds(table[unit].forward, kind, precision) for table in tables] for unit in range(len(facts))]
    backward = [[seconds(table[unit].backward, kind, precision) for table in tables] for unit in range(len(facts))]
    return Profile(
        model=name or type(model.model).__name__.lower(),
        device=kind.name,
        precision=precision,
        source="analytic",
        batch_sizes=tuple(batch_sizes),
        layers=layer_profiles(pieces, facts, forward, backward),
        input_bytes=float(sum(spec.bytes_per_row for spec in model.inputs)),
        optimizer_s=_optimizer_seconds(sum(fact.gradient_bytes for fact in facts), kind),
        versions={"torch": str(torch.__version__)},
        notes=(f"roofline of {kind.name}: {', '.join(f'{k} {v:g}' for k, v in kind.efficiency.items())}", *kind.notes),
    )


def profile_for(cluster: Cluster, model: str, sizes: tuple[int, ...], precision: Precision) -> Profile:
    """The analytic profile of a model of the zoo on the first kind of device of a cluster."""
    kind = plain_kind(cluster.hosts[0].devices[0].kind)
    if kind not in known_kinds():
        raise ProfileError(
            f"{model} has to be measured on {kind}, the devices of {cluster.name}: no data sheet is known here",
            f"run `stagewright profile {model} --batch ROWS -o FILE` on such a device, and give that file",
        )
    return _profile_by_name(model, kind, sizes, precision)


@cache
def _profile_by_name(model: str, device: str, sizes: tuple[int, ...], precision: Precision) -> Profile:
    """The analytic profile of a model of the zoo on a kind of device, both by name; made once, however often asked."""
    built = build_model(model, device="meta")
    return make_analytic_profile(built, find_kind(device), batch_sizes=sizes, precision=precision, name=model)


def operator_seconds(work: Work, kind: DeviceKind, precision: Precision) -> float:
    """One operator: launch + max(operations / rate of its kind, bytes / memory rate).

    Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009, section 3. An operator
    that runs inside the one beside it moves only what that one does not have at hand, and is not launched.
    """
    if work.spared_bytes and precision in kind.fused:
        return (work.num_bytes - work.spared_bytes) / kind.rate("memory", precision)
    moving = work.num_bytes / kind.rate("memory", precision)
    computing = work.flops / kind.rate(work.kind, precision) if work.flops else 0.0
    return kind.launch_s + max(moving, computing)


def seconds(works: Sequence[Work], kind: DeviceKind, precision: Precision) -> float:
    """Some operators, one after the other."""
    return sum(operator_seconds(work, kind, precision) for work in works)


def _optimizer_seconds(parameter_bytes: int, kind: DeviceKind) -> float:
    """Five passes over the weights' memory: SGD reads weight, gradient and momentum, and writes weight and momentum."""
    return 5 * parameter_bytes / kind.rate("memory", "fp32") + kind.launch_s


def step_seconds(table: Sequence[UnitWork], parameter_bytes: int, kind: DeviceKind, precision: Precision) -> float:
    """One optimizer step of the whole model on one device."""
    works = [work for unit in table for work in (*unit.forward, *unit.backward)]
    return seconds(works, kind, precision) + _optimizer_seconds(parameter_bytes, kind) + kind.step_overhead_s
