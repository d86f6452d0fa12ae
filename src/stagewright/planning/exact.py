"""The optimum of the estimate over cuts and groups of devices.

    table[cut] = for (devices used, group in front, stages so far) the tails that none other beats in every field

Tails grow from the last stage to the first. One is dropped only where another's label is no worse in every field, or
where it already takes longer than a whole plan: so what is found at cut 0 is the optimum of the space. Plans of up to
three stages that are a little slower come along, for whoever looks closer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import product

from stagewright.planning.candidates import NO_STAGES, Candidate, Found, Leaders, Tail, longer
from stagewright.planning.estimate import Estimator
from stagewright.planning.groups import Devices
from stagewright.planning.spaces import Space

PLAIN_SLACK = 1.15
"""Up to three stages a plan counts even where it is estimated to take so many times as long as the best."""

_Key = tuple[Hashable, Devices, int]
"""The devices used, the group in front, the number of stages."""


def search_exactly(
    estimator: Estimator, cuts: Sequence[int], space: Space, leaders: Leaders, *, every_cut: bool = False
) -> None:
    """Offers the leaders every plan of the space that could lead; with `every_cut` all cuts must be made.

    `cuts` are where a stage may begin or end, from 0 to the number of layers.
    """
    table: dict[int, dict[_Key, list[Tail]]] = {cut: {} for cut in cuts}
    table[cuts[-1]][space.start, (), 0] = [NO_STAGES]
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
                        leaders.offer(Found(grown.step_s, candidate, grown.recompute))
        table[last].clear()


def _grown(
    estimator: Estimator, tail: Tail, last: int, devices: Devices, firsts: Sequence[int], leaders: Leaders
) -> Iterator[Tail]:
    """A tail with a stage more in front on these devices, for each place where that may begin and could still lead."""
    slack = PLAIN_SLACK if len(tail.groups) < 3 else 1.0
    for first in reversed(firsts):
        found = longer(tail, first, last, devices, estimator)
        if found is None:
            continue
        if found.step_s <= leaders.bound * slack:
            yield found
        elif len(devices) == 1:
            # A stage that begins even earlier takes longer still. With a reduction it may not: more bytes make more
            # buckets, which may overlap better.
            return


def _add(known: list[Tail], fresh: Tail) -> None:
    """Keeps a tail unless another is no worse in every field, and drops those that it makes needless."""
    if not any(all(old <= new for old, new in zip(each.label, fresh.label)) for each in known):
        known[:] = [each for each in known if not all(new <= old for new, old in zip(fresh.label, each.label))]
        known.append(fresh)
