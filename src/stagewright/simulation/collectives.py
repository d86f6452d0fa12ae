"""Reductions of gradients, bucket by bucket, and the agreement of all workers."""

from __future__ import annotations

from collections import deque
from functools import partial

from stagewright.simulation.events import Events, Worker
from stagewright.simulation.log import Reduced
from stagewright.simulation.program import Program
from stagewright.simulation.traffic import Traffic


class Collectives:
    """What has been reduced and agreed on in one run."""

    def __init__(
        self, program: Program, workers: list[Worker], events: Events, traffic: Traffic, num_batches: int
    ) -> None:
        self.program, self.workers, self.events, self.traffic = program, workers, events, traffic
        self.num_batches = num_batches
        self.reductions, self.log = program.reductions, list[Reduced]()
        self.flows = [
            traffic.make_flow(one.way.loads, one.way.bytes_per_s, over=self.arrive) if one.way else None
            for one in self.reductions
        ]
        self.ready: dict[tuple[int, int, int], int] = {}
        """How many replicas have their gradients of a bucket: (stage, batch, bucket)."""
        self.queues: list[deque[tuple[int, int, int]]] = [deque() for _ in self.reductions]
        """Buckets of each stage that wait for the one before."""
        self.reducing = [False] * len(self.reductions)
        self.unreduced: dict[tuple[int, int], int] = {}
        """How many buckets of a stage's batch are still to come."""
        self.ungiven: dict[tuple[int, int], set[int]] = {}
        """Of a stage's batch the buckets of which weights are still to come, once an update has begun."""
        self.updated: dict[tuple[int, int], int] = {}
        """How many replicas that share out states have made the update of a stage's batch."""
        self.arrived: dict[int, set[int]] = {}
        self.agreed: set[int] = set()

    def reduced_whole(self, worker: Worker, stage: int, batch: int) -> bool:
        """Whether every bucket of a stage is reduced; if not, the worker waits for the last one."""
        reduction = self.reductions[stage]
        if reduction.num_replicas > 1 and self.unreduced.get((stage, batch), reduction.num_buckets):
            worker.wait = (stage, batch)
            return False
        return True

    def all_reduced(self, worker: Worker, waits: tuple[tuple[int, int], ...], batch: int) -> bool:
        """Whether reductions of some stages are over, each of a batch so many after this one."""
        here = ((stage, batch + later) for stage, later in waits)
        return all(self.reduced_whole(worker, *each) for each in here if 0 <= each[1] < self.num_batches)

    def agree(self, worker: Worker, batch: int) -> bool:
        """Whether all workers have met: each comes when its own stages' gradients are reduced."""
        if batch in self.agreed:
            return True
        for stage in self.program.plan.stages_of[worker.number]:
            if not self.reduced_whole(worker, stage, batch):
                return False
        here = self.arrived.setdefault(batch, set())
        here.add(worker.number)
        if len(here) == len(self.workers):
            over_s = self.events.now_s + self.program.agree_s
            self.events.at(over_s, partial(self.agree_over, worker.number, batch))
        worker.wait = ("agreement", batch)
        return False

    def agree_over(self, last: int, batch: int) -> None:
        """All workers have met: they go on together."""
        self.agreed.add(batch)
        for number in sorted(self.arrived.pop(batch)):
            self.events.wake(self.workers[number], ("agreement", batch), ("worker", last))

    def bucket_ready(self, worker: int, stage: int, batch: int, bucket: int) -> None:
        """One replica has its gradients of a bucket; the last one queues the reduction."""
        key = stage, batch, bucket
        self.ready[key] = self.ready.get(key, 0) + 1
        if self.ready[key] == self.reductions[stage].num_replicas:
            del self.ready[key]
            self.queues[stage].append((batch, bucket, worker))
            self.next_bucket(stage)

    def update_over(self, worker: int, stage: int, batch: int) -> None:
        """One replica has updated its share: after the last all give out weights, those of the first layers first."""
        reduction, key = self.reductions[stage], (stage, batch)
        if reduction.sharers == 1:
            return
        self.updated[key] = self.updated.get(key, 0) + 1
        if self.updated[key] == reduction.sharers:
            buckets = range(reduction.num_buckets)
            self.ungiven[key] = set(buckets)
            self.queues[stage].extend((batch, bucket, worker) for bucket in reversed(buckets))
            self.next_bucket(stage)

    def has_weights(self, worker: Worker, stage: int, batch: int, bucket: int) -> bool:
        """Whether a worker has the weights of a bucket that forward of a batch uses; if not, it waits for them."""
        key = stage, batch - self.program.plan.versions[stage]
        is_updated = self.updated.get(key, 0) == self.reductions[stage].sharers
        if key[1] < 0 or (is_updated and bucket not in self.ungiven[key]):
            return True
        worker.wait = (*key, bucket)
        return False

    def next_bucket(self, stage: int) -> None:
        """Starts the stage's next reduction if none is under way."""
        if self.reducing[stage] or not self.queues[stage]:
            return
        batch, bucket, worker = self.queues[stage].popleft()
        reduction, flow, now_s = self.reductions[stage], self.flows[stage], self.events.now_s
        self.reducing[stage] = True
        load = (stage, batch, bucket, now_s, worker)
        if flow is not None and reduction.way is not None and reduction.bucket_bytes:
            flow.load = load
            passes = reduction.way.passes / min(2, reduction.sharers)
            self.traffic.start(flow, passes * reduction.bucket_bytes, now_s)
        else:
            self.events.at(now_s, partial(self.reduced, *load))

    def arrive(self, load: tuple[int, int, int, float, int]) -> None:
        """A reduction's flow is over; the latency follows."""
        way = self.reductions[load[0]].way
        self.events.at(self.events.now_s + (way.latency_s if way else 0.0), partial(self.reduced, *load))

    def reduced(self, stage: int, batch: int, bucket: int, start_s: float, last: int) -> None:
        """A bucket is reduced: the next one starts, and the update may go on after the last."""
        self.log.append(Reduced(stage, batch, bucket, start_s, self.events.now_s, last))
        self.reducing[stage] = False
        self.next_bucket(stage)
        key = (stage, batch)
        if key in self.ungiven:
            self.ungiven[key].discard(bucket)
            for number in self.program.plan.workers[stage]:
                self.events.wake(self.workers[number], (*key, bucket), ("reduction", len(self.log) - 1))
            return
        self.unreduced[key] = self.unreduced.get(key, self.reductions[stage].num_buckets) - 1
        if not self.unreduced[key]:
            for number in self.program.plan.workers[stage]:
                self.events.wake(self.workers[number], key, ("reduction", len(self.log) - 1))
