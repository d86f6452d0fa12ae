"""Time to a loss: what a user waits for, beside the samples a second that a plan does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from stagewright.record import Record
from stagewright.report.cases import Case, families

_LOSSES = ("validation_loss", "loss")
"""The curves that are told as time to a loss, the better one first."""


def _loss_curve(record: Record) -> list[tuple[float, float]]:
    """(step, loss): that of evaluations, or of training as a mean over a twentieth of its points."""
    for name in _LOSSES:
        found = [(float(point.step), point.value) for point in record.points if point.name == name]
        if len(found) > 1:
            width = 1 if name == _LOSSES[0] else max(1, len(found) // 20)
            means = (fmean(value for _, value in found[end - width : end]) for end in range(width, len(found) + 1))
            return [(step, mean) for (step, _), mean in zip(found[width - 1 :], means)]
    return []


def _time_to_loss(record: Record, target: float) -> float | None:
    """Seconds of training until the loss is this low, at the run's median step; None where it never is.

    Between two points of the curve it falls along a line.
    """
    curve = _loss_curve(record)
    if curve and curve[0][1] <= target:
        return curve[0][0] * record.median_step_s
    for (step, value), (then, lower) in pairwise(curve):
        if lower <= target:
            return (step + (then - step) * (value - target) / (value - lower)) * record.median_step_s
    return None


def final_losses(case: Case) -> list[float]:
    """Those of its repetitions."""
    return [curve[-1][1] for curve in map(_loss_curve, case.records) if curve]


def times_to_loss(case: Case, target: float) -> list[float]:
    """Those of the repetitions that come to it."""
    return [found for found in (_time_to_loss(record, target) for record in case.records) if found is not None]


def find_goals(cases: Sequence[Case]) -> list[tuple[Case, float, list[Case]]]:
    """For each family the fastest exact case, the median loss with which it ends, and all that have such a curve."""
    goals = []
    for family in families(cases):
        told = [case for case in family if final_losses(case)]
        exact = [case for case in told if case.plan.is_synchronous]
        if len(told) > 1 and exact:
            base = max(exact, key=lambda case: case.samples_per_s)
            goals.append((base, median(final_losses(base)), told))
    return goals
