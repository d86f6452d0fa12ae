"""Reductions of gradients, bucket by bucket, and the agreement of all workers."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from stagewright.simulation.log import Reduced
from stagewright.simulation.program import READY, SECONDS, PlainOp

if TYPE_CHECKING:
    from stagewright.simulation.engine import Engine, Worker


class Collectives:
    """What has been reduced and agreed on in one run."""

    def __init__(self, engine: Engine) -> None:
        self.engine, every = engine, engine.program.reductions
        self.log: list[Reduced] = []
        self.flows = [
            engine.traffic.make_flow(one.way.loads, one.way.bytes_per_s, one.shared) if one.way else None
            for one in every
        ]
        self.ready: dict[tuple[int, int, int], int] = {}
        """How many replicas have their gradients of a bucket: (stage, batch, bucket)."""
        self.queues: list[deque[tuple[int, int, int]]] = [deque() for _ in every]
        """Buckets of each stage that wait for the one before."""
        self.reducing = [False] * len(every)
        self.unreduced: dict[tuple[int, int], int] = {}
        """How many buckets of a stage's batch are still to come."""
        self.arrived: dict[int, set[int]] = {}
        self.agreed: set[int] = set()

    def foresee_buckets(self, worker: Worker, op: PlainOp, stage: int, batch: int) -> None:
        """Buckets become ready while a batch's last backward runs."""
        for bucket, share in enumerate(op[READY]):
            ready = partial(self.bucket_ready, worker.number, stage, batch, bucket)
            self.engine.at(self.engine.now_s + share * op[SECONDS], ready)

    def reduced_whole(self, worker: Worker, stage: int, batch: int) -> bool:
        """Whether every bucket of a stage is reduced."""
        reduction = self.engine.program.reductions[stage]
        if reduction.num_replicas > 1 and self.unreduced.get((stage, batch), reduction.num_buckets):
            worker.wait = (stage, batch)
            return False
        return True

    def agree(self, worker: Worker, batch: int) -> bool:
        """Whether all workers have met: each comes when its own stages' gradients are reduced."""
        if batch in self.agreed:
            return True
        for stage in self.engine.program.plan.stages_of[worker.number]:
            if not self.reduced_whole(worker, stage, batch):
                return False
        here = self.arrived.setdefault(batch, set())
        here.add(worker.number)
        if len(here) == len(self.engine.workers):
            self.engine.at(
                self.engine.now_s + self.engine.program.agree_s, partial(self.agree_over, worker.number, batch)
            )
        worker.wait = ("agreement", batch)
        return False

    def agree_over(self, last: int, batch: int) -> None:
        """All workers have met: they go on together."""
        self.agreed.add(batch)
        for number in sorted(self.arrived.pop(batch)):
            self.engine.wake(self.engine.workers[number], ("agreement", batch), ("worker", last), self.engine.now_s)

    def bucket_ready(self, worker: int, stage: int, batch: int, bucket: int) -> None:
        """One replica has its gradients of a bucket; the last one queues the reduction."""
        key = stage, batch, bucket
        count = self.ready.get(key, 0) + 1
        self.ready[key] = count
        if count == self.engine.program.reductions[stage].num_replicas:
            del self.ready[key]
            self.queues[stage].append((batch, bucket, worker))
            self.next_bucket(stage)

    def next_bucket(self, stage: int) -> None:
        """Starts the stage's next reduction if none is under way."""
        if self.reducing[stage] or not self.queues[stage]:
            return
        batch, bucket, worker = self.queues[stage].popleft()
        reduction, flow = self.engine.program.reductions[stage], self.flows[stage]
        self.reducing[stage] = True
        load = (stage, batch, bucket, self.engine.now_s, worker)
        if flow is not None and reduction.way is not None and reduction.bucket_bytes:
            flow.load = (None, *load)
            self.engine.traffic.start(flow, reduction.way.passes * reduction.bucket_bytes, self.engine.now_s)
        else:
            self.engine.at(self.engine.now_s, partial(self.reduced, *load))

    def reduced(self, stage: int, batch: int, bucket: int, start_s: float, last: int) -> None:
        """A bucket is reduced: the next one starts, and the update may go on after the last."""
        self.log.append(Reduced(stage, batch, bucket, start_s, self.engine.now_s, last))
        self.reducing[stage] = False
        self.next_bucket(stage)
        key = (stage, batch)
        left = self.unreduced.get(key, self.engine.program.reductions[stage].num_buckets) - 1
        self.unreduced[key] = left
        if not left:
            for number in self.engine.program.plan.workers[stage]:
                self.engine.wake(self.engine.workers[number], key, ("reduction", len(self.log) - 1), self.engine.now_s)
