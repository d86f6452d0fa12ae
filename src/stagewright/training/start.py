"""Training, as the one that starts the workers and shows what they tell, or as one of them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from stagewright.errors import UsageError
from stagewright.models import Layered
from stagewright.plan import Plan
from stagewright.record import Record, Source
from stagewright.runtime.checkpoint.resuming import give_back
from stagewright.runtime.feed import Feed
from stagewright.runtime.launch.environment import RESTARTED, RUN_FOLDER, is_worker
from stagewright.runtime.launch.local import Hosts, stop_on_signals
from stagewright.runtime.launch.process import follow_parent
from stagewright.runtime.launch.ssh import OverSsh
from stagewright.runtime.run_folder import SCHEDULE_FILE, RunFolder, held
from stagewright.runtime.safety.preflight import check_before_launch
from stagewright.runtime.settings import Settings
from stagewright.schedule import Schedule
from stagewright.training.checks import check_device
from stagewright.training.config import CONFIG_FILE, Config
from stagewright.training.dataset import Collate, MapStyle, as_feed
from stagewright.training.gathering import MakeOptimizer, Rows
from stagewright.training.job import Job
from stagewright.training.loop import work
from stagewright.training.optimizers import OPTIMIZERS
from stagewright.training.recipes import Recipe
from stagewright.training.restarting import Starter, is_remote, start_workers
from stagewright.training.sinks import check_sinks


def train(
    schedule: Schedule,
    model: Layered,
    *,
    data: Feed | Rows | MapStyle | None = None,
    collate_fn: Collate | None = None,
    recipe: Recipe | MakeOptimizer | None = None,
    job: Job | None = None,
    settings: Settings | None = None,
    evaluation: Feed | None = None,
    cluster: str = "local",
    source: Source = "measured",
    folder: str | Path | None = None,
    console: Console | None = None,
    command: Sequence[str] | None = None,
    hosts: Hosts | OverSsh | None = None,
    config: Config | None = None,
    share: int = 1,
) -> Record:
    """Trains a model by a schedule, and returns the record of it.

    Under torchrun or SLURM this process is one of the workers. Started alone, it starts a worker for each device of the
    plan, which run the same script again, and waits for them. What follows in the script runs in all these processes;
    `is_main()` is true in one. `data` gives the rows of a batch: a map-style torch Dataset with an optional
    `collate_fn`, a function of (batch, start, stop) → (inputs, targets), or a Feed; None makes them up. `recipe` is a
    Recipe, or a function from parameters to an optimizer. With `hosts` the workers are started there, each host with
    those of its own devices. With a `config`, which the run's folder keeps, workers read that instead of running the
    script.
    `share` workers fit on a card, even where the plan has fewer.
    """
    job, settings = job or Job(), settings or Settings()
    feed: Feed | Rows | None = as_feed(data, model, settings, collate_fn)
    schedule = _schedule_now(schedule)
    if not is_remote(hosts):
        check_device(settings)
    _check_agreement(schedule, settings)
    _check_smoothing(recipe, model)
    check_sinks(job.sinks)
    _check_resume(job, folder)
    about = _about_run(schedule.plan, model, settings, recipe, feed)
    how: dict[str, Any] = {"resume": job.resume, "overwrite": job.overwrite}
    rest = (schedule, model, job, settings, recipe or Recipe(), feed, evaluation, cluster, source)
    # Whoever started workers here follows their events; without such a one they show them themselves.
    shown = None if RUN_FOLDER in os.environ else console or Console()
    if is_worker():
        follow_parent()
        how["patience_s"] = settings.timeout_s
        return work(lambda again: _taken(config, folder, job.name, about, goes_on=again, **how), shown, *rest)
    with _taken(config, folder, job.name, about, **how) as run, stop_on_signals(run):
        keep = job.keep if job.checkpoint_every else 1 if job.save_final else None
        if not is_remote(hosts):
            check_before_launch(schedule, model, settings, run.path, states=states_of(recipe), keep=keep)
        if len(schedule.plan.devices) == 1 and hosts is None:
            return work(lambda again: nullcontext(run), shown, *rest)
        if config is not None:
            command = [sys.executable, "-m", "stagewright", *config.words(run.path)]
        starter = Starter(settings, command, hosts, share)
        record = start_workers(schedule, job, run.path, console or Console(), starter)
        give_back(model.model, run.path)
        return record


@contextmanager
def _taken(config: Config | None, folder: str | Path | None, *about: Any, **how: Any) -> Iterator[RunFolder]:
    """The run's folder while the block runs, with the configuration in it."""
    with held(folder, *about, **how) as run:
        if config is not None:
            config.save(run.path / CONFIG_FILE)
        yield run


def _about_run(
    plan: Plan, model: Layered, settings: Settings, recipe: Recipe | MakeOptimizer | None, data: Feed | Rows | None
) -> dict[str, Any]:
    """What tells a run from others: its folder keeps this."""
    shapes = sorted((name, list(tensor.shape)) for name, tensor in model.model.state_dict().items())
    parameters = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
    given = recipe if recipe is not None else Recipe()
    return {
        "model": plan.model, "parameters": parameters, "batch": plan.batch, "seed": settings.seed,
        "data": "synthetic" if data is None else str(getattr(data, "about", None) or _name_of(data)),
        "recipe": given.in_words() if isinstance(given, Recipe) else _name_of(given),
    }  # fmt: skip


def _name_of(given: object) -> str:
    """What a function or an object of the user's is called."""
    return str(getattr(given, "__qualname__", type(given).__qualname__))


def states_of(recipe: Recipe | MakeOptimizer | None) -> Callable[[str], float]:
    """How many numbers the optimizer keeps for each of a parameter, by its role; of one not known the usual two."""
    given = recipe or Recipe()
    return OPTIMIZERS[given.optimizer].states_of if isinstance(given, Recipe) else lambda role: 2


def _schedule_now(schedule: Schedule) -> Schedule:
    """The schedule of a run that was started again, which may have lost a device since; else the caller's own."""
    if RESTARTED in os.environ and RUN_FOLDER in os.environ and is_worker():
        return Schedule.load(Path(os.environ[RUN_FOLDER]) / SCHEDULE_FILE)
    return schedule


def _check_agreement(schedule: Schedule, settings: Settings) -> None:
    """Refuses a schedule without agreement where the settings need it."""
    if settings.agrees and not schedule.agree:
        raise UsageError(
            "fp16, gradient clipping and --on-nan skip need the agreement of all workers before an update",
            "make the schedule with make_schedule(plan, agree=True)",
        )


def _check_smoothing(recipe: Recipe | MakeOptimizer | None, model: Layered) -> None:
    """Refuses a recipe whose label smoothing the model's loss does not have: the loss was chosen with the model."""
    wanted = recipe.label_smoothing if isinstance(recipe, Recipe) else 0.0
    found = getattr(model.loss, "label_smoothing", 0.0)
    if wanted and wanted != found:
        raise UsageError(
            f"the recipe smooths labels by {wanted:g}, but the model's loss by {found:g}",
            f"build the model with label_smoothing={wanted:g}",
        )


def _check_resume(job: Job, folder: str | Path | None) -> None:
    """Refuses to resume from nowhere, and to restart a run that saves nothing."""
    if job.resume == "auto" and folder is None and RUN_FOLDER not in os.environ:
        raise UsageError("--resume auto looks for checkpoints in the folder of the run", "name it with --out FOLDER")
    if job.resume not in (None, "auto") and not Path(str(job.resume)).is_dir():
        raise UsageError(
            f"--resume {job.resume}: there is no such folder", "use auto, or a run's or checkpoint's folder"
        )
    if job.replan and not job.checkpoint_every:
        raise UsageError("--replan goes on from the last checkpoint, but none is asked for", "add --checkpoint-every N")
