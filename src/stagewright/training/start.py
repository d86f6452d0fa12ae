"""Training, as the one that starts the workers and shows what they tell, or as one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from rich.console import Console

from stagewright.errors import RunError, UsageError
from stagewright.models import Layered
from stagewright.plan import Plan
from stagewright.record import Record, Source
from stagewright.runtime.feed import Feed
from stagewright.runtime.flight import SCHEDULE_FILE
from stagewright.runtime.hosts import Hosts, launch_in
from stagewright.runtime.launch import (
    RESTARTED,
    RUN_FOLDER,
    SCHEDULE,
    is_worker,
    launch,
    new_run_folder,
    stop_on_signals,
    this_command,
    worker_environment,
)
from stagewright.runtime.mps import shared_cards
from stagewright.runtime.preflight import check_before_launch
from stagewright.runtime.settings import Settings
from stagewright.runtime.stem import Stem, follow_parent
from stagewright.schedule import Schedule
from stagewright.scheduling import make_schedule
from stagewright.training.display import Display
from stagewright.training.events import NAME, Teller
from stagewright.training.job import Job
from stagewright.training.loop import MakeOptimizer, Rows, work
from stagewright.training.optimizers import Recipe
from stagewright.training.replan import describe_change, plan_without
from stagewright.training.sinks import check_sinks

Start = Callable[[Plan, Path, Mapping[str, str]], None]
"""(plan, folder, environment): starts a plan's workers and waits for them."""


def train(
    schedule: Schedule,
    model: Layered,
    *,
    data: Feed | Rows | None = None,
    recipe: Recipe | MakeOptimizer | None = None,
    job: Job | None = None,
    settings: Settings | None = None,
    evaluation: Feed | None = None,
    cluster: str = "local",
    source: Source = "measured",
    folder: str | Path | None = None,
    console: Console | None = None,
    command: Sequence[str] | None = None,
    hosts: Hosts | None = None,
    share: int = 1,
    stem: Stem | None = None,
) -> Record:
    """Trains a model by a schedule, and returns the record of it.

    Under torchrun or SLURM this process is one of the workers. Started alone, it starts a worker for each device of the
    plan, which run the same script again, and waits for them. What follows in the script runs in all these processes;
    `is_main()` is true in one. `data` gives the rows of a batch: a function of (batch, start, stop) → (inputs,
    targets), or a Feed; None makes them up. `recipe` is a Recipe, or a function from parameters
    to an optimizer. With `hosts` the workers are started there, each host with those of its own devices.
    `share` workers fit on a card, even where the plan has fewer. With a `stem` that is kept from run to run, workers of
    the later ones are there at once.
    """
    job, settings = job or Job(), settings or Settings()
    schedule = schedule_now(schedule)
    check_agreement(schedule, settings)
    check_smoothing(recipe, model)
    check_sinks(job.sinks)
    check_resume(job, folder)
    alone = len(schedule.plan.devices) == 1 and hosts is None
    if not is_worker() and not alone:
        where = new_run_folder(job.name, folder)
        keep = job.keep if job.checkpoint_every else None
        check_before_launch(schedule, model, settings, where, states=states_of(recipe), keep=keep)
        with stop_on_signals(where), starter(settings, command, hosts, share, stem) as start:
            return start_workers(schedule, job, settings, where, console or Console(), start)
    if is_worker():
        follow_parent()
    where = new_run_folder(job.name, os.environ.get(RUN_FOLDER) or folder)
    # Whoever started workers here follows their events; without such a one they show them themselves.
    console = None if RUN_FOLDER in os.environ else console or Console()
    return work(where, console, schedule, model, job, settings, recipe or Recipe(), data, evaluation, cluster, source)


def states_of(recipe: Recipe | MakeOptimizer | None) -> int:
    """How many numbers the optimizer keeps for each parameter; for one that is not known the usual two."""
    known = {"sgd": 1, "rmsprop": 2, "adam": 2, "adamw": 2}
    return known[recipe.optimizer] if isinstance(recipe, Recipe) else 2


def schedule_now(schedule: Schedule) -> Schedule:
    """The schedule that workers were told to use instead of their own, after a device was lost."""
    path = os.environ.get(SCHEDULE)
    return Schedule.load(path) if path and is_worker() else schedule


def check_agreement(schedule: Schedule, settings: Settings) -> None:
    """Refuses a schedule without agreement where the settings need it."""
    if settings.agrees and not schedule.agree:
        raise UsageError(
            "fp16, gradient clipping and --on-nan skip need the agreement of all workers before an update",
            "make the schedule with make_schedule(plan, agree=True)",
        )


def check_smoothing(recipe: Recipe | MakeOptimizer | None, model: Layered) -> None:
    """Refuses a recipe whose label smoothing the model's loss does not have: the loss was chosen with the model."""
    wanted = recipe.label_smoothing if isinstance(recipe, Recipe) else 0.0
    found = getattr(model.loss, "label_smoothing", 0.0)
    if wanted and wanted != found:
        raise UsageError(
            f"the recipe smooths labels by {wanted:g}, but the model's loss by {found:g}",
            f"build the model with label_smoothing={wanted:g}",
        )


def check_resume(job: Job, folder: str | Path | None) -> None:
    """Refuses to resume from nowhere, and to restart a run that saves nothing."""
    if job.resume == "auto" and folder is None and RUN_FOLDER not in os.environ:
        raise UsageError("--resume auto looks for checkpoints in the folder of the run", "name it with --out FOLDER")
    if job.resume not in (None, "auto") and not Path(str(job.resume)).is_dir():
        raise UsageError(
            f"--resume {job.resume}: there is no such folder", "use auto, or a run's or checkpoint's folder"
        )
    if job.replan and not job.checkpoint_every:
        raise UsageError("--replan goes on from the last checkpoint, but none is asked for", "add --checkpoint-every N")


def start_workers(
    schedule: Schedule, job: Job, settings: Settings, folder: Path, console: Console, start: Start
) -> Record:
    """Starts the workers, shows what they tell, and returns the record they leave.

    A run that fails is started again as often as the job allows. With `replan` it then goes on without the device that
    failed it, for as long as one is left.
    """
    if job.resume is None:
        (folder / NAME).unlink(missing_ok=True)
    with Display(folder, console, num_steps=job.steps, title=title_of(schedule.plan)) as watching:
        run_and_restart(schedule, job, settings, folder, watching, start)
    return Record.load(folder / "record.json")


def run_and_restart(
    schedule: Schedule, job: Job, settings: Settings, folder: Path, watching: Display, start: Start
) -> None:
    """Starts the workers, time and again where the job allows it, until they end well."""
    environment, restarts = dict[str, str](), 0
    while True:
        try:
            return run_launcher(schedule, settings, folder, start, environment)
        except RunError as fault:
            if restarts < job.max_restarts:
                restarts += 1
                tell(folder, "restart", f"{fault.what}; starting again ({restarts} of {job.max_restarts})")
            elif job.replan and fault.worker is not None and len(schedule.plan.devices) > 1:
                schedule, restarts = replanned(schedule, fault, folder), 0
                environment[SCHEDULE] = str(folder / SCHEDULE_FILE)
                watching.rename(title_of(schedule.plan))
            else:
                raise
            environment[RESTARTED] = "1"


def title_of(plan: Plan) -> str:
    """What a person sees of a run at first."""
    return f"{plan.model} on {plan.placement}"


@contextmanager
def starter(
    settings: Settings, command: Sequence[str] | None, hosts: Hosts | None, share: int, kept: Stem | None
) -> Iterator[Start]:
    """What starts the workers of a plan and waits for them: here, time and again of one stem, or in other hosts."""

    def start(plan: Plan, folder: Path, environment: Mapping[str, str]) -> None:
        with shared_cards(workers_a_card(plan, settings, share), settings.transport) as shared:
            own = {**environment, **shared}
            if hosts is None:
                launch(command or this_command(), plan, folder, own, stem=stem, timeout_s=settings.timeout_s)
            else:
                launch_in(hosts, command or this_command()[1:], plan, folder, own)

    with nullcontext(kept) if kept is not None else Stem() as stem:
        yield start


def run_launcher(schedule: Schedule, settings: Settings, folder: Path, start: Start, extra: Mapping[str, str]) -> None:
    """Starts the workers of one plan and waits for them."""
    schedule.save(folder / SCHEDULE_FILE)
    environment = worker_environment(schedule.plan, folder, threads=settings.threads, device=settings.device)
    start(schedule.plan, folder, {**environment, **extra})


def replanned(schedule: Schedule, fault: RunError, folder: Path) -> Schedule:
    """The schedule of a plan without the device of the worker that failed; says what changed."""
    before = schedule.plan
    assert fault.worker is not None
    after = plan_without(before, {before.devices[fault.worker]})
    tell(folder, "replan", f"{fault.what}; {describe_change(before, after)}")
    return make_schedule(after, agree=schedule.agree)


def tell(folder: Path, kind: str, text: str) -> None:
    """Adds a sentence to the events of a run."""
    words = Teller(folder)
    words.tell(kind, text=text)
    words.close()


def workers_a_card(plan: Plan, settings: Settings, share: int = 1) -> int:
    """How many workers share a card, at least as many as it is to be shared by; 1 on the CPU."""
    if settings.device == "cpu":
        return 1
    return max(share, -(-len(plan.devices) // max(1, torch.cuda.device_count())))
