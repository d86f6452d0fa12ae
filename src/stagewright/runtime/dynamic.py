"""Dynamic order: a worker runs whatever is ready, backward first, instead of its order's own sequence."""

from __future__ import annotations

from stagewright.errors import RunError
from stagewright.runtime.order import together
from stagewright.runtime.worker import Worker
from stagewright.schedule import Action
from stagewright.scheduling.windows import Chooser, windows


def run_dynamic(worker: Worker, num_batches: int, first_batch: int = 0) -> None:
    """Runs a worker's order over a number of batches, window by window."""
    chooser: Chooser[list[Action]] = Chooser(worker.plan)
    groups = together(worker.order(num_batches, first_batch))
    for window in windows(groups, lambda group: (group[0], group[0].batch)):
        for group in window.late:
            worker.act(group)
        chooser.open(window.units.values())
        while chooser.heads():
            _run_one(worker, chooser)
        for group in window.rest:
            worker.act(group)
    worker.catch_up()


def _run_one(worker: Worker, chooser: Chooser[list[Action]]) -> None:
    """Runs what is ready, or waits until something arrives."""
    for group in chooser.receives():
        worker.act(group)
    worker.transport.arrived.clear()
    unit = chooser.choose(lambda unit: worker.is_ready(unit.compute[0]))
    if unit is not None:
        for group in (unit.compute, *unit.sends):
            worker.act(group)
        chooser.finish(unit)
        return
    if not worker.transport.arrived.wait(worker.world.timeout.total_seconds()):
        stuck = ", ".join(str(unit.compute[0]) for unit in chooser.heads())
        raise RunError(
            f"worker {worker.world.worker} waited {worker.world.timeout.total_seconds():g} s for rows of {stuck}",
            "look for the worker that stopped, or raise --timeout",
        )
    worker.transport.check()
