"""Fits a kind of device's few efficiencies to single-device figures such as samples/s."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from stagewright.errors import ProfileError
from stagewright.models.layered import Layered
from stagewright.profile import Precision
from stagewright.profiling.analytic import seconds, step_seconds
from stagewright.profiling.kinds import DeviceKind
from stagewright.profiling.layers import make_pieces
from stagewright.profiling.operators import UnitWork, record_work

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

    def error(self, kind: DeviceKind) -> float:
        """The logarithm of predicted over measured seconds."""
        made = self.measurement
        predicted = step_seconds(self.table, self.parameter_bytes, kind, made.precision)
        return math.log(predicted * made.samples_per_s / made.batch)

    def share(self, work: str, kind: DeviceKind) -> float:
        """The share of the step that one kind of work takes."""
        precision = self.measurement.precision
        every = [each for unit in self.table for each in (*unit.forward, *unit.backward)]
        return seconds([each for each in every if each.kind == work], kind, precision) / seconds(every, kind, precision)


def calibrate_device(kind: DeviceKind, measurements: Sequence[Measurement]) -> DeviceKind:
    """The kind with efficiencies that minimise Σ error² + 0.05² · Σ (log of change)², errors being logarithms.

    The second sum decides only what the measurements leave open. A kind of work that takes less than 15 % of every
    measurement cannot be told from them, and keeps its efficiency.
    """
    if not measurements:
        raise ProfileError("nothing to calibrate with", "give at least one measured samples/s")
    samples = [_sample(measurement) for measurement in measurements]
    keys = sorted({_key(kind, work, s.measurement) for s in samples for work in _WORKS if s.share(work, kind) > 0.15})
    fitted = dict(kind.efficiency)
    for round_number in range(60):
        step = 0.2 * 0.85**round_number
        fitted = min(_moves(fitted, keys, step), key=lambda efficiency: _loss(efficiency, kind, samples))
    rounded = {key: float(f"{value:.3g}") for key, value in fitted.items()}
    return replace(kind, efficiency=rounded, notes=_notes(kind, measurements))


def _moves(fitted: dict[str, float], keys: Sequence[str], step: float) -> Iterator[dict[str, float]]:
    """The point itself, and its neighbours in all directions; beyond 0.05 and 3 the peak rates would be wrong."""
    for signs in product((0, -1, 1), repeat=len(keys)):
        moved = (fitted[key] * math.exp(sign * step) for key, sign in zip(keys, signs))
        yield {**fitted, **{key: min(max(value, 0.05), 3.0) for key, value in zip(keys, moved)}}


def _sample(measurement: Measurement) -> _Sample:
    pieces = make_pieces(measurement.model, measurement.precision)
    sizes = [p.numel() * p.element_size() for p in measurement.model.model.parameters()]
    return _Sample(measurement, record_work(pieces, measurement.batch), sum(sizes))


def _key(kind: DeviceKind, work: str, measurement: Measurement) -> str:
    narrow = f"{work}.{measurement.precision}"
    return narrow if narrow in kind.efficiency else work


def _loss(efficiency: dict[str, float], kind: DeviceKind, samples: Sequence[_Sample]) -> float:
    changed = replace(kind, efficiency=efficiency)
    moved = (math.log(efficiency[key] / kind.efficiency[key]) ** 2 for key in efficiency)
    return sum(sample.error(changed) ** 2 for sample in samples) + 0.05**2 * sum(moved)


def _notes(kind: DeviceKind, measurements: Sequence[Measurement]) -> tuple[str, ...]:
    figures = "; ".join(
        f"{m.name} {m.samples_per_s:g} samples/s at batch {m.batch} in {m.precision}" for m in measurements
    )
    return (*kind.notes, f"Efficiencies fitted to one device's figures: {figures}.")
