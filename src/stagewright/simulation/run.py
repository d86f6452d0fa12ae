"""Schedule × profile × cluster → record: an event simulation of every action, transfer and reduction."""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import sub

from stagewright.cluster import Cluster, format_devices
from stagewright.cost import Costs
from stagewright.plan import Plan
from stagewright.planning import PlanOptions
from stagewright.planning.choose import Score
from stagewright.planning.search import Search
from stagewright.planning.search import make_plan as search
from stagewright.profile import Profile
from stagewright.record import DeviceUse, Record
from stagewright.schedule import Schedule
from stagewright.scheduling import make_schedule
from stagewright.simulation.critical import Path
from stagewright.simulation.engine import Engine
from stagewright.simulation.loading import make_loader
from stagewright.simulation.log import Log
from stagewright.simulation.memory import Ledger
from stagewright.simulation.program import Program, make_program
from stagewright.simulation.spans import make_spans
from stagewright.simulation.steady import Steady, batches_done, batches_needed, find_steady

IMAGENET_IMAGES = 1_281_167
"""The images of an ImageNet epoch, for which epoch times are given unless another number is."""


def simulate(
    schedule: Schedule,
    profile: Profile,
    cluster: Cluster,
    *,
    data: str = "synthetic",
    num_batches: int | None = None,
    epoch_images: int | None = IMAGENET_IMAGES,
    name: str = "",
    detail: bool = True,
    costs: Costs | None = None,
) -> Record:
    """What the schedule would do on the cluster; without `detail` no spans and no memory over time, which is faster."""
    count = num_batches or batches_needed(schedule)
    with no_collection():
        return _make_record(
            make_program(schedule, profile, cluster, costs),
            count,
            data=data,
            epoch_images=epoch_images,
            name=name,
            detail=detail,
        )


@contextmanager
def no_collection() -> Iterator[None]:
    """No search for reference cycles meanwhile: there are none in the log, and looking through it doubles the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _make_record(
    program: Program, num_batches: int, *, data: str, epoch_images: int | None, name: str, detail: bool
) -> Record:
    """The record of a program's run."""
    plan, (low, high), cluster = program.plan, program.offsets, program.costs.cluster
    log = Engine(program, num_batches, make_loader(plan, cluster) if data == "records" else None).run()
    steady = find_steady(batches_done(log, num_batches), high - low, program.busiest_s)
    path = Path(program, log, steady.start_s, steady.stop_s)
    return Record(
        name=name or plan.model,
        source="simulated",
        plan=plan,
        cluster=cluster.name,
        precision=program.costs.profile.precision,
        data=data,
        epoch_samples=epoch_images,
        step_s=steady.step_s,
        step_samples=plan.batch,
        start_up_s=steady.start_s,
        devices=_device_uses(program, log, steady, detail),
        spans=make_spans(program, log) if detail else (),
        limit=limit(path.seconds),
        notes=tuple(notes(program, log, steady, path.seconds)),
    )


def _device_uses(program: Program, log: Log, steady: Steady, detail: bool) -> tuple[DeviceUse, ...]:
    """What each device did in the steady steps, and held at any time."""
    ledger, columns, uses = Ledger(program, log), log.done_columns, []
    for worker, device in enumerate(program.plan.devices):
        use, here = ledger.use(worker, course=detail), columns.edges[worker]
        uses.append(
            DeviceUse(
                device=str(device),
                stages=program.plan.stages_of[worker],
                busy_share=_busy_share(columns.starts_s[here], columns.stops_s[here], steady),
                peak_bytes=use.peak_bytes,
                peak_parts=use.peak_parts,
                memory_s=use.times_s,
                memory_parts=use.parts,
            )
        )
    return tuple(uses)


def _busy_share(starts_s: Sequence[float], stops_s: Sequence[float], steady: Steady) -> float:
    """The share of the steady steps' time in which a worker's device computed."""
    first_s, last_s = steady.start_s, steady.stop_s
    # What stops before the start or begins after the end does not count: only the outermost two can be cut.
    inside = slice(bisect_right(stops_s, first_s), bisect_right(stops_s, last_s) + 1)
    starts_s, stops_s = starts_s[inside], stops_s[inside]
    busy = sum(map(sub, stops_s, starts_s))
    if starts_s:
        busy -= max(first_s - starts_s[0], 0.0)
        busy -= min(max(stops_s[-1] - last_s, 0.0), stops_s[-1] - starts_s[-1])
    return min(max(busy / (last_s - first_s), 0.0), 1.0) if last_s > first_s else 0.0


def limit(seconds: dict[str, float]) -> str:
    """What the critical path consists of most."""
    return max(seconds, key=lambda what: seconds[what], default="nothing")


def notes(program: Program, log: Log, steady: Steady, seconds: dict[str, float]) -> Iterator[str]:
    """The critical path and what is hidden beside it, a sentence each."""
    steps = max((steady.stop_s - steady.start_s) / steady.step_s[0], 1e-9)
    total = sum(seconds.values()) or 1.0
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{what} {share / total:.0%}" for what, share in largest if share / total >= 0.005)
    yield f"critical path: {parts}"
    for stage, devices in ((n, s.devices) for n, s in enumerate(program.plan.stages) if len(s.devices) > 1):
        times = ((entry.start_s, entry.stop_s) for entry in log.reduced if entry.stage == stage)
        whole = _within(times, steady) / steps
        exposed = sum(share for what, share in seconds.items() if what.startswith(f"all-reduce of stage {stage} "))
        hidden = max(whole - exposed / steps, 0.0)
        yield f"reduce among {format_devices(devices)}: {_milliseconds(whole)}, {_milliseconds(hidden)} of it hidden"


def _within(times: Iterable[tuple[float, float]], steady: Steady) -> float:
    """How much of some stretches of time lies in the steady state."""
    return sum(max(min(stop, steady.stop_s) - max(start, steady.start_s), 0.0) for start, stop in times)


def _milliseconds(seconds: float) -> str:
    """`19 ms`, `0.42 ms`."""
    return f"{seconds * 1e3:.3g} ms"


def make_plan(profile: Profile, cluster: Cluster, options: PlanOptions, score: Score | None = None) -> Search:
    """The fastest plan that fits, by the simulator or another score."""
    return search(profile, cluster, options, score or simulator(profile, cluster))


def simulator(profile: Profile, cluster: Cluster) -> Score:
    """The simulation of any plan on this profile and cluster."""
    costs = Costs(profile, cluster)

    def score(plan: Plan) -> Record:
        return simulate(make_schedule(plan), profile, cluster, detail=False, costs=costs)

    return score
