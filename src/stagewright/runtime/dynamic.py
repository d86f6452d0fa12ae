"""Dynamic order: a worker runs whatever is ready, backward first, instead of its order's own sequence.

Each stage's forwards stay in their order, and so do its backwards; only how the two interleave is decided here, within
the number of microbatches that the stage may hold. Reductions, agreements and updates stay where they are: what
stands between two of them is one window.

    order     F0 F1 F2 │ B0 F3 B1 B2 B3 │ G U          window: F0 … B3
    dynamic   F0 F1 B0   F2 B1 F3 B2 B3   G U          because B0 came early and F2's rows late
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stagewright.errors import RunError
from stagewright.runtime.worker import Worker, together
from stagewright.schedule import COMPUTE, RECEIVES, TRANSFERS, Action, Kind
from stagewright.scheduling import holds

AHEAD = 2
"""How many units of a stream have their receives posted."""

Group = list[Action]


@dataclass
class Unit:
    """One compute action with the receives it needs and the sends it feeds."""

    compute: Action
    receives: list[Group] = field(default_factory=list)
    sends: list[Group] = field(default_factory=list)


def run_dynamic(worker: Worker, num_batches: int, first_batch: int = 0) -> None:
    """Runs a worker's order over a number of batches, window by window."""
    limits = holds(worker.plan)
    for units, rest in windows(together(worker.order(num_batches, first_batch))):
        run_window(worker, units, limits)
        for group in rest:
            worker.act(group)


def windows(groups: Iterable[Group]) -> Iterator[tuple[list[Unit], list[Group]]]:
    """The order cut at reductions, agreements and updates: units, then what ends the window."""
    units: dict[tuple[int, int, int, bool], Unit] = {}
    early: dict[tuple[int, int, int, bool], list[Group]] = {}
    rest: list[Group] = []
    for group in groups:
        action = group[0]
        if action.kind in COMPUTE and rest:
            yield list(units.values()), rest
            units, rest = {}, []
        if action.kind in COMPUTE:
            key = (*action[1:4], action.kind is Kind.FORWARD)
            units[key] = Unit(action, early.pop(key, []))
        elif action.kind in RECEIVES:
            forward = action.kind is Kind.RECEIVE_FORWARD
            stage = action.stage + (1 if forward else -1)
            early.setdefault((stage, action.batch, action.microbatch, forward), []).append(group)
        elif action.kind in TRANSFERS:
            units[(*action[1:4], action.kind is Kind.SEND_FORWARD)].sends.append(group)
        else:
            rest.append(group)
    yield list(units.values()), rest


def run_window(worker: Worker, units: list[Unit], limits: tuple[int, ...]) -> None:
    """Runs units until none is left: a backward that is ready, else a forward that is ready and may be held."""
    streams: dict[tuple[int, bool], deque[Unit]] = {}
    for unit in units:
        streams.setdefault((unit.compute.stage, unit.compute.kind is Kind.FORWARD), deque()).append(unit)
    # Backward first, and the latest stage first: what is furthest along frees the most.
    priority = sorted(streams, key=lambda key: (key[1], -key[0]))
    posted: set[int] = set()
    while any(streams.values()):
        post(worker, streams.values(), posted)
        worker.transport.arrived.clear()
        chosen = next((key for key in priority if can_run(worker, streams[key], limits)), None)
        if chosen is None:
            wait(worker, streams)
            continue
        unit = streams[chosen].popleft()
        worker.act([unit.compute])
        for group in unit.sends:
            worker.act(group)


def post(worker: Worker, streams: Iterable[deque[Unit]], posted: set[int]) -> None:
    """Posts the receives of the first units of every stream."""
    for stream in streams:
        for unit in list(stream)[:AHEAD]:
            if id(unit) not in posted:
                posted.add(id(unit))
                for group in unit.receives:
                    worker.act(group)


def can_run(worker: Worker, stream: deque[Unit], limits: tuple[int, ...]) -> bool:
    """Whether the first unit of a stream has its rows and, going forward, a place to hold them."""
    if not stream:
        return False
    action = stream[0].compute
    here = worker.hosted[action.stage]
    if action.kind is Kind.FORWARD and len(here.runner.held) >= limits[action.stage]:
        return False
    if action.kind is not Kind.FORWARD and (action.batch, action.microbatch) not in here.runner.held:
        return False
    return worker.is_ready(action)


def wait(worker: Worker, streams: dict[tuple[int, bool], deque[Unit]]) -> None:
    """Waits until something arrives."""
    if not worker.transport.arrived.wait(worker.world.timeout.total_seconds()):
        stuck = ", ".join(str(stream[0].compute) for stream in streams.values() if stream)
        raise RunError(
            f"worker {worker.world.worker} waited {worker.world.timeout.total_seconds():g} s for rows of {stuck}",
            "look for the worker that stopped, or raise --timeout",
        )
    worker.transport.check()
