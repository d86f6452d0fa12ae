"""Memory over time, device by device and kind by kind, from what a run did and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stagewright.cost import StageBytes
from stagewright.record import MEMORY_KINDS
from stagewright.schedule import Kind
from stagewright.simulation.engine import Log
from stagewright.simulation.program import UPDATE, Op, Program, stage_layers

GRADIENTS, ACTIVATIONS, BUFFERS, WORKSPACE = (
    MEMORY_KINDS.index(kind) for kind in ("gradients", "activations", "buffers", "workspace")
)
LAST_HALVES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
FIRST_HALVES = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


Change = tuple[float, float, int]
"""(when, bytes taken or, where negative, given back, which kind of memory)."""


class Use(NamedTuple):
    """What one device held: its peak, what that consisted of, and the course of it."""

    peak_bytes: int
    peak_parts: dict[str, int]
    times_s: tuple[float, ...]
    parts: dict[str, tuple[int, ...]]


class Ledger:
    """The changes of every worker's memory in one run."""

    def __init__(self, program: Program, log: Log) -> None:
        self.program, self.log, self.plan, self.costs = program, log, program.plan, program.costs
        self.bounds = stage_layers(self.plan, self.costs.profile)
        self.devices = [self.costs.cluster.device(id) for id in self.plan.devices]
        self._taken: dict[tuple[str, int, int, int], tuple[float, float, float]] = {}
        self.sent: list[list[Change]] = [[] for _ in self.plan.devices]
        for moved in log.moved:
            source = self.sent[program.channels[moved.channel].source]
            source.append((moved.issued_s, moved.num_bytes, BUFFERS))
            source.append((moved.stop_s, -moved.num_bytes, BUFFERS))

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

    def changes(self, worker: int) -> list[Change]:
        """All changes of one worker; of those at one moment, what is given back comes first."""
        found = [*self.sent[worker], *self.received(worker), *self.computed(worker)]
        found.sort()
        return found

    def received(self, worker: int) -> Iterator[Change]:
        """Receipt buffers: from the issue on, until forward takes the rows over or backward has used them."""
        waiting: dict[tuple[int, int], float] = {}
        for time_s, op, batch in self.log.posted[worker]:
            waiting[op.slot, batch] = waiting.get((op.slot, batch), 0.0) + op.num_bytes
            yield (time_s, op.num_bytes, BUFFERS)
        for op, batch, start_s, stop_s, _, _ in self.log.done[worker]:
            if op.slot >= 0:
                free_s = start_s if op.action.kind is Kind.FORWARD else stop_s
                yield (free_s, -waiting.get((op.slot, batch), 0.0), BUFFERS)

    def computed(self, worker: int) -> Iterator[Change]:
        """Activations, workspaces and gradients."""
        begun: set[tuple[int, int]] = set()
        for op, batch, start_s, stop_s, _, _ in self.log.done[worker]:
            stage, kind = op.action.stage, op.action.kind
            if op.code == UPDATE:
                if (stage, batch) in begun:
                    yield stop_s, -self.costs.parameter_bytes(*self.bounds[stage]), GRADIENTS
                continue
            if kind is not Kind.FORWARD and (stage, batch) not in begun:
                begun.add((stage, batch))
                yield start_s, self.costs.parameter_bytes(*self.bounds[stage]), GRADIENTS
            space, at_start, at_stop = self.taken(worker, op)
            if space:
                yield start_s, space, WORKSPACE
                yield stop_s, -space, WORKSPACE
            if at_start:
                yield start_s, at_start, ACTIVATIONS
            if at_stop:
                yield stop_s, at_stop, ACTIVATIONS

    def taken(self, worker: int, op: Op) -> tuple[float, float, float]:
        """Workspace of a forward or backward, and the activations that it takes at its start and returns at its end."""
        kind, stage = op.action.kind, op.action.stage
        key = (kind._value_, stage, op.rows, worker)
        found = self._taken.get(key)
        if found is None:
            bounds, recompute = self.bounds[stage], self.plan.stages[stage].recompute
            whole = op.rows * self.costs.held_bytes(*bounds, 1, device=self.devices[worker])
            kept = op.rows * self.costs.crossings[bounds[0]] if recompute else whole
            again = whole if recompute and kind in FIRST_HALVES else 0.0
            freed = kept + (whole if recompute else 0.0) if kind in LAST_HALVES else 0.0
            space = op.rows * self.costs.workspace_bytes(*bounds)
            found = self._taken[key] = (space, kept if kind is Kind.FORWARD else again, -freed)
        return found

    def use(self, worker: int, *, course: bool = True) -> Use:
        """The peak of one worker's device and, where wanted, its course."""
        now = [float(part) for part in self.base(worker)]
        peak, total = tuple(now), sum(now)
        most, times, parts = total, [0.0], [tuple(now)]
        for time_s, num_bytes, kind in self.changes(worker):
            now[kind] += num_bytes
            total += num_bytes
            if total > most:
                most, peak = total, tuple(now)
            if course:
                # The first point is what there was before anything ran, even if something starts at once.
                if len(times) > 1 and times[-1] == time_s:
                    parts[-1] = tuple(now)
                else:
                    times.append(time_s)
                    parts.append(tuple(now))
        whole = {name: round(part) for name, part in zip(MEMORY_KINDS, peak)}
        columns = {name: tuple(map(round, column)) for name, column in zip(MEMORY_KINDS, zip(*parts))}
        return Use(sum(whole.values()), whole, tuple(times) if course else (), columns if course else {})
