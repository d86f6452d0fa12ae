"""Which devices a stage may get, from the last stage to the first.

A space starts with no device used; `groups` offers the devices of one stage more in front, and what is used then.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Protocol

from stagewright.cluster import DeviceId
from stagewright.cost import Costs
from stagewright.planning.groups import find_twins

Devices = tuple[DeviceId, ...]


class Space(Protocol):
    """Ways to hand out devices to stages."""

    @property
    def start(self) -> Hashable: ...
    def groups(self, used: Hashable) -> Iterator[tuple[Devices, Hashable]]: ...
    def is_done(self, used: Hashable) -> bool: ...


@dataclass(frozen=True)
class Subsets:
    """Any devices for any stage, and some for none; of devices that are wired alike, the lowest-numbered first."""

    costs: Costs
    devices: Devices

    @property
    def start(self) -> frozenset[DeviceId]:
        return frozenset()

    @cached_property
    def _alike(self) -> list[list[DeviceId]]:
        # only neighbours count as alike: others would change the order of a group, and so who sends rows to whom
        twins = find_twins(self.costs)
        families: list[list[DeviceId]] = []
        for id in self.devices:
            if families and twins[families[-1][-1]] == twins[id]:
                families[-1].append(id)
            else:
                families.append([id])
        return families

    def groups(self, used: Hashable) -> Iterator[tuple[Devices, Hashable]]:
        assert isinstance(used, frozenset)
        free = [[id for id in family if id not in used] for family in self._alike]
        for counts in product(*(range(len(family) + 1) for family in free)):
            chosen = [id for family, count in zip(free, counts) for id in family[:count]]
            if chosen:
                yield tuple(sorted(chosen)), used | frozenset(chosen)

    def is_done(self, used: Hashable) -> bool:
        return True


@dataclass(frozen=True)
class Runs:
    """Neighbours in an order of the devices; the state is how many, from the end, are used."""

    order: Devices
    sizes: tuple[int, ...]

    @property
    def start(self) -> int:
        return 0

    def groups(self, used: Hashable) -> Iterator[tuple[Devices, Hashable]]:
        assert isinstance(used, int)
        stop = len(self.order) - used
        for size in self.sizes:
            if size <= stop:
                yield tuple(sorted(self.order[stop - size : stop])), used + size

    def is_done(self, used: Hashable) -> bool:
        return True


@dataclass(frozen=True)
class Given:
    """The devices of a placement; the state is how many stages, from the end, have theirs."""

    stages: tuple[Devices, ...]

    @property
    def start(self) -> int:
        return 0

    def groups(self, used: Hashable) -> Iterator[tuple[Devices, Hashable]]:
        assert isinstance(used, int)
        if used < len(self.stages):
            yield self.stages[-1 - used], used + 1

    def is_done(self, used: Hashable) -> bool:
        return used == len(self.stages)


def device_orders(costs: Costs, devices: Sequence[DeviceId]) -> tuple[Devices, ...]:
    """Good orders for `Runs`: along the wires; and, where speeds or memories differ, by these."""
    along = costs.network.ring_order(tuple(devices)) if len(devices) <= 16 else tuple(devices)
    kind = {id: costs.cluster.device(id) for id in devices}
    orders = [
        along,
        tuple(sorted(along, key=lambda id: -kind[id].speed)),
        tuple(sorted(along, key=lambda id: kind[id].speed)),
        tuple(sorted(along, key=lambda id: -kind[id].memory_bytes)),
        tuple(sorted(along, key=lambda id: kind[id].memory_bytes)),
    ]
    return tuple(dict.fromkeys(orders))


def group_sizes(num_devices: int, most: int = 24) -> tuple[int, ...]:
    """Every size; of many devices only some: all small ones, then steps of an eighth, and their complements."""
    if num_devices <= most:
        return tuple(range(1, num_devices + 1))
    step = max(1, num_devices // 8)
    sizes = {*range(1, 9), *range(step, num_devices + 1, step), *(num_devices - few for few in (0, 1, 2, 4, 8))}
    return tuple(sorted(size for size in sizes if size > 0))
