"""Where to look for plans: on few devices and layers everywhere, else at balanced plans and around them.

A balanced plan is one whose slowest stage is as fast as can be, by whole tables at once; fill, drain and memory are
left out:

    best[stages, devices, cut] = min over the next cut and its replicas of max(this stage, best[stages − 1, …])

Where memory is so short that none of these fits, one begins at the plan whose fullest device is least full:

    full[stage, cut] = min over the next cut of max(this stage's share of its device's memory, full[stage + 1, that])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from stagewright.cluster import DeviceId, Devices
from stagewright.cost import Costs
from stagewright.planning.estimate import Estimator, Shortage
from stagewright.planning.exact import Candidate, Leaders, Space, given, runs, search_exactly, subsets
from stagewright.planning.groups import Setting
from stagewright.planning.problem import Problem


def explore(problem: Problem) -> tuple[Leaders, Leaders]:
    """The plans that the estimate favours, and those of plain data parallelism.

    On few devices and layers the best of all count, else balanced plans, improved.
    """
    leaders, rivals = Leaders(most=12), Leaders(most=1)
    costs, devices = problem.costs, problem.devices
    for setting in problem.plain_settings():  # one stage on every device, trained exactly
        whole = (0, len(costs.profile.layers))
        search_exactly(problem.estimator(setting), whole, given((devices,)), rivals)
    # Up to here every cut and every group of devices is looked at; where a placement gives the devices, 64 cuts.
    small = len(devices) <= 6 and len(problem.cuts) - 1 <= 12
    spaces: list[Space] = [subsets(costs, devices)]
    if problem.is_free:
        for entry in rivals.found:
            leaders.offer(entry)
        _search_quickly(problem, leaders)
        if not leaders.found and (least := least_full(problem)).ratio <= 1:
            _improve(least.candidate, problem, leaders)
        spaces = spaces if small else []
    elif problem.groups is not None:
        spaces = [given(problem.groups)]
    elif not small:
        spaces = [runs(order, _group_sizes(len(devices))) for order in _device_orders(costs, devices)]
    cuts = problem.cuts if problem.every_cut else _thin_cuts(costs, problem.cuts, 64)
    for setting, space in product(problem.settings(weighed=True), spaces):
        search_exactly(problem.estimator(setting), cuts, space, leaders, every_cut=problem.every_cut)
    return leaders, rivals


def _search_quickly(problem: Problem, leaders: Leaders) -> None:
    """Balanced plans in each setting; of each number of stages the best two, of which the best five are improved."""
    starts: dict[int, Leaders] = {}
    for start in _balanced_starts(problem):
        best = starts.setdefault(len(start.groups), Leaders(most=2))
        for setting in problem.settings():
            if setting.staleness == start.setting.staleness:
                best.looked_at += 1
                found = problem.price(start._replace(setting=setting), best.limit_s(start.shape))
                if found is not None:
                    best.offer(found)
    leaders.looked_at += sum(each.looked_at for each in starts.values())
    entries = sorted((entry for each in starts.values() for entry in each.found), key=lambda entry: entry.rank)
    for entry in entries:
        leaders.offer(entry)
    for entry in entries[:5]:
        _improve(entry.candidate, problem, leaders)
    for entry in leaders.found[:3]:
        _slide(entry.candidate, problem, problem.cuts, leaders)
    cuts = _thin_cuts(problem.costs, problem.cuts, 40)
    for here, setting in product([entry.candidate for entry in leaders.found[:3]], problem.settings()):
        # A cut and a number of microbatches may be better together, though neither is alone.
        other, is_other = here._replace(setting=setting), setting != here.setting
        is_other = is_other and setting.staleness == here.setting.staleness
        if is_other and problem.price(other, 1.12 * leaders.bound) is not None:
            _slide(other, problem, cuts, leaders)
    # Devices are exchanged, or left out, once nothing else helps; only the best three count, or they would crowd.
    apart = Leaders(most=3)
    for entry in leaders.found[:3]:
        _improve(entry.candidate, problem, apart, swaps=True)
    leaders.looked_at += apart.looked_at
    for entry in apart.found:
        leaders.offer(entry)


def _balanced_starts(problem: Problem) -> Iterator[Candidate]:
    """Plans that are balanced with few and with many microbatches, on devices in each good order.

    Then those that PipeDream's prices favour, so that none of ours is predicted to be slower than they are.
    """
    costs, counts, route = problem.costs, problem.counts, problem.routes[0]
    orders, sizes = _device_orders(costs, problem.devices), _group_sizes(len(problem.devices))
    few = sorted({counts[0], counts[len(counts) // 2]})
    for table, most, tried, among in ((_stage_table, 40, few, orders), (_pipedream_table, 256, counts[:1], orders[:1])):
        cuts = _thin_cuts(costs, problem.cuts, most)
        for staleness, count, order in product(problem.stalenesses, tried, among):
            estimator = problem.estimator(problem.setting(count, route, staleness))
            yield from _balanced(estimator, cuts, order, sizes, table)


def _improve(here: Candidate, problem: Problem, leaders: Leaders, *, swaps: bool = False) -> None:
    """Changes a candidate little by little while the estimate falls, and offers every step to the leaders."""
    now = _offer(here, problem, leaders, float("inf"))
    for _ in range(60):
        best: Candidate | None = None
        settings = (setting for setting in problem.settings() if setting.staleness == here.setting.staleness)
        for other in problem.around(here, settings, swaps=swaps):
            step_s = _offer(other, problem, leaders, now)
            if step_s < now:
                now, best = step_s, other
        if best is None:
            return
        here = best


def _offer(candidate: Candidate, problem: Problem, leaders: Leaders, now: float) -> float:
    """Offers a candidate that is faster than now; what it takes then, else what it took."""
    leaders.looked_at += 1
    found = problem.price(candidate, now * (1 - 1e-9))
    if found is None:
        return now
    leaders.offer(found)
    return found.step_s


def _slide(here: Candidate, problem: Problem, cuts: Sequence[int], leaders: Leaders) -> None:
    """Tries every place of every cut between its neighbours, one cut after the other, while the estimate falls."""
    found = problem.price(here)
    now, before = found.step_s if found is not None else float("inf"), float("inf")
    while now < before:
        before = now
        for number in range(1, len(here.edges) - 1):
            for cut in cuts:
                if here.edges[number - 1] < cut < here.edges[number + 1]:
                    other = here._replace(edges=(*here.edges[:number], cut, *here.edges[number + 1 :]))
                    step_s = _offer(other, problem, leaders, now)
                    if step_s < now:
                        now, here = step_s, other


class _Fullness(NamedTuple):
    """A plan's stages, and how many times the fullest device would have to have its memory."""

    ratio: float
    stages: tuple[Shortage, ...] = ()
    groups: tuple[Devices, ...] = ()
    setting: Setting | None = None

    @property
    def candidate(self) -> Candidate:
        assert self.setting is not None
        return Candidate((*(each.first for each in self.stages), self.stages[-1].last), self.groups, self.setting)


def least_full(problem: Problem, groups: Sequence[Devices] = ()) -> _Fullness:
    """The plan whose fullest device is least full, over microbatches, cuts, and devices, if not given as `groups`."""
    best = _Fullness(float("inf"))
    orders = [tuple(groups)] if groups else _orders(problem)
    for staleness, count, order in product(problem.stalenesses, problem.counts, orders):
        estimator = problem.estimator(problem.setting(count, problem.routes[0], staleness))
        found = _filled(estimator, problem.cuts, order, best.ratio, every_cut=problem.every_cut)
        best = min(best, found, key=lambda each: each.ratio)
    return best


def _orders(problem: Problem) -> list[tuple[Devices, ...]]:
    """The devices as stages of one each, the largest or the smallest first; or as a placement gives them."""
    if problem.groups is not None:
        return [problem.groups]
    cluster, num_stages = problem.costs.cluster, len(problem.cuts) - 1
    large = sorted(cluster.device_ids, key=lambda id: -cluster.device(id).memory_bytes)[:num_stages]
    # an embedding and a head are larger than what is between them
    orders = (large, large[::-1], [*large[::2], *large[1::2][::-1]])
    return list(dict.fromkeys(tuple((id,) for id in order) for order in orders))


def _filled(
    estimator: Estimator, cuts: Sequence[int], groups: Sequence[Devices], most: float, *, every_cut: bool
) -> _Fullness:
    """The best cuts for some groups of devices, from the last stage to the first, as far as less full than `most`."""
    nothing, end = _Fullness(most), len(cuts) - 1
    rest = {end: _Fullness(0.0, setting=estimator.setting)}
    for number in reversed(range(len(groups))):
        fresh: dict[int, _Fullness] = {}
        for first in range(number, end) if number else (0,):
            best = nothing
            for last in sorted(each for each in rest if (each == first + 1 if every_cut else each > first)):
                if rest[last].ratio >= best.ratio:
                    continue
                use = _use(estimator, cuts[first], cuts[last], groups[number], groups[number + 1 :])
                if use is None or use.ratio >= best.ratio:
                    break  # with one layer more it is fuller still
                after = rest[last]
                ratio, stages = max(use.ratio, after.ratio), (use, *after.stages)
                best = _Fullness(ratio, stages, (groups[number], *after.groups), estimator.setting)
            if best is not nothing:
                fresh[first] = best
        rest = fresh
    return rest.get(0, nothing)


def _use(estimator: Estimator, first: int, last: int, devices: Devices, after: Sequence[Devices]) -> Shortage | None:
    """What a stage needs on its fullest device with whatever saves most; None where it may not hold so much."""
    setting, later = estimator.setting, len(after)
    versions, held = setting.versions(later), setting.held(later, len(devices), sum(map(len, after)))
    if versions is None or (setting.hold is not None and held > setting.hold):
        return None
    uses = (estimator.use(first, last, devices, held, versions, each) for each in estimator.savings(devices))
    return min(uses, key=lambda use: use.need_bytes)


def _device_orders(costs: Costs, devices: Sequence[DeviceId]) -> tuple[Devices, ...]:
    """Good orders for `runs`: along the wires; and, where speeds or memories differ, by these."""
    along = costs.network.ring_order(tuple(devices)) if len(devices) <= 16 else tuple(devices)
    kind = {id: costs.cluster.device(id) for id in devices}
    orders = [
        along, tuple(sorted(along, key=lambda id: -kind[id].speed)),
        tuple(sorted(along, key=lambda id: kind[id].speed)),
        tuple(sorted(along, key=lambda id: -kind[id].memory_bytes)),
        tuple(sorted(along, key=lambda id: kind[id].memory_bytes)),
    ]  # fmt: skip
    return tuple(dict.fromkeys(orders))


def _group_sizes(num_devices: int, most: int = 24) -> tuple[int, ...]:
    """Every size; of many devices only some: all small ones, then steps of an eighth, and their complements."""
    if num_devices <= most:
        return tuple(range(1, num_devices + 1))
    step = max(1, num_devices // 8)
    sizes = {*range(1, 9), *range(step, num_devices + 1, step), *(num_devices - few for few in (0, 1, 2, 4, 8))}
    return tuple(sorted(size for size in sizes if size > 0))


_StageTable = Callable[[Estimator, Sequence[int], Devices, Devices], np.ndarray]
"""(estimator, cuts, a stage's devices, the device after them) → seconds from each cut to each later one."""


def _thin_cuts(costs: Costs, cuts: Sequence[int], most: int) -> tuple[int, ...]:
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


def _balanced(
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


def _stage_table(estimator: Estimator, cuts: Sequence[int], devices: Devices, after: Devices) -> np.ndarray:
    """Seconds a batch of a stage from each cut to each later one on some devices; infinite where there is no stage."""
    costs, setting, group = estimator.costs, estimator.setting, estimator.group(devices)
    forward, backward = np.zeros((len(cuts),) * 2), np.zeros((len(cuts),) * 2)
    for rows, _, device, speed in group.kinds:
        own = costs.on(device)
        sums, speed = own.row_sums(rows, group.handled), speed / own.own_speed
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


def _pipedream_table(estimator: Estimator, cuts: Sequence[int], devices: Devices, after: Devices) -> np.ndarray:
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
    return np.tri(points, k=-1, dtype=bool).T


def _between(sums: np.ndarray) -> np.ndarray:
    return np.asarray(sums[None, :] - sums[:, None])
