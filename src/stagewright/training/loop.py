"""Training as one of the workers: from the last checkpoint on, stretch by stretch, to the record."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.console import Console

from stagewright.errors import CheckpointError, RunError
from stagewright.models import Layered
from stagewright.models.counts import parameter_roles
from stagewright.record import Record, Source
from stagewright.runtime.feed import Feed, FunctionFeed, ReadAhead, SyntheticFeed
from stagewright.runtime.launch.environment import RUN_FOLDER
from stagewright.runtime.launch.joining import Take, joined
from stagewright.runtime.replica import fed_inputs
from stagewright.runtime.run_folder import RECORD, SCHEDULE_FILE
from stagewright.runtime.safety.flight import Flight
from stagewright.runtime.safety.stopping import Gate, Stopper, signals_heard
from stagewright.runtime.safety.watchdog import LastWords, Watchdog
from stagewright.runtime.settings import Settings
from stagewright.runtime.warm_up import warm_up
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import Words, open_world
from stagewright.schedule import Schedule
from stagewright.training.events import nothing_left
from stagewright.training.gathering import MakeOptimizer, Rows, Run, gather
from stagewright.training.job import Job
from stagewright.training.listener import Listener
from stagewright.training.metrics import METRICS, accuracy_sums, has_accuracy
from stagewright.training.recipes import Recipe, optimizer_maker

if TYPE_CHECKING:
    from stagewright.runtime.checkpoint.saving import Checkpointer


def work(
    take: Take, console: Console | None, schedule: Schedule, layered: Layered, job: Job, settings: Settings,
    recipe: Recipe | MakeOptimizer, data: Feed | Rows | None, evaluation: Feed | None, cluster: str, source: Source,
) -> Record:  # fmt: skip
    """Runs this worker's part; every worker returns the whole record."""
    threads = settings.threads or int(os.environ.get("OMP_NUM_THREADS", "0"))
    if threads:
        torch.set_num_threads(threads)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    launched = os.environ.get(RUN_FOLDER)
    last = LastWords(schedule, settings.timeout_s, rank, Path(launched) if launched else None)
    watching = Watchdog(settings.timeout_s, settings.start_timeout_s, last.when_stuck, is_on=size > 1)
    try:
        with watching as dog, open_world(settings) as world, joined(world, take) as own:
            last.folder, last.places = own.path, world.places
            run = Run(
                schedule, layered, job, settings, recipe, data, evaluation, cluster, source, own.path, world, own, dog
            )
            with closing(Flight(own.path, rank, settings.timeout_s)) as flight:
                try:
                    return _run_worker(run, flight, console)
                except BaseException as fault:
                    raise last.of(fault) from fault.__cause__  # before anything is closed, which may take its time
    except BaseException as fault:
        raise last.of(fault) from fault.__cause__


def _run_worker(run: Run, flight: Flight, console: Console | None) -> Record:
    """Trains, evaluates where asked, and gathers the record."""
    sums = partial(accuracy_sums, shifts=getattr(run.layered.loss, "shifts", False))
    metric = (sums, len(METRICS)) if has_accuracy(run.layered) else (None, 0)
    assert run.own is not None
    if run.world.worker == 0 and RUN_FOLDER not in os.environ:
        run.schedule.save(run.folder / SCHEDULE_FILE)  # for those who read the recorders
    words = Words(run.world.store, run.own.secret) if run.world.store is not None else None
    run.dog.begin(flight, words, run.world.worker, run.world.size)
    worker = Worker(
        run.schedule, run.layered, run.world, run.settings, make_optimizer=maker_of(run), feed=feed_of(run),
        metric=metric[0], num_metrics=metric[1], flight=flight,
    )  # fmt: skip
    warm_up(worker)
    with run.dog.patience(run.settings.save_timeout_s):
        told = [*run.own.changes, *_resume(run, worker)]
    run.job = run.job.with_some_measured()
    checkpointer = _checkpointer_of(run, worker) if run.job.checkpoint_every else None
    with closing(Listener(run, worker, console, checkpointer)) as listener:
        if run.world.size > 1:
            listener.announce("transport", f"workers exchange rows by {worker.transport.name}")
        for word in told:
            listener.announce("resume", word)
        if run.job.first_step >= run.job.steps:
            listener.announce("resume", nothing_left(run.job.first_step, run.job.steps))
        run.dog.get_on()
        return _run_to_the_end(run, worker, listener, words)


def _run_to_the_end(run: Run, worker: Worker, listener: Listener, words: Words | None) -> Record:
    """Trains until the last step, or until all agree to stop; saves then, and gathers the record."""
    gate, checkpointer = Gate(run.job.first_step), listener.checkpointer
    worker.gate = gate
    with Stopper(gate, run.world, run.folder, words, signals_heard()).listening() as stopper:
        step = _run_all(run, worker, listener)
        worker.close()
        run.dog.get_on()
        if gate.last is not None and step < run.job.steps:
            cause = stopper.cause or "a signal to another worker"
            _save_last(run, checkpointer or _checkpointer_of(run, worker), listener, step, f"stopped by {cause}")
            where = f"go on with --resume auto --out {run.folder}"
            listener.announce("stopped", f"by {cause} after step {step}; {where}")
            if run.own is not None:
                run.own.state = "stopped"
        elif checkpointer is not None or run.job.save_final:
            _save_last(run, checkpointer or _checkpointer_of(run, worker), listener, step, "all steps are done")
        if RUN_FOLDER not in os.environ:  # else the one who started this worker does it
            with run.dog.patience(run.settings.save_timeout_s):
                _bring_back(run, worker)
        run.dog.get_on()
        return _finish(run, worker, listener)


def _save_last(run: Run, checkpointer: Checkpointer, listener: Listener, step: int, after: str) -> None:
    """Saves the last step of a run; that it could not be is an error, since nothing else would be left of it."""
    listener.checkpointer = checkpointer
    with run.dog.patience(run.settings.save_timeout_s):
        if step > run.job.first_step:
            checkpointer.save(step)
        checkpointer.close()
    faults = listener.tell_news(step)
    if faults:
        raise RunError(f"{after}, but {faults[0]}", "free the disk, or save elsewhere")


def _bring_back(run: Run, worker: Worker) -> None:
    """Puts the trained weights into the caller's model, those of other workers' stages too."""
    from stagewright.runtime.checkpoint.resuming import give_back

    if not give_back(run.layered.model, run.folder):
        for here in worker.replicas.values():
            for versions in (here.weights, *here.tied):
                versions.end_in_first_slot()


def _run_all(run: Run, worker: Worker, listener: Listener) -> int:
    """Runs every stretch, or those before the gate closes; returns the steps that are done."""
    evaluation = _evaluation_of(run)
    step = run.job.first_step
    for first, stop in run.job.parts():
        worker.run(stop - first, first)
        listener.scalars.drain()
        last = worker.gate.last if worker.gate is not None else None
        step = stop if last is None else max(first, min(stop, last + 1))
        if step < stop:
            return step
        if evaluation is not None:
            listener.evaluate(stop, evaluation)
    return step


def _finish(run: Run, worker: Worker, listener: Listener) -> Record:
    """Gathers and saves the record, and waits until all have it."""
    record, path = gather(run, worker, listener.points, listener.sample_tokens), run.folder / RECORD
    if run.world.worker == 0 and (record.step_s or not path.exists()):  # a run that did nothing leaves what is there
        record.save(path)
    if run.world.control is not None:
        dist.barrier(group=run.world.control)
    return record


def _checkpointer_of(run: Run, worker: Worker) -> Checkpointer:
    """What writes this run's checkpoints. All workers must ask for it."""
    from stagewright.runtime.checkpoint.saving import (
        Checkpointer,  # torch.distributed.checkpoint takes a second to load
    )

    job = run.job
    return Checkpointer(
        worker, run.layered, run.folder, every=job.checkpoint_every, keep=job.keep, run=run.own.id if run.own else None,
        patience=lambda: run.dog.patience(run.settings.save_timeout_s),
        may_prune=lambda: worker.watch is None or worker.watch.skipped == 0,
    )  # fmt: skip


def _resume(run: Run, worker: Worker) -> list[str]:
    """Restores the last good checkpoint where the job or a restart asks for it, and says what it did."""
    restarted = run.own is not None and run.own.is_restarted and run.job.checkpoint_every is not None
    if run.job.resume is None and not restarted:
        return []
    from stagewright.runtime.checkpoint.resuming import restore
    from stagewright.runtime.checkpoint.storage import find_checkpoint, sweep

    words: list[str] = []
    named = None if run.job.resume in (None, "auto") else Path(str(run.job.resume))
    if run.world.worker == 0:
        sweep(run.folder)
    found = find_checkpoint(run.folder, words.append, run.world) if restarted or named is None else None
    if found is None and named is not None:
        found = find_checkpoint(named, words.append, run.world)
        if found is None:
            # Who names a checkpoint does not want to begin at the beginning.
            why = f" ({words[0]})" if words else ""
            raise CheckpointError(f"--resume {named}: no good checkpoint is there{why}", "name another folder")
    if found is None:
        return [*words, f"no checkpoint in {run.folder}: starting from the first step"]
    own = not isinstance(run.recipe, Recipe)
    step = restore(worker, *found, options=own)
    run.job = replace(run.job, first_step=step)
    return [*words, f"going on after step {step}, from {found[0]}"]


def maker_of(run: Run) -> MakeOptimizer:
    """The function that makes a stage's optimizer."""
    if isinstance(run.recipe, Recipe):
        return optimizer_maker(run.recipe, run.settings.device, parameter_roles(run.layered))
    return run.recipe


def feed_of(run: Run) -> Feed:
    """Where the rows come from."""
    if run.data is None:
        return synthetic_feed(run.layered, run.settings, run.world.device)
    if not callable(run.data):
        return _settled(run.data, run)
    feed = FunctionFeed(run.data)
    return ReadAhead(feed, run.world.device, batches=1, threads=1) if run.world.device.type == "cuda" else feed


def _evaluation_of(run: Run) -> Feed | None:
    """Where the rows of evaluations come from, where there are any: the first ones made up for training otherwise."""
    if run.job.evaluate_every is None:
        return None
    if run.evaluation is None:
        return synthetic_feed(run.layered, run.settings, run.world.device)
    return _settled(run.evaluation, run)


def _settled(feed: Feed, run: Run) -> Feed:
    """The feed, told which rows this worker needs, where it wants to know; read ahead where it can be."""
    settle = getattr(feed, "settle", None)
    if settle is not None:
        settle(run.schedule.plan, run.settings)
    return ReadAhead(feed, run.world.device) if getattr(feed, "may_be_read_ahead", False) else feed


def synthetic_feed(layered: Layered, settings: Settings, device: torch.device, num_classes: int = 10) -> Feed:
    """Made-up rows for any model; labels below `num_classes` or the width of its predictions."""
    last = layered.stage(layered.num_layers - 1, layered.num_layers) if layered.num_layers > 1 else None
    widths = [spec.shape_per_row[-1] for spec in (last.inputs if last else ()) if spec.shape_per_row]
    return SyntheticFeed(
        fed_inputs(layered, settings), layered.targets, num_classes=widths[0] if widths else num_classes,
        seed=settings.seed, device=device, channels_last=settings.channels_last,
    )  # fmt: skip
