"""The optimum of the estimate over cuts and groups of devices.

    table[cut] = for (devices used, group in front, stages so far) the labels that none other beats in every field

Labels grow from the last stage to the first. One is dropped only where another is no worse in every field, or where it
already takes longer than a whole plan: so what is found at cut 0 is the optimum of the space. Plans of up to three
stages that are a little slower come along, for whoever looks closer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stagewright.planning.estimate import Crossing, Estimator, Label, Part
from stagewright.planning.spaces import Devices, Space

Shape = tuple[tuple[int, int], ...]


class Placed(NamedTuple):
    """A stage: its layers, its devices, and whether it recomputes."""

    first: int
    last: int
    devices: Devices
    recompute: bool


Found = tuple[float, tuple[Placed, ...], Estimator]
"""What the estimate says of a plan, its stages, and who said it."""
_SHALLOW, SIZES = 4, 3
"""Up to so many stages the best plans of each number are kept, of so many sizes of groups."""
_PLAIN, PLAIN_SLACK = 3, 1.15
"""Up to so many stages a plan counts even where it is estimated to take so many times as long as the best."""


@dataclass
class Leaders:
    """The best plans so far, and how many were looked at."""

    most: int = 8
    looked_at: int = 0
    found: list[Found] = field(default_factory=list)
    shallow: dict[int, list[Found]] = field(default_factory=dict)
    """Of few stages the best plans of each number, even where they are not among the best of all."""

    @property
    def bound(self) -> float:
        """What the best plan takes."""
        return self.found[0][0] if self.found else float("inf")

    def limit_s(self, shape: Shape) -> float:
        """What a plan of this shape must be faster than to be kept."""
        known = [step_s for step_s, stages, _ in self.found if shape_of(stages) == shape]
        last = self.found[-1][0] if len(self.found) >= self.most else float("inf")
        return min(known[0], last) if known else last

    def offer(self, step_s: float, stages: tuple[Placed, ...], estimator: Estimator) -> None:
        """Keeps a plan if it is among the best; of plans with equal shape only the best."""
        fresh = (step_s, stages, estimator)
        if len(stages) <= _SHALLOW:
            _keep(self.shallow.setdefault(len(stages), []), SIZES, fresh, _sizes_of)
        _keep(self.found, self.most, fresh, shape_of)


def _keep(found: list[Found], most: int, fresh: Found, kind_of: Callable[[Sequence[Placed]], object]) -> None:
    """Adds a plan to the best, of which there are at most so many, the fastest first; of each kind one alone."""
    step_s, stages, _ = fresh
    if len(found) >= most and step_s >= found[-1][0]:
        return
    kind = kind_of(stages)
    for place, (known_s, known, _) in enumerate(found):
        if kind_of(known) == kind:
            if known_s <= step_s:
                return
            del found[place]
            break
    found.append(fresh)
    found.sort(key=lambda entry: (entry[0], len(entry[1]), entry[1]))
    del found[most:]


def shape_of(stages: Sequence[Placed]) -> Shape:
    """Where a plan is cut and how many replicas each stage has."""
    return tuple((stage.first, len(stage.devices)) for stage in stages)


def _sizes_of(stages: Sequence[Placed]) -> tuple[int, ...]:
    """How many replicas each stage has."""
    return tuple(len(stage.devices) for stage in stages)


class _Entry(NamedTuple):
    """Stages from a cut to the end."""

    label: Label
    used: Hashable
    stages: tuple[Placed, ...]
    replicas: int


_Key = tuple[Hashable, Devices, int]


def search_exactly(
    estimator: Estimator, cuts: Sequence[int], space: Space, leaders: Leaders, *, every_cut: bool = False
) -> None:
    """Offers the leaders every plan of the space that could lead; with `every_cut` all cuts must be made.

    `cuts` are where a stage may begin or end, from 0 to the number of layers.
    """
    start = _Entry(Label(), space.start, (), 0)
    table: dict[int, dict[_Key, list[_Entry]]] = {cut: {} for cut in cuts}
    table[cuts[-1]][space.start, (), 0] = [start]
    for place in range(len(cuts) - 1, 0, -1):
        firsts = cuts[place - 1 : place] if every_cut else cuts[:place]
        for entries in table[cuts[place]].values():
            for entry in entries:
                _grow(estimator, entry, cuts[place], firsts, space, table, leaders)
        table[cuts[place]].clear()


def _grow(
    estimator: Estimator,
    entry: _Entry,
    cut: int,
    firsts: Sequence[int],
    space: Space,
    table: dict[int, dict[_Key, list[_Entry]]],
    leaders: Leaders,
) -> None:
    later = len(entry.stages)
    for devices, used in space.groups(entry.used):
        between = estimator.crossing(cut, devices, entry.stages[0].devices) if later else Crossing(0.0, 0.0)
        for first in reversed(firsts):
            part = estimator.part(first, cut, devices, later, entry.replicas)
            if part is None:
                continue
            label = estimator.extend(entry.label, between, part)
            if estimator.total(label, later + 1) > leaders.bound * (PLAIN_SLACK if later < _PLAIN else 1.0):
                if len(devices) == 1:
                    break  # a stage that begins even earlier takes longer still
                continue  # with a reduction it may not: more bytes make more buckets, which may overlap better
            grown = _grown(entry, label, used, first, cut, devices, part)
            if first:
                _add(table[first].setdefault((used, devices, later + 1), []), grown)
            elif space.is_done(used):
                leaders.looked_at += 1
                leaders.offer(estimator.total(label, later + 1), grown.stages, estimator)


def _grown(entry: _Entry, label: Label, used: Hashable, first: int, last: int, devices: Devices, part: Part) -> _Entry:
    stage = Placed(first, last, devices, part.recompute)
    return _Entry(label, used, (stage, *entry.stages), entry.replicas + len(devices))


def _add(entries: list[_Entry], fresh: _Entry) -> None:
    for entry in entries:
        if all(old <= new for old, new in zip(entry.label, fresh.label)):
            return
    entries[:] = [entry for entry in entries if not all(new <= old for new, old in zip(fresh.label, entry.label))]
    entries.append(fresh)
