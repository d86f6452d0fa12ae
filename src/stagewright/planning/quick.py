"""Good plans for many layers and devices: a balanced split first, then small changes for as long as they help.

Neither step is exact. The first ignores fill, drain and memory, so that whole tables are added at once:

    best[stages, devices, cut] = min over the next cut and its replicas of max(this stage, best[stages − 1, …])

The second asks the estimate itself, so a plan that it returns is priced as exactly as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from stagewright.cluster import DeviceId
from stagewright.cost import Costs
from stagewright.planning.estimate import Crossing, Estimator, Label
from stagewright.planning.exact import Leaders, Placed, Shape
from stagewright.planning.groups import Setting, Twins
from stagewright.planning.spaces import Devices

_MAX_STAGES = 12
_HIDDEN_SHARE = 0.7
"""The share of backward behind which a reduction is taken to hide, while balancing."""
_MAX_ROUNDS = 60

_Estimators = Callable[[Setting], Estimator]
_StageTable = Callable[[Estimator, Sequence[int], Devices, Devices], np.ndarray]
"""(estimator, cuts, a stage's devices, the device after them) → seconds from each cut to each later one."""


class Candidate(NamedTuple):
    """Cuts, the devices between them, and a setting."""

    edges: tuple[int, ...]
    groups: tuple[Devices, ...]
    setting: Setting

    @property
    def shape(self) -> Shape:
        """Where it is cut and how many replicas each stage has."""
        return tuple((first, len(devices)) for first, devices in zip(self.edges, self.groups))


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
    for _ in range(min(_MAX_STAGES, count, points - 1)):
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
    twins = estimator.twins
    known: dict[tuple[Devices, Devices], np.ndarray] = {}
    tables: dict[tuple[int, int], np.ndarray] = {}
    for stop in range(1, len(order) + 1):
        for size in sizes:
            if size <= stop:
                devices, after = tuple(sorted(order[stop - size : stop])), order[stop : stop + 1]
                key = (twins.lowest(devices), twins.lowest(after))
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
        reduction = weights * costs.reduce_s(2**30, estimator.twins.lowest(devices), 64) / 2**30
        exposed = np.maximum(0.0, reduction - _HIDDEN_SHARE * backward)
        seconds = seconds + exposed if setting.staleness == "0" else np.maximum(seconds, reduction)
    if after:
        crossing = np.array([estimator.crossing(cut, devices, after).all_s for cut in cuts]) / 2
        seconds = np.maximum(seconds, crossing[None, :])
    return np.where(_is_stage(len(cuts)), seconds, np.inf)


def pipedream_table(estimator: Estimator, cuts: Sequence[int], devices: Devices, after: Devices) -> np.ndarray:
    """The same with PipeDream's prices (see planning/pipedream.py), at the rate of the slowest wire."""
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


class _Tail(NamedTuple):
    """The last stages of a candidate, priced."""

    label: Label
    stages: tuple[Placed, ...]
    replicas: int
    step_s: float
    """What a step of these stages would take."""
    most_s: float
    """The largest `step_s` of these stages and of fewer of them."""


_NO_CROSSING = Crossing(0.0, 0.0)
_NO_STAGES = _Tail(Label(), (), 0, 0.0, 0.0)


def _tails(candidate: Candidate, estimator: Estimator, tail: _Tail = _NO_STAGES) -> Iterator[_Tail]:
    """A candidate's stages priced after those of a tail, one more at a time; it ends before one that does not fit."""
    for number in reversed(range(len(candidate.groups) - len(tail.stages))):
        first, last, devices = candidate.edges[number], candidate.edges[number + 1], candidate.groups[number]
        later = len(tail.stages)
        part = estimator.part(first, last, devices, later, tail.replicas)
        if part is None:
            return
        between = estimator.crossing(last, devices, tail.stages[0].devices) if later else _NO_CROSSING
        label = estimator.extend(tail.label, between, part)
        stages = (Placed(first, last, devices, part.recompute), *tail.stages)
        step_s = estimator.total(label, later + 1)
        tail = _Tail(label, stages, tail.replicas + len(devices), step_s, max(tail.most_s, step_s))
        yield tail


def price(
    candidate: Candidate, estimator: Estimator, below: float = float("inf"), known: _Tail = _NO_STAGES
) -> tuple[float, tuple[Placed, ...]] | None:
    """The estimate of a candidate whose last stages may be known; None where it does not fit, or is not below."""
    if known.most_s >= below:
        return None
    tail = known
    for tail in _tails(candidate, estimator, known):
        if tail.step_s >= below:
            return None
    return (tail.step_s, tail.stages) if len(tail.stages) == len(candidate.groups) else None


def _shared_tail(other: Candidate, here: Candidate, priced: Sequence[_Tail]) -> _Tail:
    """The longest tail of a candidate that another one has as well."""
    found = _NO_STAGES
    for same, tail in enumerate(priced if other.setting is here.setting else (), start=1):
        if same > len(other.groups) or other.groups[-same] != here.groups[-same]:
            break
        if other.edges[-1 - same] != here.edges[-1 - same]:
            break
        found = tail
    return found


def improve(
    start: Candidate, estimators: _Estimators, cuts: Sequence[int], settings: Sequence[Setting], leaders: Leaders
) -> None:
    """Changes a candidate little by little while the estimate falls, and offers every step to the leaders."""
    here = start
    priced = price(here, estimators(here.setting))
    now = priced[0] if priced else float("inf")
    if priced:
        leaders.offer(*priced, estimators(here.setting))
    for _ in range(_MAX_ROUNDS):
        best: Candidate | None = None
        known = tuple(_tails(here, estimators(here.setting)))
        same = (setting for setting in settings if setting.staleness == here.setting.staleness)
        for other in _neighbours(here, cuts, same):
            estimator = estimators(other.setting)
            leaders.looked_at += 1
            found = price(other, estimator, now * (1 - 1e-9), _shared_tail(other, here, known))
            if found is not None:
                leaders.offer(*found, estimator)
                now, best = found[0], other
        if best is None:
            return
        here = best


def _neighbours(here: Candidate, cuts: Sequence[int], settings: Iterable[Setting]) -> Iterator[Candidate]:
    """The candidate with one thing changed: a cut, a device's stage, two stages joined, the setting."""
    yield from moved_cuts(here, cuts)
    yield from moved_devices(here)
    yield from joined(here)
    yield from (here._replace(setting=setting) for setting in settings if setting != here.setting)


def slide(here: Candidate, estimator: Estimator, cuts: Sequence[int], leaders: Leaders) -> None:
    """Tries every place of every cut between its neighbours, one cut after the other, while the estimate falls."""
    known = tuple(_tails(here, estimator))
    now = known[-1].step_s if len(known) == len(here.groups) else float("inf")
    before = float("inf")
    while now < before:
        before = now
        for number in range(1, len(here.edges) - 1):
            for cut in cuts:
                if here.edges[number - 1] < cut < here.edges[number + 1]:
                    other = here._replace(edges=(*here.edges[:number], cut, *here.edges[number + 1 :]))
                    leaders.looked_at += 1
                    found = price(other, estimator, now * (1 - 1e-9), _shared_tail(other, here, known))
                    if found is not None:
                        now, here, known = found[0], other, tuple(_tails(other, estimator))
                        leaders.offer(*found, estimator)


def moved_cuts(here: Candidate, cuts: Sequence[int], together: int = 1) -> Iterator[Candidate]:
    """With one cut, or so many beside one another, a few places earlier or later."""
    place = {cut: number for number, cut in enumerate(cuts)}
    for number in range(1, len(here.edges) - together):
        some = [place.get(edge) for edge in here.edges[number : number + together]]
        for move in (-8, -3, -1, 1, 3, 8) if None not in some else ():
            moved = [at + move for at in some if at is not None]
            if moved[0] > 0 and moved[-1] < len(cuts) - 1:
                fresh = (cuts[at] for at in moved)
                edges = (*here.edges[:number], *fresh, *here.edges[number + together :])
                if all(low < high for low, high in pairwise(edges)):
                    yield here._replace(edges=edges)


def moved_devices(here: Candidate) -> Iterator[Candidate]:
    """With some devices of one stage in the next, or the other way."""
    for number in range(len(here.groups) - 1):
        left, right = here.groups[number], here.groups[number + 1]
        pairs = []
        for few in (1, 2, 4, 8):
            if len(left) > few:
                pairs.append((left[:-few], (*left[-few:], *right)))
            if len(right) > few:
                pairs.append(((*left, *right[:few]), right[few:]))
        for pair in pairs:
            tidy = tuple(tuple(sorted(group)) for group in pair)
            yield here._replace(groups=(*here.groups[:number], *tidy, *here.groups[number + 2 :]))


def swapped_devices(here: Candidate, devices: Devices, twins: Twins) -> Iterator[Candidate]:
    """With two devices that differ in one another's place, or one that does nothing in one's place, or beside it."""
    idle = tuple(sorted(set(devices) - {id for group in here.groups for id in group}))
    places = [*enumerate(here.groups), (-1, idle)]
    for (left, ours), (right, theirs) in combinations(places, 2):
        for one in {twins.of[id]: id for id in ours}.values():
            if right < 0 and len(ours) > 1:
                yield _regrouped(here, {left: {*ours} - {one}})
            for other in {twins.of[id]: id for id in theirs}.values():
                if twins.of[one] != twins.of[other]:
                    yield _regrouped(here, {left: {*ours, other} - {one}, right: {*theirs, one} - {other}})
        if right < 0:
            for other in {twins.of[id]: id for id in theirs}.values():
                yield _regrouped(here, {left: {*ours, other}})


def _regrouped(here: Candidate, groups: Mapping[int, set[DeviceId]]) -> Candidate:
    fresh = (tuple(sorted(groups.get(number, group))) for number, group in enumerate(here.groups))
    return here._replace(groups=tuple(fresh))


def joined(here: Candidate) -> Iterator[Candidate]:
    """With two stages as one."""
    for number in range(len(here.groups) - 1):
        joined = tuple(sorted((*here.groups[number], *here.groups[number + 1])))
        groups = (*here.groups[:number], joined, *here.groups[number + 2 :])
        yield Candidate((*here.edges[: number + 1], *here.edges[number + 2 :]), groups, here.setting)
