"""What a simulated run did: every op, transfer and reduction with its times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stagewright.record import MEMORY_KINDS
from stagewright.schedule import Action
from stagewright.simulation.program import ACTION, CODE, PlainOp

BUFFERS = MEMORY_KINDS.index("buffers")

Cause = tuple[str, int]
"""What ended a wait: `transfer` or `reduction` by its place in the log, `worker` by number, `data` by host."""

Change = tuple[float, float, int]
"""(when, bytes taken or, where negative, given back, which kind of memory)."""


class Done(NamedTuple):
    """An op that ran, and what it waited for last; None stands for the op before it."""

    op: PlainOp
    batch: int
    start_s: float
    stop_s: float
    cause: Cause | None
    order: int
    """Grows from one action to the next, over all workers: nothing waits for what has a larger one."""

    @property
    def code(self) -> int:
        """What the op is to the engine."""
        return self.op[CODE]

    @property
    def action(self) -> Action:
        """The action that ran."""
        return self.op[ACTION]


class Moved(NamedTuple):
    """A transfer that arrived."""

    channel: int
    sent: Action
    batch: int
    num_bytes: float
    issued_s: float
    start_s: float
    stop_s: float


class Reduced(NamedTuple):
    """A bucket that was reduced."""

    stage: int
    batch: int
    bucket: int
    start_s: float
    stop_s: float
    last: int
    """The worker whose gradients came last."""


class Log(NamedTuple):
    """All that happened."""

    done: list[list[Done]]
    """Worker by worker, in order: what took time on the device."""
    moved: Sequence[Moved]
    reduced: list[Reduced]
    buffers: list[list[Change]]
    """Worker by worker: buffers taken when a receipt or a sending is issued, given back when a sending has arrived."""
