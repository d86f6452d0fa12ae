"""Every plan there is, one after the other, nothing skipped: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from stagewright.cluster import Devices
from stagewright.cost import Costs
from stagewright.planning.estimate import Estimator
from stagewright.planning.exact import Candidate, price
from stagewright.planning.groups import Setting


def best_of_all(costs: Costs, settings: Sequence[Setting]) -> tuple[float, Candidate | None]:
    """The fastest candidate that fits, over all cuts, all groups of devices and all settings."""
    best_s, best = float("inf"), None
    for setting in settings:
        estimator = Estimator(costs, setting)
        for candidate in every_candidate(costs, setting):
            found = price(candidate, estimator)
            if found is not None and found.step_s < best_s:
                best_s, best = found.step_s, candidate
    return best_s, best


def every_candidate(costs: Costs, setting: Setting) -> Iterator[Candidate]:
    """All of them: each device in one stage or in none, each stage with a device, each cut made or not."""
    devices, layers = costs.cluster.device_ids, costs.profile.layers
    cuts = [number for number in range(1, len(layers)) if layers[number].cuttable]
    for num_stages in range(1, min(len(devices), len(cuts) + 1) + 1):
        for groups in groupings(devices, num_stages):
            for chosen in combinations(cuts, num_stages - 1):
                yield Candidate((0, *chosen, len(layers)), groups, setting)


def groupings(devices: Devices, num_groups: int) -> Iterator[tuple[Devices, ...]]:
    """Every way to hand out devices to groups; the last place stands for devices left out."""
    for places in product(range(num_groups + 1), repeat=len(devices)):
        groups = tuple(tuple(id for id, place in zip(devices, places) if place == n) for n in range(num_groups))
        if all(groups):
            yield groups
