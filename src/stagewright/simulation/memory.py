"""Memory over time, device by device and kind by kind, from what a run did and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.cluster import Device
from stagewright.cost import handled_by_each
from stagewright.memory import StageBytes
from stagewright.policy import holds
from stagewright.record import MEMORY_KINDS
from stagewright.schedule import Kind
from stagewright.simulation.log import Log
from stagewright.simulation.program import Computation, Program

_GRADIENTS, _ACTIVATIONS, _BUFFERS, _WORKSPACE, _ALLOCATOR = (
    MEMORY_KINDS.index(kind) for kind in ("gradients", "activations", "buffers", "workspace", "allocator")
)
_LAST_HALVES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
_FIRST_HALVES = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


class _Use(NamedTuple):
    """What one device held: its peak, what that consisted of, and the course of it."""

    peak_bytes: int
    peak_parts: dict[str, int]
    times_s: tuple[float, ...]
    parts: dict[str, tuple[int, ...]]


_Column = NDArray[Any]


class _Changes(NamedTuple):
    """Memory that is taken or, where negative, given back: by which worker, when, how many bytes, of which kind."""

    workers: _Column
    times_s: _Column
    num_bytes: _Column
    kinds: _Column


class Ledger:
    """The changes of every worker's memory in one run."""

    def __init__(self, program: Program, log: Log) -> None:
        self.program, self.log, self.plan, self.costs = program, log, program.plan, program.costs
        self.bounds = program.bounds
        self.devices = [self.costs.cluster.device(id) for id in self.plan.devices]
        self.microbatches = [
            handled_by_each(self.plan.policy, self.plan.route, self.plan.num_microbatches, replicas).microbatches
            for replicas in self.plan.replicas
        ]
        # Of an update, whose work is −1, the last row: nothing.
        self.taken = np.array([*map(self.taken_by, program.works), (1.0, *[0.0] * 4)])
        self.slot_bytes = np.array([*program.slot_bytes, 0.0])
        self.gradients = np.array([
            0 if replicas > 1 and count == 1 else self.costs.gradient_bytes(*bounds)
            for bounds, replicas, count in zip(self.bounds, self.plan.replicas, self.microbatches)
        ], dtype=float)  # fmt: skip
        """What a batch's gradients of each stage are until its update, buckets left out."""
        self.updates = np.array([
            self.costs.update_bytes(*bounds, replicas, sharded=sharded)
            for bounds, replicas, sharded in zip(self.bounds, self.plan.replicas, self.plan.shard_optimizer)
        ])  # fmt: skip
        self.changes, self.edges = self.by_worker()
        self.known: dict[object, _Use] = {}
        self.known_bases: dict[object, StageBytes] = {}

    def by_worker(self) -> tuple[_Changes, list[int]]:
        """All changes, worker by worker, and where those of each worker begin and end."""
        columns = [np.concatenate(column) for column in zip(*self.moved(), *self.computed())]
        order = np.argsort(columns[0], kind="stable")
        found = _Changes(*(column[order] for column in columns))
        return found, np.searchsorted(found.workers, np.arange(len(self.devices) + 1)).tolist()

    def moved(self) -> Iterator[_Changes]:
        """Buffers, taken when a receipt or a sending is issued, given back when a sending has arrived."""
        moved = self.log.moved_columns
        ends = np.array([(one.source, one.target) for one in self.program.channels], dtype=int).reshape(-1, 2)
        sources, targets = ends[np.array(moved.channel, dtype=int)].T
        num_bytes = np.array([op.num_bytes for op in moved.op])
        sent_s, posted_s, stops_s = map(np.array, (moved.sent_s, moved.posted_s, moved.stop_s))
        kinds = np.full(len(num_bytes), _BUFFERS)
        yield _Changes(sources, sent_s, num_bytes, kinds)
        yield _Changes(sources, stops_s, -num_bytes, kinds)
        yield _Changes(targets, posted_s, num_bytes, kinds)

    def computed(self) -> Iterator[_Changes]:
        """Activations, workspaces, gradients, and the receipt buffers that forward takes over and backward has used."""
        done = self.log.done_columns
        workers = np.repeat(np.arange(len(self.devices)), [here.stop - here.start for here in done.edges])
        starts_s, stops_s = np.array(done.starts_s), np.array(done.stops_s)
        works, first_slot = np.array([op.work for op in done.ops]), np.array([op.slot for op in done.ops])
        slot = np.where(first_slot < 0, -1, first_slot + [action.microbatch for action in done.actions])
        is_forward, space, at_start, at_stop, made = self.taken[works].T
        begins, more, ends = self.batch_edges(workers, is_forward == 0, works < 0, made)
        stages = np.array([action.stage for action in done.actions])
        space = np.where(works < 0, self.updates[stages], space)
        for times_s, num_bytes, kind in (
            (np.where(is_forward, starts_s, stops_s), -self.slot_bytes[slot], _BUFFERS),
            (starts_s, begins, _GRADIENTS),
            (stops_s, more, _GRADIENTS),
            (stops_s, -ends, _GRADIENTS),
            (starts_s, space, _WORKSPACE),
            (stops_s, -space, _WORKSPACE),
            (starts_s, at_start, _ACTIVATIONS),
            (stops_s, at_stop, _ACTIVATIONS),
        ):
            some = np.flatnonzero(num_bytes)
            yield _Changes(workers[some], times_s[some], num_bytes[some], np.full(len(some), kind))

    def batch_edges(
        self, workers: _Column, is_backward: _Column, is_update: _Column, made: _Column
    ) -> tuple[_Column, _Column, _Column]:
        """The gradients that ops take and give back: a batch's first backward of a stage as it starts, the rest of them
        as it stops, and its update.
        """
        done = self.log.done_columns
        stages, batches = np.array([action.stage for action in done.actions]), np.array(done.batches)
        batch_of = (workers * len(self.bounds) + stages) * (batches.max() + 1) + batches
        backwards, updates = np.flatnonzero(is_backward), np.flatnonzero(is_update)
        begun, first = np.unique(batch_of[backwards], return_index=True)
        begins, more, ends = np.zeros(len(stages)), np.zeros(len(stages)), np.zeros(len(stages))
        at = backwards[first]
        begins[at], more[at] = made[at], self.gradients[stages[at]] - made[at]
        over = updates[np.isin(batch_of[updates], begun)]
        ends[over] = self.gradients[stages[over]]
        return begins, more, ends

    def base(self, worker: int) -> StageBytes:
        """What a worker holds before anything runs: all its stages' weights, versions, states and flat buckets."""
        stages, framework = self.plan.stages_of[worker], self.devices[worker].framework_bytes
        key = stages, framework
        if key not in self.known_bases:
            held = [self.stage_bytes(stage, rows=0, held=0) for stage in stages]
            device = self.devices[worker]
            idle = _total(held, device)._replace(gradients=0, activations=0, workspace=0)
            self.known_bases[key] = idle._replace(allocator=device.library_bytes)
        return self.known_bases[key]

    def stage_bytes(self, number: int, **how: Any) -> StageBytes:
        """What one replica of a stage holds."""
        stage, bounds = self.plan.stages[number], self.bounds[number]
        return self.costs.stage_bytes(
            *bounds, versions=stage.versions, num_replicas=len(stage.devices),
            sharded=self.plan.shard_optimizer[number], microbatches=self.microbatches[number], **how,
        )  # fmt: skip

    def set_aside(self, worker: int) -> StageBytes:
        """What a framework takes before anything runs if it takes all that may ever be needed."""
        held, device = holds(self.plan), self.devices[worker]
        every = []
        for number in self.plan.stages_of[worker]:
            rows = max((work.rows for work in self.program.works if work.stage == number), default=0)
            how = {"held": held[number], "recompute": self.plan.stages[number].recompute, "device": device}
            every.append(self.stage_bytes(number, rows=rows, **how))
        return _total(every, device)

    def taken_by(self, work: Computation) -> tuple[float, float, float, float, float]:
        """Of a forward or backward: whether it is a forward, its workspace, the change of activations as it starts and,
        never positive, as it stops; and the gradients that a batch's first backward has made where it takes most.
        """
        kind, number, rows, device = work
        bounds, stage = self.bounds[number], self.plan.stages[number]
        many, adds = len(stage.devices) > 1, self.microbatches[number] > 1 or kind is not Kind.BACKWARD
        whole = kept = rows * self.costs.held_bytes(*bounds, 1, stage.recompute, device)
        if stage.recompute:
            kept = rows * self.costs.held_bytes(*bounds, 2, True, device) - whole
        peak = self.costs.backward_peak(*bounds, rows, adds=adds, many=many)
        if kind is Kind.FORWARD:
            return 1.0, peak.workspace, kept, 0.0, 0.0
        again = whole - kept if stage.recompute and kind in _FIRST_HALVES else 0.0
        freed = whole if kind in _LAST_HALVES else 0.0
        # Where a backward takes most, it has let go of what later layers saved.
        gone = 0.0
        if kind is Kind.BACKWARD:
            saved = rows * self.costs.saved_bytes(*bounds)
            gone = (saved - peak.saved) * device.saved_factor
        return 0.0, peak.workspace, again - gone, gone - freed, peak.gradients

    def use(self, worker: int, *, course: bool = True) -> _Use:
        """The peak of one worker's device and, where wanted, its course."""
        here = slice(*self.edges[worker : worker + 2])
        base, mine = self.base(worker), _Changes(*(column[here] for column in self.changes))
        aside = self.set_aside(worker) if self.devices[worker].sets_aside else None
        # Replicas that did the same at the same times held the same.
        key = (course, base, aside, self.devices[worker].kept_share, *(column.tobytes() for column in mine[1:]))
        if key not in self.known:
            # Of changes at one moment, what is given back comes first.
            order = np.lexsort((mine.kinds, mine.num_bytes, mine.times_s))
            share = self.devices[worker].kept_share
            self.known[key] = _use_of(base, _Changes(*(column[order] for column in mine)), aside, share, course=course)
        return self.known[key]


def _total(every: Sequence[StageBytes], device: Device) -> StageBytes:
    """What all stages of a worker hold; the framework is there once."""
    return StageBytes(*(sum(column) for column in zip(*every)))._replace(framework=device.framework_bytes)


def _use_of(base: StageBytes, changes: _Changes, aside: StageBytes | None, kept_share: float, *, course: bool) -> _Use:
    """What a device held that had `base` at first, and at least `aside` of each kind set aside."""
    count = len(changes.times_s)
    held = np.zeros((len(base), count + 1))
    held[:, 0], held[changes.kinds, np.arange(1, count + 1)] = base, changes.num_bytes
    np.cumsum(held, axis=1, out=held)
    most = np.cumsum(np.append(float(sum(base)), changes.num_bytes)).argmax()
    held[_ALLOCATOR] += kept_share * held[[_GRADIENTS, _ACTIVATIONS, _WORKSPACE], most].sum()  # never given back
    peak = held[:, most].tolist()
    if aside is not None:
        peak = [max(part, float(other)) for part, other in zip(peak, aside)]
    whole = {name: round(part) for name, part in zip(MEMORY_KINDS, peak)}
    times_s, parts = _course_of(changes.times_s, held) if course else ((), {})
    return _Use(sum(whole.values()), whole, times_s, parts)


def _course_of(times_s: _Column, held: _Column) -> tuple[tuple[float, ...], dict[str, tuple[int, ...]]]:
    """When memory changed, and kind by kind what was held from then on.

    The first point is what there was before anything ran, even if something starts at once.
    """
    is_last = np.ones(len(times_s) + 1, dtype=bool)
    is_last[1:-1] = times_s[1:] != times_s[:-1]
    points = np.rint(held[:, is_last]).astype(int)
    times = (0.0, *times_s[is_last[1:]].tolist())
    return times, {name: tuple(part) for name, part in zip(MEMORY_KINDS, points.tolist())}
