"""Dynamic orders: a worker runs whatever is ready, backward first, instead of its order's own sequence.

Its order is cut into windows. Each stage's forwards stay in their order, and so do its backwards; only how the two
interleave is open. Reductions, agreements and updates stay where they are: what stands between two is one window.

    order     F0 F1 F2 │ B0 F3 B1 B2 B3 │ G U          window: F0 … B3
    dynamic   F0 F1 B0   F2 B1 F3 B2 B3   G U          because B0 came early and F2's rows late

The runtime chooses among its actions so, and the simulator among its ops: items that have an action and a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from stagewright.plan import Plan
from stagewright.policy import holds
from stagewright.schedule import COMPUTE, RECEIVES, TRANSFERS, Action, Kind

_Item = TypeVar("_Item")
Key = tuple[int, int, int, bool]
"""(stage, batch, microbatch, whether forward)"""


@dataclass
class Task(Generic[_Item]):
    """One compute action with the receives it needs and the sends it feeds."""

    key: Key
    compute: _Item
    receives: list[_Item]
    sends: list[_Item] = field(default_factory=list)


@dataclass
class _Window(Generic[_Item]):
    """Units that may run in any order that keeps their streams', and what comes before and after them all."""

    late: list[_Item] = field(default_factory=list)
    """Sends of what an earlier window made: they go out at once."""
    units: dict[Key, Task[_Item]] = field(default_factory=dict)
    rest: list[_Item] = field(default_factory=list)


class Chooser(Generic[_Item]):
    """What a worker with a dynamic order does next: a backward that is ready, else a forward that may be held."""

    def __init__(self, plan: Plan) -> None:
        self._limits = holds(plan)
        self._held: dict[int, set[tuple[int, int]]] = {stage: set() for stage in range(len(plan.stages))}
        """The microbatches of each stage that wait for their backward, or are in it."""
        self._streams: dict[tuple[bool, int], deque[Task[_Item]]] = {}

    def open(self, units: Iterable[Task[_Item]]) -> None:
        """Takes over the units of a window, in streams that keep their order: the forwards and backwards of a stage."""
        for unit in units:
            stage, _, _, is_forward = unit.key
            # Backward first, and the latest stage first: what is furthest along frees the most.
            self._streams.setdefault((is_forward, -stage), deque()).append(unit)
        self._streams = dict(sorted(self._streams.items()))

    def heads(self) -> list[Task[_Item]]:
        """The first unit of each stream, the one to be preferred first."""
        return [stream[0] for stream in self._streams.values() if stream]

    def receives(self) -> Iterator[_Item]:
        """The receives to post now: those of the first two units of every stream, once each."""
        for stream in self._streams.values():
            for unit in islice(stream, 2):
                yield from unit.receives
                unit.receives = []

    def choose(self, has_rows: Callable[[Task[_Item]], bool]) -> Task[_Item] | None:
        """The best unit that can run, which leaves its stream; None if there is none yet."""
        for unit in self.heads():
            stage, batch, microbatch, is_forward = unit.key
            held = self._held[stage]
            may_run = len(held) < self._limits[stage] if is_forward else (batch, microbatch) in held
            if may_run and has_rows(unit):
                self._streams[is_forward, -stage].popleft()
                return unit
        return None

    def finish(self, unit: Task[_Item]) -> None:
        """A unit that was chosen is over."""
        stage, batch, microbatch, is_forward = unit.key
        (self._held[stage].add if is_forward else self._held[stage].discard)((batch, microbatch))


def windows(items: Iterable[_Item], look: Callable[[_Item], tuple[Action, int]]) -> Iterator[_Window[_Item]]:
    """The windows of an order; `look` tells an item's action and batch."""
    window: _Window[_Item] = _Window()
    early: dict[Key, list[_Item]] = {}
    for item in items:
        action, batch = look(item)
        key = _key_of(action, batch)
        if action.kind in COMPUTE:
            if window.rest:
                yield window
                window = _Window()
            window.units[key] = Task(key, item, early.pop(key, []))
        elif action.kind in RECEIVES:
            early.setdefault(key, []).append(item)
        elif action.kind in TRANSFERS:
            (window.units[key].sends if key in window.units else window.late).append(item)
        else:
            window.rest.append(item)
    yield window


def _key_of(action: Action, batch: int) -> Key:
    """The unit that an action is, feeds, or is needed by."""
    is_forward = action.kind in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    # A receive names the stage that made what is received; the one beside it uses that.
    beside = (1 if is_forward else -1) if action.kind in RECEIVES else 0
    return action.stage + beside, batch, action.microbatch, is_forward
