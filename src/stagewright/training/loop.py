"""Training as one of the workers: from the last checkpoint on, stretch by stretch, to the record."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer

from stagewright.errors import CheckpointError, RunError, StagewrightError
from stagewright.models import Layered
from stagewright.policy import RULES
from stagewright.record import Record, Source
from stagewright.runtime.diagnosis import is_echo
from stagewright.runtime.dynamic import run_dynamic
from stagewright.runtime.feed import Feed, FunctionFeed, SyntheticFeed
from stagewright.runtime.flight import Flight, write_json
from stagewright.runtime.hosted import with_dtypes
from stagewright.runtime.launch import RESTARTED, RUN_FOLDER
from stagewright.runtime.settings import Settings
from stagewright.runtime.settle import fed_inputs
from stagewright.runtime.stopping import Gate, Stopper, signals_heard
from stagewright.runtime.warm_up import warm_up
from stagewright.runtime.watchdog import verdict, watchdog
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, gather_json, open_world
from stagewright.schedule import Schedule
from stagewright.training.gathering import gather
from stagewright.training.job import Job
from stagewright.training.listener import Listener
from stagewright.training.metrics import METRICS, accuracy_sums
from stagewright.training.optimizers import Recipe, optimizer_maker

if TYPE_CHECKING:
    from stagewright.runtime.checkpoint import Checkpointer

Rows = Callable[[int, int, int], tuple[Sequence[Tensor], Sequence[Tensor]]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
RESTARTS_OF_TORCH = "TORCHELASTIC_RESTART_COUNT"


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


def work(
    folder: Path, console: Console | None, schedule: Schedule, layered: Layered, job: Job, settings: Settings,
    recipe: Recipe | MakeOptimizer, data: Feed | Rows | None, evaluation: Feed | None, cluster: str, source: Source,
) -> Record:  # fmt: skip
    """Runs this worker's part; every worker returns the whole record."""
    threads = settings.threads or int(os.environ.get("OMP_NUM_THREADS", "0"))
    if threads:
        torch.set_num_threads(threads)
    rank = int(os.environ.get("RANK", "0"))
    flight = Flight(folder, rank)
    try:
        with open_world(settings) as world:
            run = Run(schedule, layered, job, settings, recipe, data, evaluation, cluster, source, folder, world)
            return run_worker(run, flight, console)
    except BaseException as fault:
        confess(folder, rank, fault, schedule, settings.timeout_s)
        raise
    finally:
        flight.close()


def confess(folder: Path, rank: int, fault: BaseException, schedule: Schedule, timeout_s: float) -> None:
    """Writes down why this worker ends, for the one who started it; of another's fault, for whom it waited."""
    if isinstance(fault, StagewrightError):
        told = {"what": fault.what, "todo": fault.todo}
    else:
        lines = str(fault).strip().splitlines() or [""]
        told = {"what": f"{type(fault).__name__}: {lines[0]}", "todo": None}
        if is_echo(lines[0]):
            told = {"what": verdict(schedule, folder, rank, timeout_s), "todo": told["what"]}
    with suppress(OSError):  # its output says it too
        write_json(folder / f"worker-{rank}.error.json", told)


def run_worker(run: Run, flight: Flight, console: Console | None) -> Record:
    """Trains, evaluates where asked, and gathers the record."""
    worker = Worker(
        run.schedule, run.layered, run.world, run.settings, make_optimizer=maker_of(run), feed=feed_of(run),
        metric=accuracy_sums, num_metrics=len(METRICS), flight=flight,
    )  # fmt: skip
    warm_up(worker)
    words = resume(run, worker)
    checkpointer = checkpointer_of(run, worker) if run.job.checkpoint_every else None
    with closing(Listener(run, worker, console, checkpointer)) as listener:
        if run.world.size > 1:
            listener.announce("transport", f"workers exchange rows by {worker.transport.name}")
        for word in words:
            listener.announce("resume", word)
        return run_to_the_end(run, worker, flight, listener)


def run_to_the_end(run: Run, worker: Worker, flight: Flight, listener: Listener) -> Record:
    """Trains until the last step, or until all agree to stop; saves then, and gathers the record."""
    gate, checkpointer = Gate(run.job.first_step), listener.checkpointer
    worker.gate = gate
    signals = signals_heard(is_launched=RUN_FOLDER in os.environ)
    with Stopper(gate, run.world, run.folder, signals).listening() as stopper:
        with watched(run, flight):
            step = run_all(run, worker, listener)
            worker.close()
        if gate.last is not None and step < run.job.steps:
            checkpointer = checkpointer or checkpointer_of(run, worker)
            save_and_stop(run, checkpointer, listener, step, stopper.cause or "a signal to another worker")
        elif checkpointer is not None:
            checkpointer.close()
            listener.tell_news()
        return finish(run, worker, listener)


def watched(run: Run, flight: Flight) -> AbstractContextManager[None]:
    """The watchdog, where there is anyone to wait for."""
    if run.world.size == 1:
        return nullcontext()
    return watchdog(flight, run.schedule, run.folder, run.world.worker, run.settings.timeout_s)


def run_all(run: Run, worker: Worker, listener: Listener) -> int:
    """Runs every stretch, or those before the gate closes; returns the steps that are done."""
    evaluation = evaluation_of(run)
    step = run.job.first_step
    for first, stop in run.job.parts():
        run_stretch(worker, first, stop)
        listener.later.drain()
        last = worker.gate.last if worker.gate is not None else None
        step = stop if last is None else max(first, min(stop, last + 1))
        if step < stop:
            return step
        if evaluation is not None:
            listener.evaluate(stop, evaluation)
    return step


def save_and_stop(run: Run, checkpointer: Checkpointer, listener: Listener, step: int, cause: str) -> None:
    """Saves the step at which an early end was agreed on, and says how to go on."""
    listener.checkpointer = checkpointer
    if step > 0:
        checkpointer.save(step)
    checkpointer.close()
    faults = listener.tell_news(step)
    if faults:
        raise RunError(f"stopped by {cause} after step {step}, but {faults[0]}", "free the disk, or save elsewhere")
    listener.announce("stopped", f"by {cause} after step {step}; go on with --resume auto --out {run.folder}")


def finish(run: Run, worker: Worker, listener: Listener) -> Record:
    """Gathers and saves the record, and waits until all have it."""
    record = gather(run, worker, listener)
    if run.world.worker == 0:
        record.save(run.folder / "record.json")
    if run.world.control is not None:
        dist.barrier(group=run.world.control)
    return record


def checkpointer_of(run: Run, worker: Worker) -> Checkpointer:
    """What writes this run's checkpoints. All workers must ask for it."""
    from stagewright.runtime.checkpoint import Checkpointer  # torch.distributed.checkpoint takes a second to load

    return Checkpointer(worker, run.layered, run.folder, every=run.job.checkpoint_every, keep=run.job.keep)


def resume(run: Run, worker: Worker) -> list[str]:
    """Restores the last good checkpoint where the job or a restart asks for it, and says what it did."""
    again = RESTARTED in os.environ or os.environ.get(RESTARTS_OF_TORCH, "0") != "0"
    restarted = again and run.job.checkpoint_every is not None
    if run.job.resume is None and not restarted:
        return []
    from stagewright.runtime.checkpoint import find_checkpoint, restore, sweep

    words: list[str] = []
    source = run.folder if run.job.resume in (None, "auto") or restarted else Path(str(run.job.resume))
    told: list[Any] = [None]
    if run.world.worker == 0:
        sweep(run.folder)
        found = find_checkpoint(source, words.append)
        if found is None and restarted and run.job.resume not in (None, "auto"):
            found = find_checkpoint(Path(str(run.job.resume)), words.append)
        told = [None if found is None else {"folder": str(found[0]), "manifest": found[1]}]
    chosen, words = gather_json([told[0], words], run.world.control, run.world.size)[0]
    if chosen is None and run.job.resume not in (None, "auto"):
        # Who names a checkpoint does not want to begin at the beginning.
        why = f" ({words[0]})" if words else ""
        raise CheckpointError(f"--resume {run.job.resume}: no good checkpoint is there{why}", "name another folder")
    if chosen is None:
        return [*words, f"no checkpoint in {source}: starting from the first step"]
    own = not isinstance(run.recipe, Recipe)
    step = restore(worker, Path(chosen["folder"]), chosen["manifest"], options=own)
    run.job = replace(run.job, first_step=step)
    return [*words, f"going on after step {step}, from {chosen['folder']}"]


def run_stretch(worker: Worker, first: int, stop: int) -> None:
    """Runs the steps first … stop − 1 without a stop in between."""
    if RULES[worker.plan.policy].by_arrival:
        run_dynamic(worker, stop - first, first)
    else:
        worker.run(stop - first, first)


def maker_of(run: Run) -> MakeOptimizer:
    """The function that makes a stage's optimizer."""
    if isinstance(run.recipe, Recipe):
        return optimizer_maker(run.recipe, run.settings.device)
    return run.recipe


def feed_of(run: Run) -> Feed:
    """Where the rows come from."""
    if run.data is None:
        return synthetic_feed(run.layered, run.settings, run.world.device)
    return FunctionFeed(run.data) if callable(run.data) else settled(run.data, run)


def evaluation_of(run: Run) -> Feed | None:
    """Where the rows of evaluations come from, where there are any: the first ones made up for training otherwise."""
    if run.job.evaluate_every is None:
        return None
    if run.evaluation is None:
        return synthetic_feed(run.layered, run.settings, run.world.device)
    return settled(run.evaluation, run)


def settled(feed: Feed, run: Run) -> Feed:
    """The feed, told which rows this worker needs, where it wants to know."""
    settle = getattr(feed, "settle", None)
    if settle is not None:
        settle(run.schedule.plan, run.settings)
    return feed


def synthetic_feed(layered: Layered, settings: Settings, device: torch.device, num_classes: int = 10) -> Feed:
    """Made-up rows for any model; labels below `num_classes` or the width of its predictions."""
    last = layered.stage(layered.num_layers - 1, layered.num_layers) if layered.num_layers > 1 else None
    widths = [spec.shape_per_row[-1] for spec in (last.inputs if last else ()) if spec.shape_per_row]
    change = {torch.float32: torch.float64} if settings.precision == "fp64" else {}
    inputs = with_dtypes(fed_inputs(layered, settings), change)
    return SyntheticFeed(
        inputs, layered.targets, num_classes=widths[0] if widths else num_classes, seed=settings.seed, device=device,
        channels_last=settings.channels_last,
    )  # fmt: skip
