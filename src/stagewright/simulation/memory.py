"""Memory over time, device by device and kind by kind, from what a run did and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.cost import StageBytes
from stagewright.record import MEMORY_KINDS
from stagewright.schedule import Kind
from stagewright.scheduling import holds
from stagewright.simulation.log import Log, PlainDone
from stagewright.simulation.program import CHANNEL, NUM_BYTES, SLOT, WORK, Program, Work, stage_layers

GRADIENTS, ACTIVATIONS, BUFFERS, WORKSPACE = (
    MEMORY_KINDS.index(kind) for kind in ("gradients", "activations", "buffers", "workspace")
)
LAST_HALVES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
FIRST_HALVES = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


class Use(NamedTuple):
    """What one device held: its peak, what that consisted of, and the course of it."""

    peak_bytes: int
    peak_parts: dict[str, int]
    times_s: tuple[float, ...]
    parts: dict[str, tuple[int, ...]]


Column = NDArray[np.float64]


Changes = tuple[Column, Column, int]
"""When bytes are taken or, where negative, given back, how many, and of which kind of memory."""


class Taken(NamedTuple):
    """What an op of one work takes and gives back."""

    is_forward: bool
    workspace: float
    at_start: float
    """Activations, as it starts."""
    at_stop: float
    """Activations, as it stops: never positive."""


NOTHING_TAKEN = Taken(True, 0.0, 0.0, 0.0)
"""By an update, whose work is −1: the last of a table."""


class Ledger:
    """The changes of every worker's memory in one run."""

    def __init__(self, program: Program, log: Log) -> None:
        self.program, self.log, self.plan, self.costs = program, log, program.plan, program.costs
        self.bounds = stage_layers(self.plan, self.costs.profile)
        self.devices = [self.costs.cluster.device(id) for id in self.plan.devices]
        self.taken = np.array([*map(self.taken_by, program.works), NOTHING_TAKEN], dtype=float)
        self.slot_bytes = np.array([*program.slot_bytes, 0.0])
        self.gradients = [self.costs.parameter_bytes(*bounds) for bounds in self.bounds]
        self.backwards = {n: work.stage for n, work in enumerate(program.works) if work.kind is not Kind.FORWARD}
        self.sent, self.posted = self.transfers()

    def transfers(self) -> tuple[list[Column], list[Column]]:
        """For each worker when it issued its sendings, when they arrived and their bytes; the same for its receipts."""
        moved, num_workers = self.log.plain_moved, len(self.devices)
        ends = np.array([(one.source, one.target) for one in self.program.channels], dtype=int).reshape(-1, 2)
        sources, targets = ends[np.array([entry[0] for entry in moved], dtype=int)].T
        num_bytes = np.array([entry[1][NUM_BYTES] for entry in moved])
        sent_s, posted_s, stop_s = (np.array([entry[at] for entry in moved]) for at in (3, 4, 6))
        return (
            by_worker(np.array((sent_s, stop_s, num_bytes)), sources, num_workers),
            by_worker(np.array((posted_s, num_bytes)), targets, num_workers),
        )

    def base(self, worker: int) -> StageBytes:
        """What a worker holds before anything runs: all its stages' weights, versions, states and flat buckets."""
        held = [
            self.costs.stage_bytes(
                *self.bounds[number], rows=0, held=0, versions=stage.versions, num_replicas=len(stage.devices)
            )
            for number, stage in enumerate(self.plan.stages)
            if worker in self.plan.workers[number]
        ]
        total = StageBytes(*(sum(column) for column in zip(*held)))
        return total._replace(gradients=0, framework=self.devices[worker].framework_bytes)

    def set_aside(self, worker: int) -> StageBytes:
        """What a framework takes before anything runs if it takes all that may ever be needed."""
        held, device = holds(self.plan), self.devices[worker]
        every = []
        for number, stage in enumerate(self.plan.stages):
            if worker in self.plan.workers[number]:
                rows = max((work.rows for work in self.program.works if work.stage == number), default=0)
                how = {"versions": stage.versions, "num_replicas": len(stage.devices), "held": held[number]}
                bounds = self.bounds[number]
                every.append(
                    self.costs.stage_bytes(*bounds, rows=rows, recompute=stage.recompute, device=device, **how)
                )
        total = StageBytes(*(sum(column) for column in zip(*every)))
        return total._replace(framework=device.framework_bytes)

    def changes(self, worker: int) -> Iterator[Changes]:
        """All changes of one worker, group by group."""
        sent_s, arrived_s, sent_bytes = self.sent[worker]
        posted_s, posted_bytes = self.posted[worker]
        yield sent_s, sent_bytes, BUFFERS
        yield arrived_s, -sent_bytes, BUFFERS
        yield posted_s, posted_bytes, BUFFERS
        entries = self.log.plain_done[worker]
        if entries:
            yield self.gradient_changes(entries)
            for times_s, num_bytes, kind in self.computed(entries):
                some = num_bytes != 0
                yield times_s[some], num_bytes[some], kind

    def computed(self, entries: Sequence[PlainDone]) -> Iterator[Changes]:
        """Activations, workspaces, and the receipt buffers that forward takes over and backward has used."""
        start_s, stop_s = (np.array([entry[at] for entry in entries]) for at in (2, 3))
        is_forward, space, at_start, at_stop = self.taken[[entry[0][WORK] for entry in entries]].T
        received = self.slot_bytes[[entry[0][SLOT] for entry in entries]]
        yield np.where(is_forward, start_s, stop_s), -received, BUFFERS
        yield start_s, space, WORKSPACE
        yield stop_s, -space, WORKSPACE
        yield start_s, at_start, ACTIVATIONS
        yield stop_s, at_stop, ACTIVATIONS

    def gradient_changes(self, entries: Sequence[PlainDone]) -> Changes:
        """Gradients, which a batch's first backward of a stage takes and its update gives back."""
        stages, gradients = self.backwards, self.gradients
        # The first of them stays, for it comes last.
        begun = {(stages[e[0][WORK]], e[1]): e[2] for e in reversed(entries) if e[0][WORK] in stages}
        updates = [(op[CHANNEL], batch, stop_s) for op, batch, _, stop_s, _, _ in entries if op[WORK] < 0]
        found = [(start_s, gradients[stage]) for (stage, _), start_s in begun.items()]
        found += [(stop_s, -gradients[stage]) for stage, batch, stop_s in updates if (stage, batch) in begun]
        times_s, num_bytes = np.array(found, dtype=float).reshape(-1, 2).T
        return times_s, num_bytes, GRADIENTS

    def taken_by(self, work: Work) -> Taken:
        """Workspace of a forward or backward, and the activations that it takes at its start and returns at its end."""
        kind, stage, rows, device = work
        bounds, recompute = self.bounds[stage], self.plan.stages[stage].recompute
        whole = rows * self.costs.held_bytes(*bounds, 1, device=device)
        kept = rows * self.costs.crossings[bounds[0]] if recompute else whole
        again = whole if recompute and kind in FIRST_HALVES else 0.0
        freed = kept + (whole if recompute else 0.0) if kind in LAST_HALVES else 0.0
        is_forward = kind is Kind.FORWARD
        space = rows * self.costs.workspace_bytes(*bounds)
        return Taken(is_forward, space, kept if is_forward else again, -freed)

    def use(self, worker: int, *, course: bool = True) -> Use:
        """The peak of one worker's device and, where wanted, its course."""
        base = self.base(worker)
        times_s, num_bytes, kinds = in_order(self.changes(worker))
        held = np.zeros((len(base), len(times_s) + 1))
        held[:, 0], held[kinds, np.arange(1, len(times_s) + 1)] = base, num_bytes
        np.cumsum(held, axis=1, out=held)
        most = np.cumsum(np.append(float(sum(base)), num_bytes)).argmax()
        peak = held[:, most].tolist()
        if self.devices[worker].sets_aside:
            peak = [max(part, float(aside)) for part, aside in zip(peak, self.set_aside(worker))]
        whole = {name: round(part) for name, part in zip(MEMORY_KINDS, peak)}
        times, parts = course_of(times_s, held) if course else ((), {})
        return Use(sum(whole.values()), whole, times, parts)


def by_worker(columns: Column, workers: NDArray[np.int64], num_workers: int) -> list[Column]:
    """The columns cut into those of each worker, the order kept."""
    order = np.argsort(workers, kind="stable")
    return np.split(columns[:, order], np.searchsorted(workers[order], np.arange(1, num_workers)), axis=1)


def in_order(changes: Iterator[Changes]) -> tuple[Column, Column, NDArray[np.int64]]:
    """Times, bytes and kinds of all changes by time; of those at one moment, what is given back comes first."""
    times, sizes, kinds = zip(*changes)
    times_s, num_bytes = np.concatenate(times), np.concatenate(sizes)
    kind = np.repeat(kinds, [len(each) for each in times])
    order = np.lexsort((kind, num_bytes, times_s))
    return times_s[order], num_bytes[order], kind[order]


def course_of(times_s: Column, held: Column) -> tuple[tuple[float, ...], dict[str, tuple[int, ...]]]:
    """When memory changed, and kind by kind what was held from then on.

    The first point is what there was before anything ran, even if something starts at once.
    """
    is_last = np.ones(len(times_s) + 1, dtype=bool)
    is_last[1:-1] = times_s[1:] != times_s[:-1]
    points = np.rint(held[:, is_last]).astype(int)
    times = (0.0, *times_s[is_last[1:]].tolist())
    return times, {name: tuple(part) for name, part in zip(MEMORY_KINDS, points.tolist())}
