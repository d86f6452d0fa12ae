"""Which devices a stage may get, from the last stage to the first.

A space starts with no device used; `groups` offers the devices of one stage more in front, and what is used then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from stagewright.cluster import DeviceId
from stagewright.cost import Costs
from stagewright.planning.groups import Devices, find_twins


class Space(NamedTuple):
    """Ways to hand out devices to stages; what is used is a set of devices, or how many from the end."""

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
