"""Training, as the one that starts the workers, here or in other hosts, and starts them again, or as one of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from stagewright.cluster import DeviceId, count, format_placement
from stagewright.errors import PlanError, RunError, UsageError
from stagewright.models import Layered
from stagewright.plan import Plan
from stagewright.record import Record, Source
from stagewright.runtime.checkpoint.remote import Store, run_at
from stagewright.runtime.checkpoint.resuming import give_back
from stagewright.runtime.checkpoint.storage import find_checkpoint
from stagewright.runtime.feed import Feed
from stagewright.runtime.launch.environment import RESTARTED, RUN_FOLDER, is_worker, this_command
from stagewright.runtime.launch.local import Hosts, launch, stop_on_signals
from stagewright.runtime.launch.members import Members
from stagewright.runtime.launch.process import follow_parent
from stagewright.runtime.launch.script import SCRIPT_SO_FAR, Script
from stagewright.runtime.launch.ssh import OverSsh
from stagewright.runtime.run_folder import RECORD, SCHEDULE_FILE, STOP_FILE, RunFolder, held, write_text
from stagewright.runtime.settings import Settings
from stagewright.runtime.weights import OptimizerMaker
from stagewright.schedule import Schedule
from stagewright.scheduling import make_schedule
from stagewright.training.before import check_device, check_here, check_run, check_targets, check_there
from stagewright.training.callbacks import Callback, Follower
from stagewright.training.config import CONFIG_FILE, Config, Job
from stagewright.training.dataset import Collate, MapStyle, as_feed
from stagewright.training.events import Teller
from stagewright.training.listener import COMMAND, Rows, typed_command
from stagewright.training.loop import work
from stagewright.training.metrics import Metric
from stagewright.training.recipes import Recipe


def train(
    schedule: Schedule, model: Layered, *, data: Feed | Rows | MapStyle | None = None,
    collate_fn: Collate | None = None, recipe: Recipe | OptimizerMaker | None = None, job: Job | None = None,
    settings: Settings | None = None, evaluation: Feed | MapStyle | None = None,
    metrics: Mapping[str, Metric] | None = None, callbacks: Sequence[Callback] = (), cluster: str = "local",
    source: Source = "measured", folder: str | Path | None = None, console: Console | None = None,
    command: Sequence[str] | None = None, hosts: Hosts | OverSsh | None = None, config: Config | None = None,
    share: int = 1, seen: Callable[[RunFolder], object] = lambda run: None,
) -> Record:  # fmt: skip
    """Trains a model by a schedule, and returns the record of it.

    Under torchrun or SLURM this process is one of the workers. Started alone, it starts a worker for each device of the
    plan, which run the same script again, and waits for them. What follows in the script runs in all these processes;
    `is_main()` is true in one. `data` gives the rows of a batch: a map-style torch Dataset with an optional
    `collate_fn`, a function of (batch, start, stop) → (inputs, targets), or a Feed; None makes them up. `recipe` is a
    Recipe, or a function from parameters to an optimizer. With `hosts` the workers are started there, each host with
    those of its own devices. With a `config`, which the run's folder keeps, workers read that instead of running the
    script. `share` workers fit on a card, even where the plan has fewer. `seen` gets the run's folder, once it has one.
    """
    job, settings, recipe = job or Job(), settings or Settings(), recipe or Recipe()
    settings = replace(settings, rescale_steps=settings.rescale_steps or -(-job.steps // 4))
    script = SCRIPT_SO_FAR if config is None and command is None else Script()
    if (before := script.meet()) is not None:
        return before.given_to(model.model)
    with script.doing() as done:
        feed: Feed | Rows | None = as_feed(data, model, settings, collate_fn)
        held_out: Feed | None = as_feed(evaluation, model, settings, is_training=False)
        if is_worker():
            schedule = _schedule_of_worker(schedule, job)
        if not isinstance(hosts, OverSsh):
            check_device(settings)
        check_run(schedule, model, recipe, job, settings, folder)
        how: dict[str, Any] = {"resume": job.resume, "overwrite": job.overwrite, "store": job.checkpoints, "seen": seen}
        about = about_run(schedule.plan, model, settings, recipe, feed)
        rest = (schedule, model, job, settings, recipe, feed, held_out, cluster, source, metrics, callbacks)
        # Whoever started workers here follows their events; without such a one they show them themselves.
        shown = None if RUN_FOLDER in os.environ else console or Console()
        if is_worker():
            follow_parent()
            how["patience_s"] = settings.timeout_s
            return work(lambda again: taken(config, folder, job.name, about, goes_on=again, **how), shown, *rest)
        with taken(config, folder, job.name, about, **how) as run, stop_on_signals(run):
            check = partial(check_there, [os.getcwd(), str(run.path), *_folders(config)], model, settings, recipe)
            if not isinstance(hosts, OverSsh):
                check_here(schedule, model, settings, recipe, job, run.path)
            elif job.nnodes is None:
                check(hosts, schedule.plan)
            if len(schedule.plan.devices) == 1 and hosts is None:
                record = work(lambda again: nullcontext(run), shown, *rest)
            else:
                check_targets(schedule.plan, feed, held_out)
                command = command or (None if config is None else config.command(run.path))
                told = script.leave(run.path) if command is None else {}
                members = _members_of(hosts, schedule.plan, job, run, check) if isinstance(hosts, OverSsh) else None
                start = partial(launch, command or this_command(), folder=run.path, settings=settings, share=share)
                with Follower(run.path, callbacks):
                    record = _start_workers(schedule, job, run, console or Console(), start, hosts, members, told)
                give_back(model.model, run.path)
            done(run.path, record)
            return record


def _folders(config: Config | None) -> tuple[str, ...]:
    return () if config is None else tuple(config.data.folders)


@contextmanager
def taken(
    config: Config | None, folder: str | Path | None, *about: Any, store: str | None,
    seen: Callable[[RunFolder], object] = lambda run: None, **how: Any,
) -> Iterator[RunFolder]:  # fmt: skip
    """The run's folder while the block runs, with the configuration in it; the store for copies has no other run's."""
    if store is not None and not how["overwrite"]:
        how["id"] = run_at(store, folder, resume=how["resume"], goes_on=how.get("goes_on", False))
    with held(folder, *about, **how) as run:
        seen(run)
        if store is not None and how["overwrite"]:
            Store.open(store).clear()
        if config is not None:
            config.save(run.path / CONFIG_FILE)
        yield run


def about_run(
    plan: Plan, model: Layered, settings: Settings, recipe: Recipe | OptimizerMaker, data: Feed | Rows | None
) -> dict[str, Any]:
    """What tells a run from others: its folder keeps this."""

    def name_of(given: object) -> str:
        return str(getattr(given, "__qualname__", type(given).__qualname__))

    shapes = sorted((name, list(tensor.shape)) for name, tensor in model.model.state_dict().items())
    parameters = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
    return {
        "model": plan.model, "parameters": parameters, "placement": plan.placement, "batch": plan.batch,
        "seed": settings.seed,
        "data": "synthetic" if data is None else str(getattr(data, "about", None) or name_of(data)),
        "recipe": recipe.in_words() if isinstance(recipe, Recipe) else name_of(recipe),
    }  # fmt: skip


# ── starting, and starting again ────────────────────────────────────────────────────────────────────────


def _start_workers(
    schedule: Schedule, job: Job, run: RunFolder, console: Console, start: Callable[..., None],
    hosts: Hosts | OverSsh | None, members: Members | None, told: Mapping[str, str] | None = None,
) -> Record:  # fmt: skip
    """Starts the workers, shows what they tell, and returns the record they leave.

    A run that fails is started again as often as the job allows. With `replan` it goes on without the hosts that are
    lost, or without the device that failed it, for as long as one is left; with members on the hosts that are there.
    """
    from stagewright.training.display import Display  # workers, which run this file too, show nothing

    environment = {COMMAND: typed_command(), **(told or {})}
    restarts, causes, whole = 0, list[str](), schedule.plan
    title = f"starting {count(len(schedule.plan.devices), 'worker')} of {schedule.plan.model}"
    with Display(run.path, console, title, job.log_format):

        def go_on(plan: Plan, why: str) -> Schedule:
            _tell(run.path, "replan", f"{why}; {_describe_change(schedule.plan, plan)}")
            return make_schedule(plan, agree=schedule.agree)

        while True:
            if members is not None:
                members.gather(lambda: run.state == "stopped")
                hosts, plan = members.hosts, _plan_of_those_there(whole, members.missing)
                if plan != schedule.plan:
                    schedule = go_on(plan, f"{count(len(members.hosts.names), 'host')} of {job.nnodes} are there")
            schedule.save(run.path / SCHEDULE_FILE)
            try:
                with _asked_to_stop_for(members, run) if members is not None else nullcontext():
                    start(plan=schedule.plan, hosts=hosts, extra=environment)
                if members is None or not members.has_grown or run.state == "stopped" or _is_done(run.path, job):
                    return _record_in(run.path)
            except RunError as fault:
                causes.append(fault.cause)
                _refuse_the_same(fault, causes)
                after = _plan_after(schedule.plan, fault) if job.replan else None
                if members is not None and fault.hosts:
                    _tell(run.path, "hosts", fault.cause)
                elif restarts < job.max_restarts and not fault.hosts:
                    restarts += 1
                    _tell(run.path, "restart", f"{fault.cause}; starting again ({restarts} of {job.max_restarts})")
                elif after is not None:
                    if isinstance(hosts, OverSsh):
                        hosts = hosts.without(fault.hosts)
                    schedule, restarts = go_on(after, fault.cause), 0
                else:
                    raise
            environment[RESTARTED] = "1"


def _record_in(folder: Path) -> Record:
    """The record that the workers of a run have left."""
    if not (folder / RECORD).exists():
        raise UsageError(
            "the workers ended without training: they took this call for a run that the script had been through before",
            "a script that trains several times makes the same calls in the same order in its workers",
        )
    return Record.load(folder / RECORD)


def _schedule_of_worker(schedule: Schedule, job: Job) -> Schedule:
    """What the workers do now: their launcher says it, who knows which devices are left, or else their number does."""
    if RUN_FOLDER in os.environ:
        changes = RESTARTED in os.environ or job.nnodes is not None
        return Schedule.load(Path(os.environ[RUN_FOLDER]) / SCHEDULE_FILE) if changes else schedule
    absent = schedule.plan.devices[int(os.environ["WORLD_SIZE"]) :]
    if job.nnodes is None or not absent:
        return schedule
    return make_schedule(_plan_without(schedule.plan, absent), agree=schedule.agree)


# ── which hosts are there ───────────────────────────────────────────────────────────────────────────────


def _members_of(
    hosts: OverSsh, plan: Plan, job: Job, run: RunFolder, check: Callable[[OverSsh, Plan, int], None]
) -> Members | None:
    """The hosts that a run may use, where their number may change."""
    if job.nnodes is None:
        return None
    return Members(
        hosts, job.host_limits, job.wait_for_hosts_s, tell=partial(_tell, run.path, "hosts"),
        check=lambda those, missing, port: check(those, _plan_of_those_there(plan, missing), port),
    )  # fmt: skip


@contextmanager
def _asked_to_stop_for(members: Members, run: RunFolder) -> Iterator[None]:
    """While the block runs, workers are asked to save and stop as soon as there are hosts to go on with."""
    word = run.path / STOP_FILE
    try:
        with members.watching(lambda: write_text(word, "hosts that are there again")):
            yield
    finally:
        if members.has_grown and run.state != "stopped":
            word.unlink(missing_ok=True)


def _is_done(folder: Path, job: Job) -> bool:
    """Whether the last step has been saved."""
    found = find_checkpoint(folder, lambda text: None)
    return found is not None and int(found[1]["step"]) >= job.steps


def _tell(folder: Path, kind: str, text: str) -> None:
    with closing(Teller(folder)) as teller:
        teller.tell(kind, text=text)


def _refuse_the_same(fault: RunError, causes: Sequence[str]) -> None:
    """Ends a run that fails three times in a row in the same way at the same batch: no restart will help."""
    times = 3
    # Whether a worker's exit status was seen before the others were ended is a matter of moments.
    last = [re.sub(r" with exit status \d+", "", cause) for cause in causes[-times:]]
    if len(last) == times and len(set(last)) == 1 and " of batch " in last[0]:
        raise RunError(
            f"{fault.cause}, {times} times in a row",
            f"this is a fault of the program or its data, not of a device\n{fault.todo or ''}".rstrip(),
        ) from fault


# ── the plan for what is left ───────────────────────────────────────────────────────────────────────────


def _plan_after(plan: Plan, fault: RunError) -> Plan | None:
    """The plan without what is lost; None where nothing is known to be, or nothing would be left."""
    if fault.hosts:
        left = {id.host for id in plan.devices} - set(fault.hosts)
        return _plan_without_hosts(plan, fault.hosts) if left else None
    if fault.worker is None or len(plan.devices) < 2:
        return None
    return _plan_without(plan, {plan.devices[fault.worker]})


def _plan_without(plan: Plan, lost: Collection[DeviceId]) -> Plan:
    """The plan with the same layers a stage, on the devices that are left.

    A stage that has lost all of its devices gets one of the stage that has most of them; where there are fewer devices
    than stages, the stages at the end become one.

        7-1 without 0:3    →  6-1        7-1 without 0:7    →  6-1        1-1 without either    →  1
    """
    left = [tuple(id for id in stage.devices if id not in lost) for stage in plan.stages]
    alive = {id for devices in left for id in devices}
    if not alive:
        raise PlanError(f"all devices of {plan.placement} are lost", "start again when some are back")
    stages = list(plan.stages)
    while len(stages) > len(alive):
        one, other = stages[-2:]
        either = {key: getattr(one, key) or getattr(other, key) for key in ("recompute", "shard_optimizer")}
        both = replace(one, layers=(*one.layers, *other.layers), **either)
        stages[-2:], left[-2:] = [both], [tuple(dict.fromkeys((*left[-2], *left[-1])))]
    for number, devices in enumerate(left):
        if not devices:
            richest = max(range(len(left)), key=lambda other: len(left[other]))
            *kept, given = left[richest]
            left[number] = (given,)
            left[richest] = tuple(kept) or left[richest]
    made = tuple(replace(stage, devices=devices, row_weights=None) for stage, devices in zip(stages, left))
    note = f"made when {format_placement([tuple(sorted(lost))])} was lost"
    unknown: Any = {"predicted_step_s": None, "predicted_compute_s": (), "predicted_send_s": ()}
    return replace(plan, stages=made, notes=(note,), **unknown)


def _plan_without_hosts(plan: Plan, lost: Collection[int]) -> Plan:
    """The plan without all devices of some hosts; the others move up in number."""
    after = _plan_without(plan, {id for id in plan.devices if id.host in lost})
    hosts = sorted({id.host for id in plan.devices} - set(lost))
    moved = [tuple(DeviceId(hosts.index(id.host), id.device) for id in stage.devices) for stage in after.stages]
    return replace(after, stages=tuple(replace(stage, devices=ids) for stage, ids in zip(after.stages, moved)))


def _plan_of_those_there(plan: Plan, missing: Collection[int]) -> Plan:
    """The plan for the hosts that are there."""
    return _plan_without_hosts(plan, missing) if missing else plan


def _describe_change(before: Plan, after: Plan) -> str:
    now, then = ("-".join(map(str, plan.replicas)) for plan in (after, before))
    return f"going on as {now} instead of {then}: {after.placement} instead of {before.placement}"
