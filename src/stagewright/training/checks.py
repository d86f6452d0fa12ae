"""What a configuration may not ask for, found before anything is opened, built or started."""

from __future__ import annotations

import torch

from stagewright.data.source import need
from stagewright.errors import PlacementError, UsageError
from stagewright.plan import Plan
from stagewright.runtime.launch.environment import is_worker
from stagewright.runtime.settings import Settings
from stagewright.training.config import Config
from stagewright.training.sinks import check_sinks


def check_packages(config: Config) -> None:
    """Refuses options that need packages which are not installed, before anything is opened or built."""
    for folder in config.data.folders:
        need(f"{'--data' if folder == config.data.data else '--evaluation-data'} {folder}", "PIL")
    check_sinks(config.job.sinks)


def check_hosts_here(plan: Plan, config: Config) -> None:
    """Refuses a plan with other hosts where nothing starts workers there."""
    if is_worker():  # of a launcher that knows the hosts
        return
    others = sorted({id.host for id in plan.devices} - {0})
    if others:
        what = config.plan.file or f"--placement {config.plan.placement}"
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
