"""An order cut into windows, for workers that run whatever is ready instead of their order's own sequence.

Each stage's forwards stay in their order, and so do its backwards; only how the two interleave is open. Reductions,
agreements and updates stay where they are: what stands between two of them is one window.

    order     F0 F1 F2 │ B0 F3 B1 B2 B3 │ G U          window: F0 … B3
    dynamic   F0 F1 B0   F2 B1 F3 B2 B3   G U          because B0 came early and F2's rows late

The runtime cuts its actions so, and the simulator its ops: items that have an action and a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stagewright.schedule import COMPUTE, RECEIVES, TRANSFERS, Action, Kind

AHEAD = 2
"""How many units of a stream have their receives posted."""

Item = TypeVar("Item")
Key = tuple[int, int, int, bool]
"""(stage, batch, microbatch, whether forward)"""


@dataclass
class Unit(Generic[Item]):
    """One compute action with the receives it needs and the sends it feeds."""

    key: Key
    compute: Item
    receives: list[Item]
    sends: list[Item] = field(default_factory=list)


@dataclass
class Window(Generic[Item]):
    """Units that may run in any order that keeps their streams', and what comes before and after them all."""

    late: list[Item] = field(default_factory=list)
    """Sends of what an earlier window made: they go out at once."""
    units: dict[Key, Unit[Item]] = field(default_factory=dict)
    rest: list[Item] = field(default_factory=list)


def windows(items: Iterable[Item], look: Callable[[Item], tuple[Action, int]]) -> Iterator[Window[Item]]:
    """The windows of an order; `look` tells an item's action and batch."""
    window: Window[Item] = Window()
    early: dict[Key, list[Item]] = {}
    for item in items:
        action, batch = look(item)
        key = key_of(action, batch)
        if action.kind in COMPUTE:
            if window.rest:
                yield window
                window = Window()
            window.units[key] = Unit(key, item, early.pop(key, []))
        elif action.kind in RECEIVES:
            early.setdefault(key, []).append(item)
        elif action.kind in TRANSFERS:
            (window.units[key].sends if key in window.units else window.late).append(item)
        else:
            window.rest.append(item)
    yield window


def key_of(action: Action, batch: int) -> Key:
    """The unit that an action is, feeds, or is needed by."""
    is_forward = action.kind in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    # A receive names the stage that made what is received; the one beside it uses that.
    beside = (1 if is_forward else -1) if action.kind in RECEIVES else 0
    return action.stage + beside, batch, action.microbatch, is_forward
