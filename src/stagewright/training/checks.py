"""What the options of `stagewright train` may not ask for, found before anything is opened, built or started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stagewright.data.source import need
from stagewright.errors import PlacementError, UsageError
from stagewright.plan import Plan
from stagewright.planning.options import spelled
from stagewright.runtime.launch import is_worker
from stagewright.runtime.settings import Settings
from stagewright.training.sinks import check_sinks, chosen_sinks


def check_counts(options: Mapping[str, Any]) -> None:
    """Refuses numbers below 1 where None, and not 0, is the way to say nothing."""
    for key in ("steps", "devices", "share", "epoch_images", "image_size", "num_classes"):
        if options[key] is not None and options[key] < 1:
            todo = "to see what would run, add --dry-run" if key == "steps" else "leave it out for the default"
            raise UsageError(f"{spelled(key)} is {options[key]}: expected 1 or more", todo)


def check_packages(options: Mapping[str, Any]) -> None:
    """Refuses options that need packages which are not installed, before anything is opened or built."""
    for key in ("data", "evaluation_data"):
        if options[key] not in (None, "synthetic"):
            need(f"{spelled(key)} {options[key]}", "PIL")
    check_sinks(chosen_sinks(options))


def check_hosts_here(plan: Plan, options: Mapping[str, Any]) -> None:
    """Refuses a plan with other hosts where nothing starts workers there."""
    if is_worker():  # of a launcher that knows the hosts
        return
    others = sorted({id.host for id in plan.devices} - {0})
    if others:
        what = options["plan_file"] or f"--placement {options['placement']}"
        raise PlacementError(
            f"{what} names host {others[0]}, and only host 0, this machine, is here",
            "name the hosts with --nodes host1,host2, start it under torchrun on each of them, or place all on host 0",
        )


def check_device(settings: Settings) -> None:
    """Refuses cards where torch sees none."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"--device is cuda, but torch {torch.__version__} sees no card here",
            "use --device cpu, or look at nvidia-smi and at how torch was installed",
        )
