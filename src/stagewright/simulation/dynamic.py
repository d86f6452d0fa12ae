"""Dynamic orders: a worker runs whatever is ready, backward first, as `stagewright.runtime.dynamic` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

from stagewright.policy import holds
from stagewright.schedule import Action
from stagewright.scheduling.windows import AHEAD, Key, Unit, windows
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
_Streams = dict[tuple[int, bool], deque[Unit[_Placed]]]


def _slot_of(unit: Unit[_Placed]) -> int:
    """What a unit waits for; −1: nothing."""
    op, action, _ = unit.compute
    first = op[FIRST_SLOT]
    return first + action.microbatch if first >= 0 else -1


class Chooser:
    """What a worker with a dynamic order does next."""

    def __init__(self, engine: Engine, worker: Worker) -> None:
        self.engine, self.worker, self.plan = engine, worker, engine.program.plan
        self.limits = holds(self.plan)
        self.held = [0] * len(self.plan.stages)
        self.windows = windows(self.unrolled(), lambda placed: placed[1:])
        self.streams: _Streams = {}
        self.rest: deque[_Placed] = deque()
        self.posted: set[Key] = set()
        self.finished: set[Key] = set()
        self.current: Unit[_Placed] | None = None
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
        while any(self.streams.values()) or self.rest or self.open():
            if any(self.streams.values()):
                self.post()
                unit = next((unit for unit in self.heads() if self.can_run(unit)), None)
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
        for unit in found.units.values():
            self.streams.setdefault((unit.key[0], unit.key[3]), deque()).append(unit)
        return True

    def heads(self) -> Iterator[Unit[_Placed]]:
        """The first unit of each stream: backward first, and the latest stage first, which frees the most."""
        for key in sorted(self.streams, key=lambda key: (key[1], -key[0])):
            if self.streams[key]:
                yield self.streams[key][0]

    def post(self) -> None:
        """Issues the receipts of the first units of every stream."""
        for stream in self.streams.values():
            for unit in list(stream)[:AHEAD]:
                if unit.key not in self.posted:
                    self.posted.add(unit.key)
                    for placed in unit.receives:
                        self.engine.issue(*placed)

    def can_run(self, unit: Unit[_Placed]) -> bool:
        """Whether a unit has its rows and, going forward, a place to hold them."""
        stage, batch, microbatch, is_forward = unit.key
        if is_forward and self.held[stage] >= self.limits[stage]:
            return False
        if not is_forward and (stage, batch, microbatch, True) not in self.finished:
            return False
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

    def start(self, unit: Unit[_Placed]) -> None:
        """Runs a unit that can run."""
        self.streams[unit.key[0], unit.key[3]].popleft()
        # An op that receives nothing has no slot; with its batch added, it would name another one's.
        (op, _, batch), own = unit.compute, _slot_of(unit)
        slot = own + batch * self.engine.num_slots if own >= 0 else None
        landed = None if slot is None else self.engine.landing.pop(slot, None)
        if op[CHANNEL] != DATA:
            # It waited for rows only if they came after the device was free.
            self.worker.cause = ("transfer", landed[1]) if landed and landed[0] > self.busy_s else None
        self.held[unit.key[0]] += unit.key[3]
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
            self.held[unit.key[0]] -= not unit.key[3]
            for placed in unit.sends:
                self.engine.issue(*placed)

    def head(self) -> tuple[Action, int]:
        """What it waits before, and of which batch."""
        rest = self.rest[0][1:] if self.rest else (self.worker.order[0], 0)
        return next((unit.compute[1:] for unit in self.heads()), rest)
