"""Schedule × profile × cluster → record: an event simulation of every action, transfer and reduction.

Start-up and steady state are told apart from when each batch was done.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import sub
from typing import NamedTuple

from stagewright.cluster import Cluster, format_devices
from stagewright.cost import Costs
from stagewright.plan import Plan
from stagewright.planning import PlanOptions
from stagewright.planning.search import Score, Search
from stagewright.planning.search import make_plan as search
from stagewright.profile import Profile
from stagewright.record import DeviceUse, Record
from stagewright.schedule import Schedule
from stagewright.scheduling import make_schedule
from stagewright.simulation.critical import Path
from stagewright.simulation.engine import Engine
from stagewright.simulation.loading import Loader
from stagewright.simulation.log import Log
from stagewright.simulation.memory import Ledger
from stagewright.simulation.program import Code, Program, make_program
from stagewright.system import OWN, System

IMAGENET_IMAGES = 1_281_167
"""The images of an ImageNet epoch, for which epoch times are given unless another number is."""


def simulate(
    schedule: Schedule, profile: Profile, cluster: Cluster, *, data: str = "synthetic", num_batches: int | None = None,
    epoch_images: int | None = IMAGENET_IMAGES, name: str = "", detail: bool = True, costs: Costs | None = None,
    system: System = OWN,
) -> Record:  # fmt: skip
    """What the schedule would do on the cluster; without `detail` no spans and no memory over time, which is faster."""
    epoch = epoch_images if profile.sample_name == "images" or epoch_images != IMAGENET_IMAGES else None
    plan, (low, high), count = schedule.plan, schedule.offsets, num_batches or _batches_needed(schedule)
    with no_collection():
        program = make_program(schedule, profile, cluster, costs or Costs(profile, cluster, system))
        log = Engine(program, count, Loader(plan, cluster) if data == "records" else None).run()
        steady = find_steady(_batches_done(log, count), high - low, program.busiest_s)
        path = Path(program, log, steady.start_s, steady.stop_s)
        return Record(
            name=name or plan.model, source="simulated", plan=plan, cluster=program.costs.cluster.name, data=data,
            precision=program.costs.profile.precision, epoch_samples=epoch, step_samples=plan.batch,
            sample_name=profile.sample_name, sample_tokens=profile.sample_tokens,
            step_s=steady.step_s, start_up_s=steady.start_s, devices=_device_uses(program, log, steady, detail),
            spans=log.spans(program) if detail else (), notes=tuple(_notes(program, log, steady, path.seconds)),
            limit=max(path.seconds, key=lambda what: path.seconds[what], default="nothing"),
        )  # fmt: skip


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


class _Steady(NamedTuple):
    """The steady part of a run."""

    step_s: tuple[float, ...]
    start_s: float
    stop_s: float


def _batches_needed(schedule: Schedule) -> int:
    """How many batches show the steady state: start-up, a few periods, and the end where the pipeline drains."""
    low, high = schedule.offsets
    return (
        4 if low == high == 0 and schedule.plan.is_synchronous else 8 + 3 * (high - low + max(schedule.plan.versions))
    )


def _batches_done(log: Log, num_batches: int) -> list[float]:
    """When the last update of each batch was over."""
    done, columns, update = [0.0] * num_batches, log.done_columns, Code.UPDATE
    for at in [number for number, op in enumerate(columns.ops) if op.code is update]:
        batch = columns.batches[at]
        done[batch] = max(done[batch], columns.stops_s[at])
    return done


def find_steady(done: Sequence[float], drain: int, least_s: float = 0.0) -> _Steady:
    """The steps that repeat, `drain` batches before the end left out; the second half where none repeat.

    done   │··5···│··4··│··3··│··3··│··3··│·1│      start-up 5 + 4, then steps of 3; the last one drains

    While a long pipeline fills, batches can end faster than a worker has time for: no step is shorter than `least_s`.
    """
    found = _repeating(done, drain)
    return found._replace(step_s=tuple(max(step_s, least_s) for step_s in found.step_s))


def _repeating(done: Sequence[float], drain: int) -> _Steady:
    last = max(len(done) - drain, min(len(done), 2))
    if last < 2 or done[last // 2 - 1] == done[last - 1]:  # too few to tell: stale batches may even end together
        return _Steady((done[last - 1] / last,), 0.0, done[last - 1])
    period = next((count for count in range(1, 5) if _repeats(done[:last], count)), None)
    if period is None:
        first = last // 2
        steps: tuple[float, ...] = ((done[last - 1] - done[first - 1]) / (last - first),)
    else:
        first = last - period
        while first > 1 and _same_step(done, first - 1, period):
            first -= 1
        steps = tuple((done[at] - done[at - period]) / period for at in range(first + period - 1, last))
    return _Steady(steps, done[first - 1], done[last - 1])


def _repeats(done: Sequence[float], period: int) -> bool:
    """Whether the last steps show this period: each of them equals the one a period before."""
    later = range(len(done) - 2 * period, len(done) - period)
    return len(done) >= 2 * period + 2 and all(_same_step(done, at, period) for at in later)


def _same_step(done: Sequence[float], at: int, period: int) -> bool:
    """Whether the step that ends with batch `at` takes as long as the one a period later."""
    if at < 1 or at + period >= len(done):
        return False
    here, later = done[at] - done[at - 1], done[at + period] - done[at + period - 1]
    return abs(here - later) <= 1e-9 * done[-1]


def _device_uses(program: Program, log: Log, steady: _Steady, detail: bool) -> tuple[DeviceUse, ...]:
    """What each device did in the steady steps, and held at any time."""
    ledger, columns, uses = Ledger(program, log), log.done_columns, []
    for worker, device in enumerate(program.plan.devices):
        use, here = ledger.use(worker, course=detail), columns.edges[worker]
        busy_share = _busy_share(columns.starts_s[here], columns.stops_s[here], steady)
        uses.append(DeviceUse(
            device=str(device), stages=program.plan.stages_of[worker], busy_share=busy_share,
            peak_bytes=use.peak_bytes, peak_parts=use.peak_parts, memory_s=use.times_s, memory_parts=use.parts,
        ))  # fmt: skip
    return tuple(uses)


def _busy_share(starts_s: Sequence[float], stops_s: Sequence[float], steady: _Steady) -> float:
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


def _notes(program: Program, log: Log, steady: _Steady, seconds: dict[str, float]) -> Iterator[str]:
    """The critical path and what is hidden beside it, a sentence each."""
    steps = max((steady.stop_s - steady.start_s) / steady.step_s[0], 1e-9)
    total = sum(seconds.values()) or 1.0
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{what} {share / total:.0%}" for what, share in largest if share / total >= 0.005)
    yield f"critical path: {parts}"
    for stage, devices in ((n, s.devices) for n, s in enumerate(program.plan.stages) if len(s.devices) > 1):
        times = ((entry.start_s, entry.stop_s) for entry in log.reduced if entry.stage == stage)
        inside = (max(min(stop, steady.stop_s) - max(start, steady.start_s), 0.0) for start, stop in times)
        whole = sum(inside) / steps
        exposed = sum(share for what, share in seconds.items() if what.startswith(f"all-reduce of stage {stage} "))
        hidden = max(whole - exposed / steps, 0.0)
        yield f"reduce among {format_devices(devices)}: {whole * 1e3:.3g} ms, {hidden * 1e3:.3g} ms of it hidden"
    if program.costs.system != OWN:
        yield program.costs.system.in_words()
    if program.plan.sharing:
        yield program.plan.sharing


def make_plan(
    profile: Profile, cluster: Cluster, options: PlanOptions, score: Score | None = None, system: System = OWN
) -> Search:
    """The fastest plan that fits, by the simulator or another score."""
    return search(profile, cluster, options, score or simulator(profile, cluster, system), system)


def simulator(profile: Profile, cluster: Cluster, system: System = OWN) -> Score:
    """The simulation of any plan on this profile and cluster, as a system works."""
    costs = Costs(profile, cluster, system)

    def score(plan: Plan) -> Record:
        return simulate(make_schedule(plan), profile, cluster, detail=False, costs=costs)

    return score
