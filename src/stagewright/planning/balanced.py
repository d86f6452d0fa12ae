"""Plans whose slowest stage is as fast as can be, by whole tables at once: fill, drain and memory are left out.

best[stages, devices, cut] = min over the next cut and its replicas of max(this stage, best[stages − 1, …])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from stagewright.cost import Costs
from stagewright.planning.candidates import Candidate
from stagewright.planning.estimate import Estimator
from stagewright.planning.groups import Devices, Setting

_StageTable = Callable[[Estimator, Sequence[int], Devices, Devices], np.ndarray]
"""(estimator, cuts, a stage's devices, the device after them) → seconds from each cut to each later one."""


def thin_cuts(costs: Costs, cuts: Sequence[int], most: int) -> tuple[int, ...]:
    """At most so many cuts: the compute is divided evenly, and each piece keeps its cut with the least to carry."""
    if len(cuts) <= most:
        return tuple(cuts)
    sums = costs.row_sums(float(costs.profile.batch_sizes[-1]))
    passed = [sums.forward[cut] + sums.backward[cut] for cut in cuts]
    kept = {cuts[0], cuts[-1]}
    pieces: dict[int, list[int]] = {}
    for cut, seconds in zip(cuts[1:-1], passed[1:-1]):
        share = seconds / passed[-1] if passed[-1] > 0 else cut / cuts[-1]
        pieces.setdefault(min(int(share * (most - 2)), most - 3), []).append(cut)
    kept.update(min(piece, key=lambda cut: (costs.crossings[cut], cut)) for piece in pieces.values())
    return tuple(sorted(kept))


def balanced(
    estimator: Estimator, cuts: Sequence[int], order: Devices, sizes: Sequence[int], priced: _StageTable
) -> list[Candidate]:
    """For each number of stages the plan whose slowest stage is fastest, on neighbours in the order."""
    count, points = len(order), len(cuts)
    tables = _stage_tables(estimator, cuts, order, sizes, priced)
    best = np.full((count + 1, points), np.inf)
    best[:, points - 1] = 0.0
    found: list[Candidate] = []
    ways: list[np.ndarray] = []
    for _ in range(min(12, count, points - 1)):
        best, way = _one_more(best, tables)
        ways.append(way)
        used = int(np.argmin(best[:, 0]))
        if np.isfinite(best[used, 0]):
            found.append(_trace(ways, used, cuts, order, estimator.setting))
    return found


def _one_more(best: np.ndarray, tables: Mapping[tuple[int, int], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The best with one stage more in front, and how: by (devices used, cut) replicas · points + next cut."""
    points = best.shape[1]
    fresh, way = np.full_like(best, np.inf), np.zeros(best.shape, dtype=int)
    starts, total = np.arange(points) * points, np.empty((points, points))
    possible = np.isfinite(best).any(axis=1)
    for (stop, size), table in tables.items():
        used = len(best) - 1 - stop
        if possible[used]:
            np.maximum(table, best[used], out=total)
            place = total.argmin(axis=1)
            seconds = total.take(starts + place)
            better = seconds < fresh[used + size]
            np.copyto(fresh[used + size], seconds, where=better)
            np.copyto(way[used + size], size * points + place, where=better)
    return fresh, way


def _trace(ways: Sequence[np.ndarray], used: int, cuts: Sequence[int], order: Devices, setting: Setting) -> Candidate:
    edges, groups, cut = [0], [], 0
    for way in reversed(ways):
        size, cut = divmod(int(way[used, cut]), len(cuts))
        first = len(order) - used
        groups.append(tuple(sorted(order[first : first + size])))
        edges.append(cuts[cut])
        used -= size
    return Candidate(tuple(edges), tuple(groups), setting)


def _stage_tables(
    estimator: Estimator, cuts: Sequence[int], order: Devices, sizes: Sequence[int], priced: _StageTable
) -> dict[tuple[int, int], np.ndarray]:
    """The table of each run of devices, by where it ends and its size; runs that are wired alike share one."""
    lowest = estimator.shared.lowest
    known: dict[tuple[Devices, Devices], np.ndarray] = {}
    tables: dict[tuple[int, int], np.ndarray] = {}
    for stop in range(1, len(order) + 1):
        for size in sizes:
            if size <= stop:
                devices, after = tuple(sorted(order[stop - size : stop])), order[stop : stop + 1]
                key = (lowest(devices), lowest(after))
                if key not in known:
                    known[key] = priced(estimator, cuts, devices, after)
                tables[stop, size] = known[key]
    return tables


def stage_table(estimator: Estimator, cuts: Sequence[int], devices: Devices, after: Devices) -> np.ndarray:
    """Seconds a batch of a stage from each cut to each later one on some devices; infinite where there is no stage."""
    costs, setting, group = estimator.costs, estimator.setting, estimator.group(devices)
    forward, backward = np.zeros((len(cuts),) * 2), np.zeros((len(cuts),) * 2)
    for rows, _, _, speed in group.kinds:
        sums = costs.row_sums(rows, group.handled)
        forward = np.maximum(forward, _between(np.array([sums.forward[cut] for cut in cuts])) / speed)
        backward = np.maximum(backward, _between(np.array([sums.backward[cut] for cut in cuts])) / speed)
    seconds = group.handled.microbatches * (forward + backward)
    weights = _between(np.array([costs.gradient_bytes(0, cut) for cut in cuts], dtype=float))
    if len(devices) > 1:
        reduction = weights * costs.reduce_s(2**30, estimator.shared.lowest(devices), 64) / 2**30
        exposed = np.maximum(0.0, reduction - 0.7 * backward)  # behind so much of backward it is taken to hide
        seconds = seconds + exposed if setting.staleness == "0" else np.maximum(seconds, reduction)
    if after:
        crossing = np.array([estimator.crossing(cut, devices, after).all_s for cut in cuts]) / 2
        seconds = np.maximum(seconds, crossing[None, :])
    return np.where(_is_stage(len(cuts)), seconds, np.inf)


def pipedream_table(estimator: Estimator, cuts: Sequence[int], devices: Devices, after: Devices) -> np.ndarray:
    """The same with PipeDream's prices (see benchmarks/pipedream.py), at the rate of the slowest wire."""
    costs, replicas = estimator.costs, len(devices)
    batch, rate = float(estimator.setting.batch), min(costs.network.rates, default=float("inf"))
    sums = costs.row_sums(batch)
    compute = np.array([sums.forward[cut] + sums.backward[cut] for cut in cuts])
    weights = np.array([costs.gradient_bytes(0, cut) for cut in cuts], dtype=float)
    seconds = (_between(compute) + 4 * (replicas - 1) / replicas * _between(weights) / rate) / replicas
    crossing = 2 * batch * np.array([costs.crossings[cut] for cut in cuts]) / (rate * replicas)
    crossing[0] = crossing[-1] = 0.0
    seconds[1:] = np.maximum(seconds[1:], np.maximum(crossing[1:, None], crossing[None, :]))
    return np.where(_is_stage(len(cuts)), seconds, np.inf)


@cache
def _is_stage(points: int) -> np.ndarray:
    """Whether a stage can begin at one cut and end at another."""
    return np.tri(points, k=-1, dtype=bool).T


def _between(sums: np.ndarray) -> np.ndarray:
    return np.asarray(sums[None, :] - sums[:, None])
