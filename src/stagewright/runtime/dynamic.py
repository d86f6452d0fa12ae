"""Dynamic order: a worker runs whatever is ready, backward first, instead of its order's own sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from stagewright.errors import RunError
from stagewright.policy import holds
from stagewright.runtime.order import together
from stagewright.runtime.worker import Worker
from stagewright.schedule import Action, Kind
from stagewright.scheduling.windows import AHEAD, Key, Unit, windows

_Group = list[Action]
_Streams = dict[tuple[int, bool], deque[Unit[_Group]]]


def run_dynamic(worker: Worker, num_batches: int, first_batch: int = 0) -> None:
    """Runs a worker's order over a number of batches, window by window."""
    limits = holds(worker.plan)
    groups = together(worker.order(num_batches, first_batch))
    for window in windows(groups, lambda group: (group[0], group[0].batch)):
        for group in window.late:
            worker.act(group)
        _run_units(worker, window.units.values(), limits)
        for group in window.rest:
            worker.act(group)
    worker.catch_up()


def _run_units(worker: Worker, units: Iterable[Unit[_Group]], limits: tuple[int, ...]) -> None:
    """Runs units until none is left: a backward that is ready, else a forward that is ready and may be held."""
    streams: _Streams = {}
    for unit in units:
        stage, _, _, is_forward = unit.key
        streams.setdefault((stage, is_forward), deque()).append(unit)
    # Backward first, and the latest stage first: what is furthest along frees the most.
    priority = sorted(streams, key=lambda key: (key[1], -key[0]))
    posted: set[Key] = set()
    while any(streams.values()):
        _post(worker, streams.values(), posted)
        worker.transport.arrived.clear()
        chosen = next((key for key in priority if _can_run(worker, streams[key], limits)), None)
        if chosen is None:
            _wait(worker, streams)
            continue
        unit = streams[chosen].popleft()
        worker.act(unit.compute)
        for group in unit.sends:
            worker.act(group)


def _post(worker: Worker, streams: Iterable[deque[Unit[_Group]]], posted: set[Key]) -> None:
    """Posts the receives of the first units of every stream."""
    for stream in streams:
        for unit in list(stream)[:AHEAD]:
            if unit.key not in posted:
                posted.add(unit.key)
                for group in unit.receives:
                    worker.act(group)


def _can_run(worker: Worker, stream: deque[Unit[_Group]], limits: tuple[int, ...]) -> bool:
    """Whether the first unit of a stream has its rows and, going forward, a place to hold them."""
    if not stream:
        return False
    action = stream[0].compute[0]
    here = worker.replicas[action.stage]
    if action.kind is Kind.FORWARD and len(here.runner.held) >= limits[action.stage]:
        return False
    if action.kind is not Kind.FORWARD and (action.batch, action.microbatch) not in here.runner.held:
        return False
    return worker.is_ready(action)


def _wait(worker: Worker, streams: _Streams) -> None:
    """Waits until something arrives."""
    if not worker.transport.arrived.wait(worker.world.timeout.total_seconds()):
        stuck = ", ".join(str(stream[0].compute[0]) for stream in streams.values() if stream)
        raise RunError(
            f"worker {worker.world.worker} waited {worker.world.timeout.total_seconds():g} s for rows of {stuck}",
            "look for the worker that stopped, or raise --timeout",
        )
    worker.transport.check()
