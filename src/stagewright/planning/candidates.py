"""Plans to be (cuts, the devices between them, a setting), what the estimate says of them, and what lies around."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import NamedTuple

from stagewright.cluster import DeviceId
from stagewright.planning.estimate import NO_CROSSING, Estimator, Label
from stagewright.planning.groups import Devices, Setting

Shape = tuple[tuple[int, int], ...]


class Candidate(NamedTuple):
    """Cuts, the devices between them, and a setting."""

    edges: tuple[int, ...]
    groups: tuple[Devices, ...]
    setting: Setting

    @property
    def shape(self) -> Shape:
        """Where it is cut and how many replicas each stage has."""
        return tuple((first, len(devices)) for first, devices in zip(self.edges, self.groups))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many replicas each stage has."""
        return tuple(map(len, self.groups))


class Found(NamedTuple):
    """What the estimate says of a candidate, and which stages recompute."""

    step_s: float
    candidate: Candidate
    recompute: tuple[bool, ...]

    @property
    def rank(self) -> tuple[object, ...]:
        """The fastest first, then those of few stages; the rest makes the order one and the same in every run."""
        edges, groups, _ = self.candidate
        return self.step_s, len(groups), tuple(zip(edges, edges[1:], groups, self.recompute))


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

    def limit_s(self, shape: Shape) -> float:
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


class Tail(NamedTuple):
    """The last stages of a plan, priced."""

    label: Label = Label()
    firsts: tuple[int, ...] = ()
    groups: tuple[Devices, ...] = ()
    recompute: tuple[bool, ...] = ()
    replicas: int = 0
    step_s: float = 0.0
    """What a step of these stages would take."""


NO_STAGES = Tail()


def longer(tail: Tail, first: int, last: int, devices: Devices, estimator: Estimator) -> Tail | None:
    """The tail with one stage more in front; None where that does not fit."""
    label, firsts, groups, recompute, replicas, _ = tail
    later = len(groups)
    part = estimator.part(first, last, devices, later, replicas)
    if part is None:
        return None
    between = estimator.crossing(last, devices, groups[0]) if later else NO_CROSSING
    label = estimator.extend(label, between, part)
    step_s, replicas = estimator.total(label, later + 1), replicas + len(devices)
    return Tail(label, (first, *firsts), (devices, *groups), (part.recompute, *recompute), replicas, step_s)


def price(candidate: Candidate, estimator: Estimator, below: float = float("inf")) -> Found | None:
    """The estimate of a candidate, from its last stage on; None where it does not fit, or is not below."""
    edges, groups, _ = candidate
    tail = NO_STAGES
    for number in reversed(range(len(groups))):
        found = longer(tail, edges[number], edges[number + 1], groups[number], estimator)
        if found is None or found.step_s >= below:
            return None
        tail = found
    return Found(tail.step_s, candidate, tail.recompute)


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


def swapped_devices(here: Candidate, devices: Devices, twins: Mapping[DeviceId, Devices]) -> Iterator[Candidate]:
    """With two devices that differ in one another's place, or one that does nothing in one's place, or beside it."""
    idle = tuple(sorted(set(devices) - {id for group in here.groups for id in group}))
    places = [*enumerate(here.groups), (-1, idle)]
    for (left, ours), (right, theirs) in combinations(places, 2):
        for one in {twins[id]: id for id in ours}.values():
            if right < 0 and len(ours) > 1:
                yield _regrouped(here, {left: {*ours} - {one}})
            for other in {twins[id]: id for id in theirs}.values():
                if twins[one] != twins[other]:
                    yield _regrouped(here, {left: {*ours, other} - {one}, right: {*theirs, one} - {other}})
        if right < 0:
            for other in {twins[id]: id for id in theirs}.values():
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
