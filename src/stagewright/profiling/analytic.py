"""Profiles of devices that are not at hand: a roofline for every operator, its few efficiencies fitted to figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch

from stagewright.cluster import Cluster, plain_kind
from stagewright.errors import ProfileError
from stagewright.models.huggingface import Adapt
from stagewright.models.layered import Layered
from stagewright.models.zoo import build_model
from stagewright.profile import Precision, Profile
from stagewright.profiling.facts import UnitWork, Work, find_facts, layer_profiles, record_work
from stagewright.profiling.kinds import DeviceKind, find_kind
from stagewright.profiling.layers import make_pieces


def make_analytic_profile(
    model: Layered, kind: DeviceKind, *, batch_sizes: Sequence[int], precision: Precision = "fp32",
    name: str | None = None,
) -> Profile:  # fmt: skip
    """The profile that a kind of device should show, from shapes alone."""
    return _profiles(model, [kind], batch_sizes, precision, name or type(model.model).__name__.lower())[0]


def _profiles(
    model: Layered, kinds: Sequence[DeviceKind], sizes: Sequence[int], precision: Precision, name: str
) -> list[Profile]:
    """One profile for each kind of device; the model's operators, which are the same for all, are counted once."""
    pieces = make_pieces(model, precision)
    facts = find_facts(pieces)
    tables = [record_work(pieces, rows) for rows in sizes]

    def made(kind: DeviceKind) -> Profile:
        forward = [[_seconds(table[unit].forward, kind, precision) for table in tables] for unit in range(len(facts))]
        backward = [[_seconds(table[unit].backward, kind, precision) for table in tables] for unit in range(len(facts))]
        note = f"roofline of {kind.name}: {', '.join(f'{work} {share:g}' for work, share in kind.efficiency.items())}"
        return Profile(
            model=name, device=kind.name, precision=precision, source="analytic", batch_sizes=tuple(sizes),
            layers=layer_profiles(pieces, facts, forward, backward),
            input_bytes=float(sum(spec.bytes_per_row for spec in model.inputs)),
            sample_name=model.sample_name, sample_tokens=model.row_tokens,
            optimizer_s=_optimizer_seconds(sum(fact.gradient_bytes for fact in facts), kind),
            versions={"torch": str(torch.__version__)}, notes=(note, *kind.notes),
        )  # fmt: skip

    return list(map(made, kinds))


def profile_for(
    cluster: Cluster, model: str, sizes: tuple[int, ...], precision: Precision, adapt: Adapt | None = None
) -> Profile:
    """The analytic profile of a model of the zoo on the kinds of device of a cluster."""
    said = {plain_kind(device.kind) for host in cluster.hosts for device in host.devices if device.speed != 1.0}
    kinds = [kind for number, kind in enumerate(cluster.kinds) if not number or kind not in said]
    for kind in kinds:
        if kind not in DeviceKind.ready_made():
            raise ProfileError(
                f"{model} has to be measured on {kind}, the devices of {cluster.name}: no data sheet is known here",
                f"run `stagewright profile {model} --batch ROWS -o FILE` on such a device, and give that file",
            )
    return Profile.of_kinds(_profiles_by_name(model, tuple(kinds), sizes, precision, adapt))


@cache
def _profiles_by_name(
    model: str, kinds: tuple[str, ...], sizes: tuple[int, ...], precision: Precision, adapt: Adapt | None
) -> list[Profile]:
    """The analytic profiles of a model on kinds of device, all by name; made once, however often asked.

    That its layers do what the model does is checked before it is trained, not here.
    """
    built = build_model(model, device="meta", check=False, adapt=adapt)
    return _profiles(built, list(map(find_kind, kinds)), sizes, precision, model)


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


def _seconds(works: Sequence[Work], kind: DeviceKind, precision: Precision) -> float:
    """Some operators, one after the other."""
    return sum(operator_seconds(work, kind, precision) for work in works)


def _optimizer_seconds(parameter_bytes: int, kind: DeviceKind) -> float:
    """Five passes over the weights' memory: SGD reads weight, gradient and momentum, and writes weight and momentum."""
    return 5 * parameter_bytes / kind.rate("memory", "fp32") + kind.launch_s


def step_seconds(table: Sequence[UnitWork], parameter_bytes: int, kind: DeviceKind, precision: Precision) -> float:
    """One optimizer step of the whole model on one device."""
    works = [work for unit in table for work in (*unit.forward, *unit.backward)]
    return _seconds(works, kind, precision) + _optimizer_seconds(parameter_bytes, kind) + kind.step_overhead_s


_WORKS = ("conv", "matmul", "memory")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One device trained this model at so many samples a second."""

    model: Layered
    batch: int
    samples_per_s: float
    precision: Precision = "fp32"
    name: str = "model"

    def __post_init__(self) -> None:
        if self.batch < 1 or not 0 < self.samples_per_s < math.inf:
            raise ProfileError(
                f"{self.name}: {self.samples_per_s} samples/s at batch {self.batch}: expected positive numbers"
            )


@dataclass(frozen=True)
class _Sample:
    """A measurement with what its operators do."""

    measurement: Measurement
    table: tuple[UnitWork, ...]
    parameter_bytes: int

    @classmethod
    def of(cls, made: Measurement) -> _Sample:
        sizes = [each.numel() * each.element_size() for each in made.model.model.parameters()]
        return cls(made, record_work(make_pieces(made.model, made.precision), made.batch), sum(sizes))

    def error(self, kind: DeviceKind) -> float:
        """The logarithm of predicted over measured seconds."""
        made = self.measurement
        predicted = step_seconds(self.table, self.parameter_bytes, kind, made.precision)
        return math.log(predicted * made.samples_per_s / made.batch)

    def share(self, work: str, kind: DeviceKind) -> float:
        """The share of the step that one kind of work takes."""
        precision = self.measurement.precision
        every = [each for unit in self.table for each in (*unit.forward, *unit.backward)]
        own = [each for each in every if each.kind == work]
        return _seconds(own, kind, precision) / _seconds(every, kind, precision)


def calibrate_device(kind: DeviceKind, measurements: Sequence[Measurement]) -> DeviceKind:
    """The kind with efficiencies that minimise Σ error² + 0.05² · Σ (log of change)², errors being logarithms.

    The second sum decides only what the measurements leave open. A kind of work that takes less than 15 % of every
    measurement cannot be told from them, and keeps its efficiency.
    """
    if not measurements:
        raise ProfileError("nothing to calibrate with", "give at least one measured samples/s")
    samples = list(map(_Sample.of, measurements))
    keys = sorted({_key(kind, work, s.measurement) for s in samples for work in _WORKS if s.share(work, kind) > 0.15})
    fitted = dict(kind.efficiency)
    for round_number in range(60):
        step = 0.2 * 0.85**round_number
        fitted = min(_moves(fitted, keys, step), key=lambda efficiency: _loss(efficiency, kind, samples))
    rounded = {key: float(f"{value:.3g}") for key, value in fitted.items()}
    figures = "; ".join(
        f"{each.name} {each.samples_per_s:g} samples/s at batch {each.batch} in {each.precision}"
        for each in measurements
    )
    note = f"Efficiencies fitted to one device's figures: {figures}."
    return replace(kind, efficiency=rounded, notes=(*kind.notes, note))


def _moves(fitted: dict[str, float], keys: Sequence[str], step: float) -> Iterator[dict[str, float]]:
    """The point itself, and its neighbours in all directions; beyond 0.05 and 3 the peak rates would be wrong."""
    for signs in product((0, -1, 1), repeat=len(keys)):
        moved = (fitted[key] * math.exp(sign * step) for key, sign in zip(keys, signs))
        yield {**fitted, **{key: min(max(value, 0.05), 3.0) for key, value in zip(keys, moved)}}


def _key(kind: DeviceKind, work: str, measurement: Measurement) -> str:
    narrow = f"{work}.{measurement.precision}"
    return narrow if narrow in kind.efficiency else work


def _loss(efficiency: dict[str, float], kind: DeviceKind, samples: Sequence[_Sample]) -> float:
    changed = replace(kind, efficiency=efficiency)
    moved = (math.log(efficiency[key] / kind.efficiency[key]) ** 2 for key in efficiency)
    return sum(sample.error(changed) ** 2 for sample in samples) + 0.05**2 * sum(moved)
