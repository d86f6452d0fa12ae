"""Compute on cores that workers share: an op is a flow of work, which slows down while others want the same cores.

worker 0   F ▇▇▇▇▇▇▇▇▇▇▇▇           two workers on one core: each gets half of it while both compute,
worker 1       F ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇      and the whole of it when the other is done
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagewright.schedule import Action
from stagewright.simulation.log import Cause
from stagewright.simulation.program import READY, SECONDS, PlainOp
from stagewright.simulation.traffic import Flow

if TYPE_CHECKING:
    from stagewright.simulation.engine import Engine, Worker


class SharedCores:
    """What one worker computes, in pieces that end where a bucket of gradients becomes ready."""

    def __init__(self, engine: Engine, worker: Worker, flow: Flow) -> None:
        self.engine, self.worker, self.flow = engine, worker, flow
        self.op: PlainOp | None = None
        self.action: Action | None = None
        self.batch, self.order, self.start_s = 0, 0, 0.0
        self.cause: Cause | None = None
        self.pieces: list[tuple[float, int]] = []
        """What is left of the op, last first: (share of it, the bucket that is ready then, or −1)."""

    def start(self, op: PlainOp, action: Action, batch: int) -> None:
        """Begins an op."""
        engine, worker = self.engine, self.worker
        self.op, self.action, self.batch = op, action, batch
        self.order, self.start_s = engine.next_order(), engine.now_s
        self.cause, worker.cause = worker.cause, None
        self.pieces = pieces(op[READY])[::-1]
        self.next_piece()

    def next_piece(self) -> None:
        """Begins the next piece of the op."""
        assert self.op is not None
        self.flow.load = self
        work = self.pieces[-1][0] * self.op[SECONDS] * self.flow.alone
        if work > 0:
            self.engine.traffic.start(self.flow, work, self.engine.now_s)
        else:
            self.engine.at(self.engine.now_s, self.go_on)

    def go_on(self) -> None:
        """A piece is over: its bucket is ready, and the next piece or the next op follows."""
        engine, worker, op, action = self.engine, self.worker, self.op, self.action
        assert op is not None
        assert action is not None
        _, bucket = self.pieces.pop()
        if bucket >= 0:
            engine.collectives.bucket_ready(worker.number, action.stage, self.batch, bucket)
        if self.pieces:
            self.next_piece()
            return
        worker.done.append((op, action, self.batch, self.start_s, engine.now_s, self.cause, self.order))
        if worker.dynamic is not None:
            worker.dynamic.busy_s = engine.now_s
        engine.at(engine.now_s, worker.go_on)


def pieces(ready: tuple[float, ...]) -> list[tuple[float, int]]:
    """An op cut at the shares of it after which buckets are ready: (share of the op, the bucket, −1 for none)."""
    cut = sorted((share, bucket) for bucket, share in enumerate(ready))
    if not cut or cut[-1][0] < 1.0:
        cut.append((1.0, -1))
    edges = [0.0, *(share for share, _ in cut)]
    return [(max(share - before, 0.0), bucket) for before, (share, bucket) in zip(edges, cut)]
