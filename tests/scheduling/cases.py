"""Plans and drawings for the tests."""

from __future__ import annotations

from textwrap import dedent

from stagewright.cluster import DeviceId, parse_placement
from stagewright.plan import Plan
from stagewright.schedule import Order, parse_order
from stagewright.scheduling.drawing import sketch_plan


def plan_of(replicas: tuple[int, ...], num_microbatches: int = 1, **options) -> Plan:
    """Stages on devices of their own."""
    return sketch_plan(replicas, num_microbatches=num_microbatches, **options)


def placed(text: str, num_microbatches: int = 1, **options) -> Plan:
    """Stages on the devices that a placement names, which they may share."""
    return sketch_plan(parse_placement(text), num_microbatches=num_microbatches, **options)


def wrapped(replicas: tuple[int, ...], num_devices: int, num_microbatches: int = 1, **options) -> Plan:
    """Stages dealt out over a few devices, round and round, so that they share them."""
    stages, next_device = [], 0
    for count in replicas:
        stages.append(tuple(DeviceId(0, (next_device + number) % num_devices) for number in range(count)))
        next_device += count
    return sketch_plan(stages, num_microbatches=num_microbatches, **options)


def drawn(text: str) -> str:
    """A grid as it stands in a test."""
    return dedent(text).strip("\n")


def orders_of(text: str) -> tuple[Order, ...]:
    """The orders that `Schedule.text` wrote, a line a worker."""
    return tuple(parse_order(line.partition("│")[2] if "│" in line else line) for line in text.splitlines())
