"""A run as one of its workers has it, and the record of it from what each worker saw."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stagewright.cluster import DeviceId
from stagewright.errors import RunError
from stagewright.models import Layered
from stagewright.record import DeviceUse, Point, Record, Source, Span
from stagewright.runtime.feed import Feed
from stagewright.runtime.launch.environment import this_command
from stagewright.runtime.run_folder import RunFolder
from stagewright.runtime.safety.watchdog import Watchdog
from stagewright.runtime.settings import Settings
from stagewright.runtime.weights import OptimizerMaker
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, gather_json
from stagewright.schedule import COMPUTE, Schedule
from stagewright.training.job import Job
from stagewright.training.recipes import Recipe

Rows = Callable[[int, int, int], tuple[Sequence[Tensor], Sequence[Tensor]]]
MakeOptimizer = OptimizerMaker


@dataclass
class Run:
    """Everything one worker's run needs."""

    schedule: Schedule
    layered: Layered
    job: Job
    settings: Settings
    recipe: Recipe | MakeOptimizer
    data: Feed | Rows | None
    evaluation: Feed | None
    cluster: str
    source: Source
    folder: Path
    world: World
    own: RunFolder | None = None
    """Which run this is."""
    dog: Watchdog = field(default_factory=lambda: Watchdog(math.inf, math.inf, str, is_on=False))


COMMAND = "STAGEWRIGHT_COMMAND"
"""The variable that tells workers what was typed: their own command line names the configuration file."""
_COMPUTE_KINDS = {kind.value for kind in COMPUTE}


def gather(run: Run, worker: Worker, points: Sequence[Point], sample_tokens: float | None = None) -> Record:
    """The record of the run, from what each worker saw."""
    own = {
        "spans": [list(span) for span in worker.stopwatch.spans()], "steps": worker.stopwatch.step_s(),
        "peak": peak_bytes(run.world.device), "driver": driver_bytes(run.world.device),
        "points": [point.__dict__ for point in points],
    }  # fmt: skip
    told = gather_json(own, run.world.control, run.world.size)
    steps = told[0]["steps"]
    everything = [Span(*span) for each in told for span in each["spans"]]
    zero = min((span.start_s for span in everything), default=0.0)
    moved = tuple(span._replace(start_s=span.start_s - zero, stop_s=span.stop_s - zero) for span in everything)
    plan = run.schedule.plan
    traced_s = sum(steps[-run.settings.trace_steps :] if run.settings.trace_steps else []) or 1.0
    return Record(
        name=run.job.name,
        source=run.source,
        plan=plan,
        cluster=run.cluster,
        precision=run.settings.precision,
        data="synthetic" if run.data is None else "records",
        epoch_samples=run.job.epoch_images,
        step_s=tuple(steps),
        step_samples=plan.batch,
        sample_tokens=sample_tokens,
        devices=tuple(
            _device_use(run.schedule, number, id, told[number], moved, traced_s)
            for number, id in enumerate(plan.devices)
        ),
        spans=moved,
        points=tuple(Point(**point) for each in told for point in each["points"]),
        command=typed_command(),
        environment={"torch": torch.__version__, "device": _device_name(run.world.device)},
    )


def typed_command() -> str:
    """The command line that began the run, where there is one: a worker is told it."""
    try:
        return os.environ.get(COMMAND) or " ".join(this_command()[1:])
    except RunError:
        return ""


def _device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _device_use(
    schedule: Schedule, number: int, id: DeviceId, told: Mapping[str, Any], spans: Sequence[Span], traced_s: float
) -> DeviceUse:
    """What one device did, from the spans of the traced steps."""
    stages = tuple(stage for stage, members in enumerate(schedule.plan.workers) if number in members)
    busy = sum(span.stop_s - span.start_s for span in spans if span.worker == number and span.kind in _COMPUTE_KINDS)
    share = min(1.0, busy / max(traced_s, 1e-9))
    return DeviceUse(
        device=str(id), stages=stages, busy_share=share, peak_bytes=told["peak"], driver_bytes=told["driver"]
    )


def peak_bytes(device: torch.device) -> int:
    """The most memory that this worker had: of its card, by torch's allocator, or of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def driver_bytes(device: torch.device) -> int | None:
    """What the driver shows as used on a card, by whomever; None without a card, or without nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # Cards are asked for by name: CUDA_VISIBLE_DEVICES changes torch's numbers, not the driver's.
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return int(pynvml.nvmlDeviceGetMemoryInfo(card).used)
    except pynvml.NVMLError:
        return None


def memory_figures(device: torch.device) -> dict[str, int]:
    """Both counts under the names that events use; what cannot be known is left out."""
    found = {"memory_bytes": peak_bytes(device), "driver_bytes": driver_bytes(device)}
    return {name: value for name, value in found.items() if value is not None}
