"""Memory over time, device by device and kind by kind, from what a run did and when."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from stagewright.cost import StageBytes
from stagewright.record import MEMORY_KINDS
from stagewright.schedule import Kind
from stagewright.scheduling import holds
from stagewright.simulation.log import BUFFERS, Change, Log
from stagewright.simulation.program import Program, Work, stage_layers

GRADIENTS, ACTIVATIONS, WORKSPACE = (MEMORY_KINDS.index(kind) for kind in ("gradients", "activations", "workspace"))
LAST_HALVES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
FIRST_HALVES = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


class Use(NamedTuple):
    """What one device held: its peak, what that consisted of, and the course of it."""

    peak_bytes: int
    peak_parts: dict[str, int]
    times_s: tuple[float, ...]
    parts: dict[str, tuple[int, ...]]


class Taken(NamedTuple):
    """What an op of one work takes and gives back."""

    is_forward: bool
    stage: int
    workspace: float
    at_start: float
    """Activations, as it starts."""
    at_stop: float
    """Activations, as it stops: never positive."""


class Ledger:
    """The changes of every worker's memory in one run."""

    def __init__(self, program: Program, log: Log) -> None:
        self.program, self.log, self.plan, self.costs = program, log, program.plan, program.costs
        self.bounds = stage_layers(self.plan, self.costs.profile)
        self.devices = [self.costs.cluster.device(id) for id in self.plan.devices]
        self.taken = [self.taken_by(work) for work in program.works]
        self.gradients = [self.costs.parameter_bytes(*bounds) for bounds in self.bounds]

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

    def changes(self, worker: int) -> list[Change]:
        """All changes of one worker; of those at one moment, what is given back comes first."""
        found = [*self.log.buffers[worker], *self.computed(worker)]
        found.sort()
        return found

    def computed(self, worker: int) -> Iterator[Change]:
        """Activations, workspaces, gradients, and the receipt buffers that forward takes over and backward has used."""
        begun: set[tuple[int, int]] = set()
        slot_bytes, taken = self.program.slot_bytes, self.taken
        for op, batch, start_s, stop_s, _, _ in self.log.done[worker]:
            _, _, _, slot, stage, _, work, _, _, _ = op
            if work < 0:
                if (stage, batch) in begun:
                    yield stop_s, -self.gradients[stage], GRADIENTS
                continue
            is_forward, stage, space, at_start, at_stop = taken[work]
            if not is_forward and (stage, batch) not in begun:
                begun.add((stage, batch))
                yield start_s, self.gradients[stage], GRADIENTS
            if slot >= 0 and slot_bytes[slot]:
                yield (start_s if is_forward else stop_s), -slot_bytes[slot], BUFFERS
            if space:
                yield start_s, space, WORKSPACE
                yield stop_s, -space, WORKSPACE
            if at_start:
                yield start_s, at_start, ACTIVATIONS
            if at_stop:
                yield stop_s, at_stop, ACTIVATIONS

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
        return Taken(is_forward, stage, space, kept if is_forward else again, -freed)

    def use(self, worker: int, *, course: bool = True) -> Use:
        """The peak of one worker's device and, where wanted, its course."""
        base, changes = self.base(worker), self.changes(worker)
        totals = list(accumulate(map(itemgetter(1), changes), initial=float(sum(base))))
        most = totals.index(max(totals))
        peak = [float(part) for part in base]
        for _, num_bytes, kind in changes[:most]:
            peak[kind] += num_bytes
        if self.devices[worker].sets_aside:
            peak = [max(part, float(aside)) for part, aside in zip(peak, self.set_aside(worker))]
        whole = {name: round(part) for name, part in zip(MEMORY_KINDS, peak)}
        times, parts = course_of(base, changes) if course else ((), {})
        return Use(sum(whole.values()), whole, times, parts)


def course_of(base: StageBytes, changes: list[Change]) -> tuple[tuple[float, ...], dict[str, tuple[int, ...]]]:
    """When memory changed, and kind by kind what was held from then on.

    The first point is what there was before anything ran, even if something starts at once.
    """
    times = [change[0] for change in changes]
    ends = [n for n, (here, there) in enumerate(zip(times, times[1:]), start=1) if here != there]
    if times:
        ends.append(len(times))
    parts: dict[str, tuple[int, ...]] = {}
    changing = {change[2] for change in changes}
    for kind, (name, start) in enumerate(zip(MEMORY_KINDS, base)):
        if kind not in changing:
            parts[name] = (start,) * (len(ends) + 1)
            continue
        held = list(accumulate((c[1] if c[2] == kind else 0.0 for c in changes), initial=float(start)))
        parts[name] = (start, *(round(held[n]) for n in ends))
    return (0.0, *(times[n - 1] for n in ends)), parts
