"""What must be right before a run starts, as the one that starts it can see."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from stagewright.cluster import count
from stagewright.errors import UsageError
from stagewright.models import Layered
from stagewright.plan import Plan
from stagewright.runtime.checkpoint.remote import check_stores, is_url
from stagewright.runtime.corrections import CORRECTIONS
from stagewright.runtime.launch.environment import RESTARTED, RUN_FOLDER
from stagewright.runtime.launch.ssh import PORT, OverSsh
from stagewright.runtime.safety.preflight import check_before_launch, check_hosts
from stagewright.runtime.settings import Settings
from stagewright.runtime.weights import OptimizerMaker
from stagewright.schedule import Schedule
from stagewright.training.config import Job
from stagewright.training.dataset import DatasetFeed
from stagewright.training.events import check_sinks
from stagewright.training.recipes import OPTIMIZERS, Recipe


def check_device(settings: Settings) -> None:
    """Refuses cards where torch sees none."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"--device is cuda, but torch {torch.__version__} sees no card here",
            "use --device cpu, or look at nvidia-smi and at how torch was installed",
        )


def check_run(
    schedule: Schedule, model: Layered, recipe: Recipe | OptimizerMaker, job: Job, settings: Settings,
    folder: str | Path | None,
) -> None:  # fmt: skip
    """Refuses what contradicts itself, to resume from nowhere, and to restart a run that saves nothing."""
    if settings.agrees and not schedule.agree:
        raise UsageError(
            "fp16, gradient clipping and --on-nan skip need the agreement of all workers before an update",
            "make the schedule with make_schedule(plan, agree=True)",
        )
    named, stages = len(settings.correct), len(schedule.plan.stages)
    if named not in (1, stages) and RESTARTED not in os.environ:  # a restart may have fewer
        raise UsageError(
            f"--correct names {named} corrections, but the plan has {count(stages, 'stage')}",
            "name one for all stages, or one a stage: --correct predict,none",
        )
    for number, shares in enumerate(schedule.plan.shard_optimizer):
        name = settings.correction_of(number)
        if shares and schedule.plan.versions[number] > 1 and CORRECTIONS[name].keeps_weights:
            raise UsageError(
                f"--correct {name} keeps weights beside those at use, and stage {number} has its states sharded",
                "leave out --shard-optimizer, or use --correct rescale or none",
            )
    wanted = recipe.label_smoothing if isinstance(recipe, Recipe) else 0.0
    found = getattr(model.loss, "label_smoothing", 0.0)
    if wanted and wanted != found:  # the loss was chosen with the model
        raise UsageError(
            f"the recipe smooths labels by {wanted:g}, but the model's loss by {found:g}",
            f"build the model with label_smoothing={wanted:g}",
        )
    check_sinks(job.sinks)
    if job.resume == "auto" and folder is None and job.checkpoints is None and RUN_FOLDER not in os.environ:
        raise UsageError("--resume auto looks for checkpoints in the folder of the run", "name it with --out FOLDER")
    if RUN_FOLDER not in os.environ:
        check_stores(job.checkpoints, job.resume)
    if job.resume not in (None, "auto") and not is_url(job.resume) and not Path(str(job.resume)).is_dir():
        raise UsageError(
            f"--resume {job.resume}: there is no such folder", "use auto, or a run's or checkpoint's folder"
        )
    for option in [name for name, given in (("--replan", job.replan), ("--nnodes", job.nnodes)) if given]:
        if not job.checkpoint_every:
            raise UsageError(
                f"{option} goes on from the last checkpoint, but none is asked for", "add --checkpoint-every N"
            )


def check_here(
    schedule: Schedule, model: Layered, settings: Settings, recipe: Recipe | OptimizerMaker, job: Job, folder: Path
) -> None:
    """Refuses what this machine has no room for."""
    keep = job.keep if job.checkpoint_every else 1 if job.save_final else None
    states, scratch = _states_of(recipe), _scratch_of(recipe, settings.device)
    check_before_launch(schedule, model, settings, folder, states=states, keep=keep, scratch=scratch)


def check_there(
    paths: Sequence[str], model: Layered, settings: Settings, recipe: Recipe | OptimizerMaker, hosts: OverSsh,
    plan: Plan, port: int = PORT,
) -> None:  # fmt: skip
    """Refuses other hosts that do not see what the run needs, or have no room for it."""
    states, scratch = _states_of(recipe), _scratch_of(recipe, settings.device)
    check_hosts(hosts, paths, plan, model, settings, states=states, scratch=scratch, port=port)


def check_targets(plan: Plan, *feeds: object) -> None:
    """Refuses items whose inputs and targets, read by different workers, would not belong together."""
    for each in feeds if len(plan.stages) > 1 else ():
        if isinstance(each, DatasetFeed):
            each.check_targets_stay()


def _states_of(recipe: Recipe | OptimizerMaker) -> Callable[[str], float]:
    """How many numbers the optimizer keeps for each of a parameter, by its role; of one not known the usual two."""
    return OPTIMIZERS[recipe.optimizer].states_of if isinstance(recipe, Recipe) else lambda role: 2


def _scratch_of(recipe: Recipe | OptimizerMaker, device: str) -> float:
    """How many numbers the optimizer takes for each of a parameter while it updates; of one not known one."""
    return OPTIMIZERS[recipe.optimizer].scratch_on(device) if isinstance(recipe, Recipe) else 1.0
