"""Start-up and steady state told apart, from when each batch was done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stagewright.schedule import Schedule
from stagewright.simulation.log import Log
from stagewright.simulation.program import Code


class Steady(NamedTuple):
    """The steady part of a run: the batches first … last − 1."""

    first: int
    last: int
    step_s: tuple[float, ...]
    start_s: float
    stop_s: float


def batches_needed(schedule: Schedule) -> int:
    """How many batches show the steady state: start-up, a few periods, and the end where the pipeline drains."""
    low, high = schedule.offsets
    return (
        4 if low == high == 0 and schedule.plan.is_synchronous else 8 + 3 * (high - low + max(schedule.plan.versions))
    )


def batches_done(log: Log, num_batches: int) -> list[float]:
    """When the last update of each batch was over."""
    done, columns = [0.0] * num_batches, log.done_columns
    for at in [number for number, op in enumerate(columns.ops) if op.code is Code.UPDATE]:
        batch = columns.batches[at]
        done[batch] = max(done[batch], columns.stops_s[at])
    return done


def find_steady(done: Sequence[float], drain: int, least_s: float = 0.0) -> Steady:
    """The steps that repeat, `drain` batches before the end left out; the second half where none repeat.

    done   │··5···│··4··│··3··│··3··│··3··│·1│      start-up 5 + 4, then steps of 3; the last one drains

    While a long pipeline fills, batches can end faster than a worker has time for: no step is shorter than `least_s`.
    """
    found = _repeating(done, drain)
    return found._replace(step_s=tuple(max(step_s, least_s) for step_s in found.step_s))


def _repeating(done: Sequence[float], drain: int) -> Steady:
    last = max(len(done) - drain, min(len(done), 2))
    if last < 2 or done[last // 2 - 1] == done[last - 1]:  # too few to tell: stale batches may even end together
        return Steady(0, last, (done[last - 1] / last,), 0.0, done[last - 1])
    period = next((n for n in range(1, 5) if _repeats(done[:last], n)), None)
    if period is None:
        first = last // 2
        mean = (done[last - 1] - done[first - 1]) / (last - first)
        return Steady(first, last, (mean,), done[first - 1], done[last - 1])
    first = last - period
    while first > 1 and _same_step(done, first - 1, period):
        first -= 1
    steps = tuple((done[at] - done[at - period]) / period for at in range(first + period - 1, last))
    return Steady(first, last, steps, done[first - 1], done[last - 1])


def _repeats(done: Sequence[float], period: int) -> bool:
    """Whether the last steps show this period: each of them equals the one a period before."""
    count = len(done)
    return count >= 2 * period + 2 and all(
        _same_step(done, at, period) for at in range(count - 2 * period, count - period)
    )


def _same_step(done: Sequence[float], at: int, period: int) -> bool:
    """Whether the step that ends with batch `at` takes as long as the one a period later."""
    if at < 1 or at + period >= len(done):
        return False
    here, later = done[at] - done[at - 1], done[at + period] - done[at + period - 1]
    return abs(here - later) <= 1e-9 * done[-1]
