"""What a run tells of its plan, its memory and its end."""

from __future__ import annotations

import os
import resource
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from stagewright.cluster import format_devices
from stagewright.models import Layered
from stagewright.plan import Plan
from stagewright.record import Record
from stagewright.runtime.safety.flight import Trace
from stagewright.training.config import Job


def plan_figures(plan: Plan, job: Job, layered: Layered) -> dict[str, Any]:
    """What runs where and how long, and the rate that was predicted of it."""
    stages = [
        {"devices": format_devices(stage.devices), "layers": [stage.layers[0], stage.layers[-1]]}
        for stage in plan.stages
    ]
    return {
        "model": plan.model, "stages": stages, "unit": _unit(layered), "first_step": job.first_step,
        "steps": job.steps, "steps_per_epoch": job.steps_per_epoch, **_prediction(plan),
    }  # fmt: skip


def end_figures(record: Record, layered: Layered, folder: Path, *, is_saved: bool) -> dict[str, Any]:
    """The loss at both ends, the rate, the folder, and the commands that go on from there."""
    shown = os.path.relpath(folder)
    if shown.startswith(".."):
        shown = str(folder)
    losses = [point for point in record.points if point.name == "loss"]
    loss = {"loss": [losses[0].value, losses[-1].value], "after": losses[-1].step} if losses else {}
    export = [shlex.join(("stagewright", "export", shown, "-o", "model.safetensors"))] if is_saved else []
    return {
        **loss, "unit": _unit(layered), "tokens": record.sample_tokens, "samples_per_s": record.samples_per_s,
        "step_s": record.median_step_s, "num_steps": len(record.step_s), "epoch_s": record.epoch_s,
        **_prediction(record.plan), "folder": shown, "next": [shlex.join(("stagewright", "report", shown)), *export],
    }  # fmt: skip


def _unit(layered: Layered) -> str:
    """What rows are called: images, tokens, or samples where they are neither."""
    return "tokens" if layered.row_tokens else layered.sample_name


def _prediction(plan: Plan) -> dict[str, Any]:
    step_s = plan.predicted_step_s
    return {"predicted": None if step_s is None else plan.batch / step_s, "predicted_on": plan.predicted_on}


def memory_bytes(device: torch.device) -> int:
    """The most memory that this worker had: of its card by torch's allocator, or of its process."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_reserved(device)


def memory_figures(device: torch.device) -> dict[str, int]:
    """The same under the name that events use, and, where nvidia-ml-py is there, what the driver shows of the card."""
    found = {"memory_bytes": memory_bytes(device)}
    if device.type == "cuda":
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                # Cards are asked for by name: CUDA_VISIBLE_DEVICES changes torch's numbers, not the driver's.
                card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
                found["driver_bytes"] = int(pynvml.nvmlDeviceGetMemoryInfo(card).used)
    return found


def memory_by_stage(plan: Plan, folder: Path) -> dict[str, list[int]]:
    """The most that a worker of each stage has noted; 0 where no recorder of a stage is seen from here."""
    noted = [Trace.memory_of(folder, worker) for worker in range(len(plan.devices))]
    return {"stage_memory_bytes": [max(noted[worker] for worker in members) for members in plan.workers]}
