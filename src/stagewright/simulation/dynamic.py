"""Dynamic orders: a worker runs whatever is ready, backward first, as `stagewright.runtime.dynamic` does.

Each stage's forwards stay in their order, and so do its backwards; how the two interleave is decided while it runs,
within the number of microbatches that the stage may hold. Reductions, agreements and updates stay where they are: what
stands between two of them is one window.

    order     F0 F1 F2 │ B0 F3 B1 B2 B3 │ G U          window: F0 … B3
    dynamic   F0 F1 B0   F2 B1 F3 B2 B3   G U          because B0 came early and F2's rows late
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from stagewright.schedule import Action, Kind
from stagewright.scheduling import holds
from stagewright.simulation.program import (
    CHANNEL,
    CODE,
    COMPUTES,
    DATA,
    FIRST_SLOT,
    RECEIVE,
    SECONDS,
    SEND,
    UPDATE,
    PlainOp,
)

if TYPE_CHECKING:
    from stagewright.simulation.engine import Engine, Worker

AHEAD = 2
"""How many units of a stream have their receipts issued, as in the runtime."""

Placed = tuple[PlainOp, Action, int]
"""An op, its action and its batch."""
Key = tuple[int, int, int, bool]
"""(stage, batch, microbatch, whether forward)."""
Streams = dict[tuple[int, bool], deque["Unit"]]


class Unit(NamedTuple):
    """One compute op with the receipts it needs and the sendings it feeds."""

    op: PlainOp
    action: Action
    batch: int
    receives: list[Placed]
    sends: list[Placed]

    @property
    def key(self) -> Key:
        """What it is."""
        return self.action.stage, self.batch, self.action.microbatch, self.action.kind is Kind.FORWARD

    @property
    def slot(self) -> int:
        """What it waits for; −1: nothing."""
        first = self.op[FIRST_SLOT]
        return first + self.action.microbatch if first >= 0 else -1


class Chooser:
    """What a worker with a dynamic order does next."""

    def __init__(self, engine: Engine, worker: Worker) -> None:
        self.engine, self.worker, self.plan = engine, worker, engine.program.plan
        self.limits = holds(self.plan)
        self.held = [0] * len(self.plan.stages)
        self.windows = windows(self.unrolled())
        self.streams: Streams = {}
        self.rest: deque[Placed] = deque()
        self.posted: set[Key] = set()
        self.finished: set[Key] = set()
        self.current: Unit | None = None
        self.busy_s = 0.0

    def unrolled(self) -> Iterator[Placed]:
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
        units, rest = found
        self.rest = deque(rest)
        for unit in units:
            self.streams.setdefault((unit.key[0], unit.key[3]), deque()).append(unit)
        return True

    def heads(self) -> Iterator[Unit]:
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

    def can_run(self, unit: Unit) -> bool:
        """Whether a unit has its rows and, going forward, a place to hold them."""
        stage, batch, microbatch, is_forward = unit.key
        if is_forward and self.held[stage] >= self.limits[stage]:
            return False
        if not is_forward and (stage, batch, microbatch, True) not in self.finished:
            return False
        near = (stage + (-1 if is_forward else 1), batch, microbatch, is_forward)
        if self.is_near(stage, near[0], microbatch) and near not in self.finished:
            return False
        if unit.op[CHANNEL] == DATA:
            return self.engine.loaded(self.worker, unit.action, batch)
        slot = unit.slot + batch * self.engine.num_slots
        landing_s, _ = self.engine.landing.get(slot, (0.0, 0))
        return unit.slot < 0 or (slot not in self.engine.missing and landing_s <= self.engine.now_s)

    def is_near(self, stage: int, other: int, microbatch: int) -> bool:
        """Whether this worker itself makes rows in the other stage that it needs in this one."""
        number, workers = self.worker.number, self.plan.workers
        if not 0 <= other < len(workers) or number not in workers[other]:
            return False
        shares = [(workers[at], self.plan.shares(at, microbatch)) for at in (stage, other)]
        own = [(one.start, one.stop) for among, some in shares for one in some if among[one.replica] == number]
        return len(own) == 2 and max(own[0][0], own[1][0]) < min(own[0][1], own[1][1])

    def start(self, unit: Unit) -> None:
        """Runs a unit that can run."""
        self.streams[unit.key[0], unit.key[3]].popleft()
        # An op that receives nothing has no slot; with its batch added, it would name another one's.
        slot = unit.slot + unit.batch * self.engine.num_slots if unit.slot >= 0 else None
        landed = None if slot is None else self.engine.landing.pop(slot, None)
        if unit.op[CHANNEL] != DATA:
            # It waited for rows only if they came after the device was free.
            self.worker.cause = ("transfer", landed[1]) if landed and landed[0] > self.busy_s else None
        self.held[unit.key[0]] += unit.key[3]
        self.current = unit
        self.occupy(unit.op, unit.action, unit.batch)

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
        return next(((unit.action, unit.batch) for unit in self.heads()), rest)


def windows(ops: Iterator[Placed]) -> Iterator[tuple[list[Unit], list[Placed]]]:
    """The order cut at reductions, agreements and updates: units, then what ends the window."""
    units: dict[Key, Unit] = {}
    early: dict[Key, list[Placed]] = {}
    rest: list[Placed] = []
    for op, action, batch in ops:
        code = op[CODE]
        if code == COMPUTES:
            if rest:
                yield list(units.values()), rest
                units, rest = {}, []
            key = (action.stage, batch, action.microbatch, action.kind is Kind.FORWARD)
            units[key] = Unit(op, action, batch, early.pop(key, []), [])
        elif code == RECEIVE:
            forward = action.kind is Kind.RECEIVE_FORWARD
            # A receipt names the stage that made what is received; the one beside it uses that.
            key = (action.stage + (1 if forward else -1), batch, action.microbatch, forward)
            early.setdefault(key, []).append((op, action, batch))
        elif code == SEND:
            units[action.stage, batch, action.microbatch, action.kind is Kind.SEND_FORWARD].sends.append(
                (op, action, batch)
            )
        else:
            rest.append((op, action, batch))
    yield list(units.values()), rest
