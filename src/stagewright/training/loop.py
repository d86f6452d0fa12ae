"""Training as one of the workers: from the last checkpoint on, stretch by stretch, to the record."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console

from stagewright.errors import CheckpointError, DataError, RunError
from stagewright.models import Layered
from stagewright.models.counts import parameter_roles
from stagewright.record import Record, Source
from stagewright.runtime.checkpoint.resuming import give_back, restore
from stagewright.runtime.checkpoint.storage import find_checkpoint, path_of, sweep
from stagewright.runtime.corrections import warnings_of
from stagewright.runtime.feed import Feed, FunctionFeed, ReadAhead, SyntheticFeed
from stagewright.runtime.launch.environment import RUN_FOLDER, STORE, is_main
from stagewright.runtime.launch.guard import start_guard
from stagewright.runtime.launch.joining import Take, joined
from stagewright.runtime.replica import fed_inputs
from stagewright.runtime.run_folder import ANSWER, RECORD, SCHEDULE_FILE, RunFolder
from stagewright.runtime.safety.flight import Flight
from stagewright.runtime.safety.stopping import Gate, Stopper, signals_heard
from stagewright.runtime.safety.watchdog import LastWords, Watchdog
from stagewright.runtime.settings import Settings
from stagewright.runtime.warm_up import warm_up
from stagewright.runtime.weights import OptimizerMaker
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import Words, gather_json, open_world
from stagewright.schedule import Schedule
from stagewright.training.callbacks import Callback, Follower, overrides
from stagewright.training.config import Job
from stagewright.training.dataset import DatasetFeed
from stagewright.training.listener import Listener, Rows, Run, gather
from stagewright.training.metrics import METRICS, Metric, accuracy_sums, has_accuracy, own_sums
from stagewright.training.recipes import Recipe, optimizer_maker

if TYPE_CHECKING:
    from stagewright.runtime.checkpoint.saving import Checkpointer

_Found = tuple[Path, Mapping[str, Any]] | None
"""A good checkpoint and its manifest."""
_AGENT_S = 5.0
"""How long torchrun's agents may take to see that a host has come."""


def work(
    take: Take, console: Console | None, schedule: Schedule, layered: Layered, job: Job, settings: Settings,
    recipe: Recipe | OptimizerMaker, data: Feed | Rows | None, evaluation: Feed | None, cluster: str, source: Source,
    metrics: Mapping[str, Metric] | None = None, callbacks: Sequence[Callback] = (),
) -> Record:  # fmt: skip
    """Runs this worker's part; every worker returns the whole record."""
    rest = (schedule, layered, job, settings, recipe, data, evaluation, cluster, source)
    with at_work(take, *rest, console=console, metrics=metrics, callbacks=callbacks) as (run, flight):
        return _run_worker(run, flight)


@contextmanager
def at_work(
    take: Take, schedule: Schedule, layered: Layered, job: Job, settings: Settings, recipe: Recipe | OptimizerMaker,
    data: Feed | Rows | None, evaluation: Feed | None, cluster: str, source: Source, console: Console | None = None,
    **more: Any,
) -> Iterator[tuple[Run, Flight]]:  # fmt: skip
    """This process as a worker of a run while the block runs; what ends it early is written down for the others."""
    threads = settings.threads or int(os.environ.get("OMP_NUM_THREADS", "0"))
    if threads:
        torch.set_num_threads(threads)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    launched = os.environ.get(RUN_FOLDER)
    shown = take if console is None else partial(_taken_and_shown, take, schedule, job, console)
    if size > 1 and STORE not in os.environ:  # else the one who started this worker looks whether it is stopped
        start_guard(1.5 * settings.timeout_s)
    last = LastWords(schedule, settings.timeout_s, rank, Path(launched) if launched else None)
    watching = Watchdog(settings.timeout_s, settings.start_timeout_s, last.when_stuck, is_on=size > 1)
    try:
        with watching as dog, open_world(settings) as world, joined(world, shown) as own:
            last.folder, last.places = own.path, world.places
            rest = (schedule, layered, job, settings, recipe, data, evaluation, cluster, source, own, world)
            run = Run(*rest, dog=dog, **more)
            with closing(Flight(own.path, rank, settings.timeout_s)) as flight:
                try:
                    yield run, flight
                except BaseException as fault:
                    raise last.of(fault) from fault.__cause__  # before anything is closed, which may take its time
    except BaseException as fault:
        raise last.of(fault) from fault.__cause__


@contextmanager
def _taken_and_shown(take: Take, schedule: Schedule, job: Job, console: Console, again: bool) -> Iterator[RunFolder]:
    """The run's folder, whose events are shown from before the other workers know of it."""
    from stagewright.training.display import Display  # what it draws with takes a while to load

    title = f"starting {schedule.plan.model} on {schedule.plan.placement}"
    with take(again) as own, Display(own.path, console, title, job.log_format):
        yield own


def nothing_left(done: int, steps: int) -> str:
    """What is said of a resumed run that has no step left to train."""
    return f"nothing is left to train: the checkpoint is of step {done}, and --steps is {steps}"


def _run_worker(run: Run, flight: Flight) -> Record:
    """Makes the worker, resumes where asked, trains, and gathers the record."""
    worker, words = make_worker(run, flight)
    with run.dog.patience(run.settings.save_timeout_s):
        told = [*run.own.changes, *_resume(run, worker)]
    run.job = run.job.with_some_measured()
    checkpointer = checkpointer_of(run, worker) if run.job.checkpoint_every else None
    callbacks = run.callbacks if is_main() else ()  # else the one who started this worker calls them
    with Follower(run.folder, callbacks), closing(Listener(run, worker, checkpointer, words)) as listener:
        listener.tell_plan()
        if run.world.size > 1:
            listener.announce("transport", f"workers exchange rows by {worker.transport.name}")
        for word in told:
            listener.announce("resume", word)
        if isinstance(run.recipe, Recipe):
            for warning in warnings_of(run.recipe.optimizer, run.schedule.plan.versions, run.settings.correct):
                listener.announce("staleness", warning)
        if run.job.first_step >= run.job.steps and not run.job.only_evaluates:
            listener.announce("resume", nothing_left(run.job.first_step, run.job.steps))
        run.dog.get_on()
        return _run_to_the_end(run, worker, listener, words)


def make_worker(run: Run, flight: Flight) -> tuple[Worker, Words | None]:
    """The worker of this process, warm, and how it speaks to the others."""
    if run.metrics is not None:
        metric: Any = (partial(own_sums, run.metrics), len(run.metrics)) if run.metrics else (None, 0)
    else:
        sums = partial(accuracy_sums, shifts=getattr(run.layered.loss, "shifts", False))
        metric = (sums, len(METRICS)) if has_accuracy(run.layered) else (None, 0)
    if run.world.worker == 0 and RUN_FOLDER not in os.environ:
        run.schedule.save(run.folder / SCHEDULE_FILE)  # for those who read the recorders
    words = Words(run.world.store, run.own.secret) if run.world.store is not None else None
    run.dog.begin(flight, words, run.world.worker, run.world.size)
    for data in (run.data, run.evaluation):
        _check_same(run, data)
    worker = Worker(
        run.schedule, run.layered, run.world, run.settings, make_optimizer=maker_of(run), feed=feed_of(run, run.data),
        metric=metric[0], num_metrics=metric[1], flight=flight,
    )  # fmt: skip
    warm_up(worker)
    return worker, words


def _check_same(run: Run, data: object) -> None:
    """Refuses a dataset whose targets are others in another worker: each makes the items for itself."""
    if isinstance(data, DatasetFeed) and run.world.control is not None:
        told = gather_json(data.fingerprint(), run.world.control, run.world.size)
        other = next((worker for worker, each in enumerate(told) if each != told[0]), None)
        if other is not None:
            raise DataError(
                f"{data.about} have other targets in worker {other} than in worker 0: each runs the script for itself",
                "seed what is drawn at random at the script's beginning, as by torch.manual_seed(0)",
            )


def _run_to_the_end(run: Run, worker: Worker, listener: Listener, words: Words | None) -> Record:
    """Trains until the last step, or until all agree to stop; saves then, and gathers the record."""
    worker.gate = gate = Gate(run.job.first_step)
    with Stopper(gate, run.world, run.folder, words, signals_heard()).listening() as stopper:
        step, reason = _run_all(run, worker, listener, gate)
        worker.close()
        run.dog.get_on()
        if reason:
            _save_last(run, worker, listener, step, f"stopped by {reason}")
            listener.announce("stopped", f"after step {step}: {reason}")
        elif gate.last is not None and step < run.job.steps:
            cause = stopper.cause or "a signal to another worker"
            _save_last(run, worker, listener, step, f"stopped by {cause}")
            where = f"go on with --resume auto --out {run.folder}"
            listener.announce("stopped", f"by {cause} after step {step}; {where}")
            run.own.state = "stopped"
        elif listener.checkpointer is not None or run.job.save_final:
            _save_last(run, worker, listener, step, "all steps are done")
        if RUN_FOLDER not in os.environ:  # else the one who started this worker does it
            with run.dog.patience(run.settings.save_timeout_s):
                if not give_back(run.layered.model, run.folder):  # nothing was saved
                    for here in worker.replicas.values():
                        for versions in (here.weights, *here.tied):
                            versions.end_in_first_slot()
        run.dog.get_on()
        record, path = gather(run, worker, listener.points, listener.sample_tokens), run.folder / RECORD
        if listener.replicas is not None:
            listener.replicas.close()
        if listener.pace is not None:
            listener.pace.close(step)
        # A run that did nothing leaves what is there.
        if run.world.worker == 0 and (record.step_s or not path.exists()):
            record.save(path)
        if run.world.worker == 0 and record.step_s:
            listener.tell_end(record)
        if run.world.control is not None:
            dist.barrier(group=run.world.control)
        if run.job.nnodes is not None and RUN_FOLDER not in os.environ:
            stopper.wait_for_own_signal(_AGENT_S)
        return record


def _run_all(run: Run, worker: Worker, listener: Listener, gate: Gate) -> tuple[int, str]:
    """Runs every stretch, or those before the gate closes; the steps that are done, and why callbacks stopped there."""
    job, ends_epochs = run.job, overrides(run.callbacks, "on_epoch")
    evaluation = feed_of(run, run.evaluation) if job.evaluate_every is not None or job.only_evaluates else None
    step = job.first_step
    if job.only_evaluates and evaluation is not None:
        listener.evaluate(step, evaluation)
        return step, ""
    for first, stop in job.parts(each_epoch=ends_epochs):
        worker.run(stop - first, first)
        listener.scalars.drain()
        step = stop if gate.last is None else max(first, min(stop, gate.last + 1))
        if step < stop:
            return step, ""
        if evaluation is not None and job.evaluates_after(stop):
            listener.evaluate(stop, evaluation)
        reason = _asked(run, listener, stop) if run.callbacks else ""
        if reason:
            return step, reason
    return step, ""


def _asked(run: Run, listener: Listener, step: int) -> str:
    """Why callbacks want the run to stop here, if they do; all workers wait for their word, and get the same one."""
    answer, world = run.folder / ANSWER, run.world
    with run.dog.patience(run.settings.save_timeout_s):
        if world.worker == 0:
            answer.unlink(missing_ok=True)
        gather_json(None, world.control, world.size)
        listener.tell_boundary(step)
        while world.worker == 0 and not answer.exists():
            time.sleep(0.01)
        reason = json.loads(answer.read_text(encoding="utf-8")) if world.worker == 0 else ""
        return str(gather_json(reason, world.control, world.size)[0])


def _save_last(run: Run, worker: Worker, listener: Listener, step: int, after: str) -> None:
    """Saves the last step of a run; that it could not be is an error, since nothing else would be left of it."""
    checkpointer = listener.checkpointer = listener.checkpointer or checkpointer_of(run, worker)
    with run.dog.patience(run.settings.save_timeout_s):
        if step > run.job.first_step:
            checkpointer.save(step)
        checkpointer.close()
        if checkpointer.copier is not None and (last := path_of(run.folder, step)).exists():
            checkpointer.copier.finish(last)
    listener.tell_news()
    if step in listener.faults:
        raise RunError(f"{after}, but {listener.faults[step]}", "free the disk, or save elsewhere")
    if checkpointer.copier is not None and checkpointer.copier.fault is not None:
        where = f"it is in {path_of(run.folder, step)}: copy that folder there"
        raise RunError(f"{after}, but {checkpointer.copier.fault}", where)


def checkpointer_of(run: Run, worker: Worker) -> Checkpointer:
    """What writes this run's checkpoints. All workers must ask for it."""
    from stagewright.runtime.checkpoint.saving import Checkpointer  # torch's own takes a second to load

    copier, job = None, run.job
    if job.checkpoints is not None:
        from stagewright.runtime.checkpoint.remote import Copier, Store

        limit_s, store = run.settings.save_timeout_s, Store.open(job.checkpoints)
        copier = Copier(store, run.world, keep=job.keep, run=run.own.id, limit_s=limit_s)
    return Checkpointer(
        worker, run.layered, run.folder, every=job.checkpoint_every, keep=job.keep, run=run.own.id, copier=copier,
        patience=lambda: run.dog.patience(run.settings.save_timeout_s),
        may_prune=lambda: worker.watch is None or worker.watch.skipped == 0,
    )  # fmt: skip


def _resume(run: Run, worker: Worker) -> list[str]:
    """Restores the last good checkpoint where the job or a restart asks for it, and says what it did."""
    restarted = run.own.is_restarted and run.job.checkpoint_every is not None
    if run.job.resume is None and not restarted:
        return []
    words: list[str] = []
    named = None if run.job.resume in (None, "auto") else str(run.job.resume)
    if run.world.worker == 0:
        sweep(run.folder)
    found: _Found = find_checkpoint(run.folder, words.append, run.world) if restarted or named is None else None
    source = str(found[0]) if found is not None else ""
    for place in (run.job.checkpoints if restarted or named is None else None, named if found is None else None):
        later = _find_in(place, run, found[1]["step"] if found is not None else 0, words) if place is not None else None
        if later is not None:
            found, source = later, str(place)
    if found is None and named is not None:
        # Who names a checkpoint does not want to begin at the beginning.
        why = f" ({words[0]})" if words else ""
        raise CheckpointError(f"--resume {named}: no good checkpoint is there{why}", "name another folder")
    if found is None:
        return [*words, f"no checkpoint in {run.folder}: starting from the first step"]
    step = restore(worker, *found, options=not isinstance(run.recipe, Recipe))
    run.job = replace(run.job, first_step=step)
    gather_json(None, run.world.control, run.world.size)
    if run.world.worker == 0:
        sweep(run.folder)  # what was brought here of another run
    return [*words, f"going on after step {step}, from {source}"]


def _find_in(place: str, run: Run, after: int, words: list[str]) -> _Found:
    """The newest good checkpoint of a folder, or of a store, from which it is brought here, after so many steps."""
    from stagewright.runtime.checkpoint.remote import Store, fetch, is_url

    if place == run.job.checkpoints or is_url(place):
        return fetch(Store.open(place), run.folder, run.own.id, after, words.append, run.world)
    return find_checkpoint(Path(place), words.append, run.world)


def maker_of(run: Run) -> OptimizerMaker:
    """The function that makes a stage's optimizer."""
    if isinstance(run.recipe, Recipe):
        return optimizer_maker(run.recipe, run.settings.device, parameter_roles(run.layered))
    return run.recipe


def feed_of(run: Run, data: Feed | Rows | None) -> Feed:
    """Where rows come from; made up where nothing is given, told which ones this worker needs, read ahead if it can."""
    if data is None:
        return synthetic_feed(run.layered, run.settings, run.world.device)
    if callable(data):
        feed = FunctionFeed(data)
        return ReadAhead(feed, run.world.device, batches=1, threads=1) if run.world.device.type == "cuda" else feed
    settle = getattr(data, "settle", None)
    if settle is not None:
        settle(run.schedule.plan, run.settings)
    return ReadAhead(data, run.world.device) if getattr(data, "may_be_read_ahead", False) else data


def synthetic_feed(layered: Layered, settings: Settings, device: torch.device, num_classes: int = 10) -> Feed:
    """Made-up rows for any model; labels below `num_classes` or the width of its predictions."""
    last = layered.stage(layered.num_layers - 1, layered.num_layers) if layered.num_layers > 1 else None
    widths = [spec.shape_per_row[-1] for spec in (last.inputs if last else ()) if spec.shape_per_row]
    return SyntheticFeed(
        fed_inputs(layered, settings), layered.targets, num_classes=widths[0] if widths else num_classes,
        seed=settings.seed, device=device, channels_last=settings.channels_last,
    )  # fmt: skip
