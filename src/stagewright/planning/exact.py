"""Plans to be, what the estimate says of them, and the optimum of the estimate over cuts and groups of devices.

    table[cut] = for (devices used, group in front, stages so far) the tails that none other beats in every field

Tails grow from the last stage to the first. One is dropped only where another's label is no worse in every field, or
where it already takes longer than a whole plan: so what is found at cut 0 is the optimum of the space. Plans of up to
three stages that are a little slower come along, for whoever looks closer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from stagewright.cluster import DeviceId, Devices
from stagewright.cost import Costs
from stagewright.planning.estimate import Estimator, Label
from stagewright.planning.groups import Savings, Setting, find_twins

_Shape = tuple[tuple[int, int], ...]


class Candidate(NamedTuple):
    """Cuts, the devices between them, and a setting."""

    edges: tuple[int, ...]
    groups: tuple[Devices, ...]
    setting: Setting

    @property
    def shape(self) -> _Shape:
        """Where it is cut and how many replicas each stage has."""
        return tuple((first, len(devices)) for first, devices in zip(self.edges, self.groups))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many replicas each stage has."""
        return tuple(map(len, self.groups))


class Found(NamedTuple):
    """What the estimate says of a candidate, and which stages recompute or share out states."""

    step_s: float
    candidate: Candidate
    savings: tuple[Savings, ...]

    @property
    def rank(self) -> tuple[object, ...]:
        """The fastest first, then those of few stages; the rest makes the order one and the same in every run."""
        edges, groups, _ = self.candidate
        return self.step_s, len(groups), tuple(zip(edges, edges[1:], groups, self.savings))


@dataclass
class Leaders:
    """The best plans so far, and how many were looked at."""

    most: int = 8
    sizes: int = 3
    """Of how many sizes of groups the best plans are kept, for each number of stages up to four."""
    looked_at: int = 0
    found: list[Found] = field(default_factory=list)
    shallow: dict[int, list[Found]] = field(default_factory=dict)
    """By number of stages the best plans, even where they are not among the best of all."""

    @property
    def bound(self) -> float:
        """What the best plan takes."""
        return self.found[0].step_s if self.found else float("inf")

    @property
    def to_score(self) -> list[Found]:
        """Those that are worth a simulation: the best of all, and of few stages the best of some sizes of groups.

        The estimate may hold a dozen cuts of one deep pipeline for a little faster than all that has two stages, and of
        two stages three cuts of 2-1 for a little faster than 3-1, where a simulation knows better.
        """
        shallow = (entry for _, found in sorted(self.shallow.items()) for entry in found)
        return [*self.found, *(entry for entry in shallow if entry not in self.found)]

    def limit_s(self, shape: _Shape) -> float:
        """What a plan of this shape must be faster than to be kept."""
        known = [each.step_s for each in self.found if each.candidate.shape == shape]
        last = self.found[-1].step_s if len(self.found) >= self.most else float("inf")
        return min(known[0], last) if known else last

    def offer(self, fresh: Found) -> None:
        """Keeps a plan if it is among the best; of plans with equal shape only the best."""
        num_stages = len(fresh.candidate.groups)
        if num_stages <= 4:
            _keep(self.shallow.setdefault(num_stages, []), self.sizes, fresh, lambda found: found.candidate.sizes)
        _keep(self.found, self.most, fresh, lambda found: found.candidate.shape)


def _keep(found: list[Found], most: int, fresh: Found, kind_of: Callable[[Found], object]) -> None:
    """Adds a plan to the best, of which there are at most so many, the fastest first; of each kind one alone."""
    if len(found) >= most and fresh.step_s >= found[-1].step_s:
        return
    kind = kind_of(fresh)
    for place, known in enumerate(found):
        if kind_of(known) == kind:
            if known.step_s <= fresh.step_s:
                return
            del found[place]
            break
    found.append(fresh)
    found.sort(key=lambda entry: entry.rank)
    del found[most:]


class _Tail(NamedTuple):
    """The last stages of a plan, priced."""

    label: Label = Label()
    firsts: tuple[int, ...] = ()
    groups: tuple[Devices, ...] = ()
    savings: tuple[Savings, ...] = ()
    replicas: int = 0
    step_s: float = 0.0
    """What a step of these stages would take."""


_NO_STAGES = _Tail()


def _longer(tail: _Tail, first: int, last: int, devices: Devices, estimator: Estimator) -> _Tail | None:
    """The tail with one stage more in front; None where that does not fit."""
    label, firsts, groups, savings, replicas, _ = tail
    later = len(groups)
    part = estimator.part(first, last, devices, later, replicas)
    if part is None:
        return None
    between = estimator.crossing(last, devices, groups[0] if later else ())
    label = estimator.extend(label, between, part)
    step_s, replicas = estimator.total(label, later + 1), replicas + len(devices)
    return _Tail(label, (first, *firsts), (devices, *groups), (part.savings, *savings), replicas, step_s)


def price(candidate: Candidate, estimator: Estimator, below: float = float("inf")) -> Found | None:
    """The estimate of a candidate, from its last stage on; None where it does not fit, or is not below."""
    edges, groups, _ = candidate
    tail = _NO_STAGES
    for number in reversed(range(len(groups))):
        found = _longer(tail, edges[number], edges[number + 1], groups[number], estimator)
        if found is None or found.step_s >= below:
            return None
        tail = found
    return Found(tail.step_s, candidate, tail.savings)


class Space(NamedTuple):
    """Ways to hand out devices to stages, from the last stage to the first.

    What is used is a set of devices, or how many from the end; at first nothing is.
    """

    start: Any
    groups: Callable[[Any], Iterator[tuple[Devices, Any]]]
    """The devices that the stage in front may have, each with what is used then."""
    is_done: Callable[[Any], bool] = lambda used: True


def subsets(costs: Costs, devices: Devices) -> Space:
    """Any devices for any stage, and some for none; of devices that are wired alike, the lowest-numbered first."""
    # only neighbours count as alike: others would change the order of a group, and so who sends rows to whom
    twins, families = find_twins(costs), list[list[DeviceId]]()
    for id in devices:
        if families and twins[families[-1][-1]] == twins[id]:
            families[-1].append(id)
        else:
            families.append([id])

    def groups(used: frozenset[DeviceId]) -> Iterator[tuple[Devices, frozenset[DeviceId]]]:
        free = [[id for id in family if id not in used] for family in families]
        for counts in product(*(range(len(family) + 1) for family in free)):
            chosen = [id for family, count in zip(free, counts) for id in family[:count]]
            if chosen:
                yield tuple(sorted(chosen)), used | frozenset(chosen)

    return Space(frozenset(), groups)


def runs(order: Devices, sizes: Sequence[int]) -> Space:
    """Neighbours in an order of the devices."""

    def groups(used: int) -> Iterator[tuple[Devices, int]]:
        stop = len(order) - used
        yield from ((tuple(sorted(order[stop - size : stop])), used + size) for size in sizes if size <= stop)

    return Space(0, groups)


def given(stages: Sequence[Devices]) -> Space:
    """The devices of a placement, stage by stage."""

    def groups(used: int) -> Iterator[tuple[Devices, int]]:
        yield from ((stages[-1 - used], used + 1) for _ in stages[used : used + 1])

    return Space(0, groups, lambda used: used == len(stages))


_PLAIN_SLACK = 1.15
"""Up to three stages a plan counts even where it is estimated to take so many times as long as the best."""

_Key = tuple[Hashable, Devices, int]
"""The devices used, the group in front, the number of stages."""


def search_exactly(
    estimator: Estimator, cuts: Sequence[int], space: Space, leaders: Leaders, *, every_cut: bool = False
) -> None:
    """Offers the leaders every plan of the space that could lead; with `every_cut` all cuts must be made.

    `cuts` are where a stage may begin or end, from 0 to the number of layers.
    """
    table: dict[int, dict[_Key, list[_Tail]]] = {cut: {} for cut in cuts}
    table[cuts[-1]][space.start, (), 0] = [_NO_STAGES]
    for place in range(len(cuts) - 1, 0, -1):
        last, firsts = cuts[place], cuts[place - 1 : place] if every_cut else cuts[:place]
        for (used, _, later), known in table[last].items():
            for tail, (devices, then_used) in product(known, space.groups(used)):
                for grown in _grown(estimator, tail, last, devices, firsts, leaders):
                    if grown.firsts[0]:
                        _add(table[grown.firsts[0]].setdefault((then_used, devices, later + 1), []), grown)
                    elif space.is_done(then_used):
                        candidate = Candidate((*grown.firsts, cuts[-1]), grown.groups, estimator.setting)
                        leaders.looked_at += 1
                        leaders.offer(Found(grown.step_s, candidate, grown.savings))
        table[last].clear()


def _grown(
    estimator: Estimator, tail: _Tail, last: int, devices: Devices, firsts: Sequence[int], leaders: Leaders
) -> Iterator[_Tail]:
    """A tail with a stage more in front on these devices, for each place where that may begin and could still lead."""
    slack = _PLAIN_SLACK if len(tail.groups) < 3 else 1.0
    for first in reversed(firsts):
        found = _longer(tail, first, last, devices, estimator)
        if found is None:
            continue
        if found.step_s <= leaders.bound * slack:
            yield found
        elif len(devices) == 1:
            # A stage that begins even earlier takes longer still. With a reduction it may not: more bytes make more
            # buckets, which may overlap better.
            return


def _add(known: list[_Tail], fresh: _Tail) -> None:
    """Keeps a tail unless another is no worse in every field, and drops those that it makes needless."""
    if not any(all(old <= new for old, new in zip(each.label, fresh.label)) for each in known):
        known[:] = [each for each in known if not all(new <= old for new, old in zip(fresh.label, each.label))]
        known.append(fresh)
