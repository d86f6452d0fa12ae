"""Dynamic orders: a worker runs whatever is ready, backward first, as `stagewright.runtime.worker` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

from stagewright.schedule import Action
from stagewright.scheduling.windows import Chooser, Key, Task, windows
from stagewright.simulation.program import (
    CHANNEL,
    CODE,
    DATA,
    FIRST_SLOT,
    SECONDS,
    UPDATE,
    PlainOp,
)

if TYPE_CHECKING:
    from stagewright.simulation.engine import Engine, Worker

_Placed = tuple[PlainOp, Action, int]
"""An op, its action and its batch."""


def _slot_of(unit: Task[_Placed]) -> int:
    """What a unit waits for; −1: nothing."""
    op, action, _ = unit.compute
    first = op[FIRST_SLOT]
    return first + action.microbatch if first >= 0 else -1


class DynamicWorker:
    """A worker that runs what the chooser picks."""

    def __init__(self, engine: Engine, worker: Worker) -> None:
        self.engine, self.worker, self.plan = engine, worker, engine.program.plan
        self.chooser: Chooser[_Placed] = Chooser(self.plan)
        self.windows = windows(self.unrolled(), lambda placed: placed[1:])
        self.rest: deque[_Placed] = deque()
        self.finished: set[Key] = set()
        self.current: Task[_Placed] | None = None
        self.busy_s = 0.0

    def unrolled(self) -> Iterator[_Placed]:
        """The worker's ops over all batches."""
        engine = self.engine
        for turn in engine.turns:
            for op, action in zip(self.worker.ops, self.worker.order):
                if 0 <= turn + action.batch < engine.num_batches:
                    yield op, action, turn + action.batch

    def step(self) -> None:
        """Goes on as far as possible: called when something ends, lands or is waited for no more."""
        if self.engine.now_s < self.busy_s or self.worker.wait is not None:
            return
        self.finish()
        while self.chooser.heads() or self.rest or self.open():
            if self.chooser.heads():
                for placed in self.chooser.receives():
                    self.engine.issue(*placed)
                unit = self.chooser.choose(self.has_rows)
                if unit is not None:
                    self.start(unit)
                return
            op, action, batch = self.rest[0]
            if not self.engine.passes(self.worker, op, action, batch):
                return
            self.rest.popleft()
            if op[CODE] == UPDATE:
                self.occupy(op, action, batch)
                return
        self.worker.is_over = True

    def open(self) -> bool:
        """The next window, if there is one."""
        found = next(self.windows, None)
        if found is None:
            return False
        self.rest = deque(found.rest)
        for placed in found.late:
            self.engine.issue(*placed)
        self.chooser.open(found.units.values())
        return True

    def has_rows(self, unit: Task[_Placed]) -> bool:
        """Whether a unit's rows are there."""
        stage, batch, microbatch, is_forward = unit.key
        near = (stage + (-1 if is_forward else 1), batch, microbatch, is_forward)
        if self.is_near(stage, near[0], microbatch) and near not in self.finished:
            return False
        op, action, _ = unit.compute
        if op[CHANNEL] == DATA:
            return self.engine.loaded(self.worker, action, batch)
        own = _slot_of(unit)
        slot = own + batch * self.engine.num_slots
        landing_s, _ = self.engine.landing.get(slot, (0.0, 0))
        return own < 0 or (slot not in self.engine.missing and landing_s <= self.engine.now_s)

    def is_near(self, stage: int, other: int, microbatch: int) -> bool:
        """Whether this worker itself makes rows in the other stage that it needs in this one."""
        first, workers, me = min(stage, other), self.plan.workers, self.worker.number
        if not 0 <= other < len(workers) or me not in workers[other]:
            return False
        parts = self.plan.transfers(first, microbatch)
        return any(workers[first][left] == workers[first + 1][right] == me for left, right, _, _ in parts)

    def start(self, unit: Task[_Placed]) -> None:
        """Runs a unit that can run."""
        # An op that receives nothing has no slot; with its batch added, it would name another one's.
        (op, _, batch), own = unit.compute, _slot_of(unit)
        slot = own + batch * self.engine.num_slots if own >= 0 else None
        landed = None if slot is None else self.engine.landing.pop(slot, None)
        if op[CHANNEL] != DATA:
            # It waited for rows only if they came after the device was free.
            self.worker.cause = ("transfer", landed[1]) if landed and landed[0] > self.busy_s else None
        self.current = unit
        self.occupy(*unit.compute)

    def occupy(self, op: PlainOp, action: Action, batch: int) -> None:
        """Keeps the device busy with an op."""
        # On shared cores nobody knows when it will be over: what computes there says so itself.
        self.busy_s = inf if self.worker.shared is not None else self.engine.now_s + op[SECONDS]
        self.engine.occupy(self.worker, op, action, batch)

    def finish(self) -> None:
        """Sends what the unit that has just ended made."""
        unit, self.current = self.current, None
        if unit is not None:
            self.finished.add(unit.key)
            self.chooser.finish(unit)
            for placed in unit.sends:
                self.engine.issue(*placed)

    def head(self) -> tuple[Action, int]:
        """What it waits before, and of which batch."""
        rest = self.rest[0][1:] if self.rest else (self.worker.order[0], 0)
        return next((unit.compute[1:] for unit in self.chooser.heads()), rest)
