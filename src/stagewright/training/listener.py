"""A run as one of its workers has it, what goes along with the worker's updates, and the record of it."""

from __future__ import annotations

import math
import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.errors import RunError
from stagewright.models import Layered
from stagewright.record import DeviceUse, Point, Record, Source, Span
from stagewright.runtime.evaluate import evaluate, means
from stagewright.runtime.feed import Feed
from stagewright.runtime.launch.environment import this_command
from stagewright.runtime.run_folder import RunFolder
from stagewright.runtime.safety.numbers import Watch
from stagewright.runtime.safety.pace import PaceCheck
from stagewright.runtime.safety.replicas import ReplicaCheck
from stagewright.runtime.safety.watchdog import Watchdog
from stagewright.runtime.settings import Settings
from stagewright.runtime.timing import AsyncScalars
from stagewright.runtime.weights import OptimizerMaker
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import Words, World, gather_json
from stagewright.schedule import COMPUTE, Schedule
from stagewright.training.callbacks import Callback, overrides
from stagewright.training.config import Job
from stagewright.training.events import BOUNDARY, STEP, Teller, sinks_of
from stagewright.training.metrics import METRICS, Metric, peak_flops, perplexity, token_flops
from stagewright.training.recipes import Recipe, rate_at
from stagewright.training.telling import end_figures, memory_by_stage, memory_bytes, memory_figures, plan_figures

if TYPE_CHECKING:
    from stagewright.runtime.checkpoint.saving import Checkpointer


Rows = Callable[[int, int, int], tuple[Sequence[Tensor], Sequence[Tensor]]]


@dataclass
class Run:
    """Everything one worker's run needs."""

    schedule: Schedule
    layered: Layered
    job: Job
    settings: Settings
    recipe: Recipe | OptimizerMaker
    data: Feed | Rows | None
    evaluation: Feed | None
    cluster: str
    source: Source
    own: RunFolder
    """Which run this is."""
    world: World
    metrics: Mapping[str, Metric] | None = None
    """Figures of one's own, instead of accuracy."""
    callbacks: Sequence[Callback] = ()
    dog: Watchdog = field(default_factory=lambda: Watchdog(math.inf, math.inf, str, is_on=False))

    @property
    def folder(self) -> Path:
        """Where the run keeps its files."""
        return self.own.path

    @property
    def figures(self) -> tuple[str, ...]:
        """What metrics are called."""
        return METRICS if self.metrics is None else tuple(self.metrics)


class Listener:
    """Keeps the learning rate, the clock, the log, the checkpoints and the watch on numbers while a worker runs."""

    def __init__(self, run: Run, worker: Worker, checkpointer: Checkpointer | None, words: Words | None = None) -> None:
        self.checkpointer = checkpointer
        self.faults: dict[int, str] = {}
        self._run, self._worker, self._plan = run, worker, run.schedule.plan
        self._group = run.world.group("figures", self._plan.workers[-1])
        self._speaks = self._plan.workers[-1][0] == run.world.worker
        self._is_last = run.world.worker in self._plan.workers[-1]
        self._row_tokens = run.layered.row_tokens
        self._tokens = sum(map(self._tokens_of, range(run.job.first_step)))
        """Tokens seen so far, those before a checkpoint too; 0 where rows are no text."""
        self._logged_at = (time.perf_counter(), run.job.first_step, self._tokens)
        self._names: list[str] = []
        self._points = array("d")
        self._started = time.perf_counter()
        self._tells_steps = overrides(run.callbacks, "on_step")
        self.scalars = AsyncScalars(run.world.device)
        is_resumed = run.job.first_step > 0
        sinks = sinks_of(run.job.sinks, run.folder, self._about(), rank=run.world.worker, is_resumed=is_resumed)
        self._teller = Teller(run.folder, sinks if self._speaks else ())
        self.close = self._teller.close
        if isinstance(run.recipe, Recipe):
            for here in worker.replicas.values():
                for versions in (here.weights, *here.tied):
                    versions.rate_of = partial(rate_at, run.recipe)
        if run.job.warm_up == 0:
            worker.stopwatch.mark()  # where the first step begins that is measured
        self._note_memory()
        worker.watch, worker.wants_metric = self._watch(), self._is_due
        worker.on_update, worker.on_stage_update = self._after_update, self._after_stage
        every, tell = run.job.check_replicas, partial(self.announce, every=True)
        self.replicas = ReplicaCheck(self._plan, words, self.scalars, every, tell) if words and every else None
        is_predicted = every > 1 and bool(self._plan.predicted_compute_s)
        self.pace = PaceCheck(worker, words, every, tell) if words and is_predicted else None

    def _about(self) -> dict[str, object]:
        run, plan = self._run, self._plan
        return {
            "name": run.job.name, "placement": plan.placement, "batch": plan.batch, "policy": plan.policy,
            "microbatches": plan.num_microbatches, "versions": plan.versions, "precision": run.settings.precision,
            "seed": run.settings.seed, "recipe": run.recipe if isinstance(run.recipe, Recipe) else "own",
        }  # fmt: skip

    def _watch(self) -> Watch:
        layered, settings, device = self._run.layered, self._run.settings, self._run.world.device
        layers = range(layered.num_layers)
        names = {name: layered.names[layer] for layer in layers for name in layered.parameter_names(layer, layer + 1)}
        watch = Watch(
            names, self.scalars, stops=settings.on_nan == "stop", looks_always=device.type == "cpu",
            forgives_overflow=settings.precision == "fp16",
            tell=lambda text: self.announce("numbers", text, every=True),
        )  # fmt: skip
        watch.is_due = self._is_due
        return watch

    def _is_due(self, batch: int) -> bool:
        """Whether a log line follows a batch."""
        return (batch + 1) % self._run.job.log_every == 0 or batch + 1 == self._run.job.steps

    def _after_stage(self, stage: int, batch: int) -> None:
        """What follows each update of a stage."""
        if self.checkpointer is not None:
            self.checkpointer.note_stage(stage, batch)
        if self.replicas is not None:
            self.replicas.after_update(self._worker.replicas[stage], batch)

    def _after_update(self, batch: int) -> None:
        """What follows a worker's last update of a batch."""
        job = self._run.job
        self.scalars.poll()
        if self.pace is not None:
            self.pace.after_update(batch)
        if self.checkpointer is not None:
            self.checkpointer.note_worker(batch)
            self.tell_news()
        if batch - job.first_step + 1 >= job.warm_up:
            self._worker.stopwatch.mark()
        if batch + 1 == max(job.steps - self._run.settings.trace_steps, job.first_step + 1):
            self._worker.stopwatch.start()
        if self._is_due(batch):
            self._note_memory()
        if self._is_last:
            self._note_figures(batch)

    def _note_figures(self, batch: int) -> None:
        """Looks at the loss where it is cheap, and logs it where it is due."""
        is_cpu, is_due = self._run.world.device.type == "cpu", self._is_due(batch)
        sums = self._worker.figures(batch)
        self._tokens += self._tokens_of(batch)
        if not is_cpu and not is_due and not self._tells_steps:
            return
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        if self._speaks:
            verdict, tokens = self._worker.verdicts.get(batch), self._tokens
            norm = sums.new_full((1,), math.nan) if verdict is None else verdict.norm.reshape(1).to(sums)
            scale = self._worker.scale.current.reshape(1).to(sums.dtype)
            figures = torch.cat([scale, norm, means(sums, self._plan.batch)])
            self.scalars.read(figures, lambda found: self._log(batch + 1, is_due, tokens, *found))

    def _log(
        self, step: int, is_due: bool, tokens: int, scale: float, norm: float, loss: float, *accuracy: float
    ) -> None:  # fmt: skip
        """Adds the loss of a step to its curve, and logs it with what else is known, where that is due."""
        self._point("loss", step, loss)
        if self._tells_steps:
            self._teller.tell(STEP, step=step, epoch=self._run.job.epoch_of(step), loss=loss)
        if not is_due:
            return
        rate, measures = self._rate(step), dict(zip(self._run.figures, accuracy))
        known = {} if rate is None else {"learning_rate": rate}
        known |= {"norm": norm} if math.isfinite(norm) else {}
        self._say("train", step, {"loss": loss, **measures, **known, **self._speed(step, tokens), "scale": scale})
        for name, value in {**measures, **known}.items():
            self._point(name, step, value)

    def _rate(self, step: int) -> float | None:
        """The learning rate that made a step, of the first group where groups differ."""
        if isinstance(self._run.recipe, Recipe):
            return rate_at(self._run.recipe, step - 1)
        made = [here.weights.optimizer for here in self._worker.replicas.values()]
        return next((float(each.param_groups[0]["lr"]) for each in made if each is not None), None)

    def _speed(self, step: int, tokens: int) -> dict[str, float]:
        """The images/s since the last time; of text the tokens/s, those seen, and the share of the cards' peak."""
        now, (before, then, seen) = time.perf_counter(), self._logged_at
        self._logged_at = (now, step, tokens)
        passed = max(now - before, 1e-9)
        told: dict[str, float] = {"images_per_s": self._plan.batch * (step - then) / passed}
        if self._row_tokens:
            told |= {"tokens_per_s": (tokens - seen) / passed, "tokens": tokens}
            if self._token_share is not None:
                told["mfu"] = told["tokens_per_s"] * self._token_share
        return told

    @cached_property
    def _token_share(self) -> float | None:
        """The share of all cards' peak that one token/s is; None where either is not known."""
        run = self._run
        peak = peak_flops(run.world.device, run.settings.precision)
        flops = token_flops(run.layered, self._row_tokens or 0) if peak is not None else None
        return None if flops is None or peak is None else flops / (peak * len(self._plan.devices))

    def tell_news(self) -> None:
        """Tells what became of checkpoints; `faults` keeps those that could not be saved, by step."""
        for saved in self.checkpointer.news() if self.checkpointer is not None else ():
            self.announce("checkpoint", str(saved), step=saved.step if saved.fault is None else None)
            if saved.fault is not None:
                self.faults[saved.step] = str(saved)
        copier = self.checkpointer.copier if self.checkpointer is not None else None
        while copier is not None and not copier.news.empty():
            self.announce("copy", copier.news.get())

    def announce(self, kind: str, text: str, *, every: bool = False, step: int | None = None) -> None:
        """Tells a sentence; from one worker, or from every one that has something to say."""
        if self._speaks or every:
            self._teller.tell(kind, text=text, **({} if step is None else {"step": step}))

    def tell_boundary(self, step: int) -> None:
        """Tells callbacks that all workers wait for them after a step."""
        if self._speaks:
            epoch, per_epoch = self._run.job.epoch_of(step), self._run.job.steps_per_epoch
            self._teller.tell(BOUNDARY, step=step, epoch=epoch, ends_epoch=step % (per_epoch or step + 1) == 0)

    def _say(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        place = {"epoch": self._run.job.epoch_of(step), "iter": step}
        memory = {**memory_figures(self._run.world.device), **memory_by_stage(self._plan, self._run.folder)}
        self._teller.tell(kind, **place, **values, **memory)

    def _note_memory(self) -> None:
        if self._worker.flight is not None:
            self._worker.flight.note_memory(memory_bytes(self._run.world.device))

    def tell_plan(self) -> None:
        """Tells what runs where, from one worker."""
        if self._speaks:
            run, about = self._run, {key: value for key, value in self._about().items() if key != "recipe"}
            self._teller.tell("plan", **about, **plan_figures(self._plan, run.job, run.layered))

    def tell_end(self, record: Record) -> None:
        """Tells what it came to, and what to do next."""
        is_saved = self.checkpointer is not None and self._run.own.state != "stopped"
        self._teller.tell("end", **end_figures(record, self._run.layered, self._run.folder, is_saved=is_saved))

    def evaluate(self, step: int, feed: Feed) -> None:
        """Evaluates with the newest weights, and logs it."""
        rows, started = self._run.job.evaluation_rows, time.perf_counter()
        means = evaluate(self._worker, feed, rows, self._plan.batch).tolist()
        if self._speaks:
            rate = rows / (time.perf_counter() - started)
            figures = dict(zip(("loss", *self._run.figures), means))
            speed = {"images_per_s": rate}
            if self._row_tokens:
                found = perplexity(self._run.layered, figures["loss"])
                figures |= {} if found is None else {"perplexity": found}
                speed |= {"tokens_per_s": rate * self._row_tokens}
            self._say("validation", step, {**figures, **speed})
            for name, value in figures.items():
                self._point(f"validation_{name}", step, value)
        self._logged_at = (time.perf_counter(), step, self._tokens)

    def _tokens_of(self, batch: int) -> int:
        length = getattr(self._run.data, "length", None)  # rows of a feed may be shorter in some batches
        row = length(batch) if length is not None and self._row_tokens else None
        return self._plan.batch * (row or self._row_tokens or 0)

    @property
    def sample_tokens(self) -> float | None:
        """The tokens of a sample in the steps of this run, on average, where samples are text."""
        steps = range(self._run.job.first_step, self._run.job.steps)
        return (
            sum(map(self._tokens_of, steps)) / (len(steps) * self._plan.batch) if steps and self._row_tokens else None
        )

    def _point(self, name: str, step: int, value: float) -> None:
        if math.isfinite(value):
            if name not in self._names:
                self._names.append(name)
            # As numbers in a row: a point is there for every step, and a long run has many.
            self._points.extend((self._names.index(name), step, value, time.perf_counter() - self._started))

    @property
    def points(self) -> list[Point]:
        """All points of all curves so far."""
        per_epoch = self._run.job.steps_per_epoch
        return [
            Point(
                name=self._names[int(name)], step=int(step), epoch=step / per_epoch if per_epoch else 0.0, value=value,
                seconds=seconds,
            )
            for name, step, value, seconds in zip(*(self._points[place::4] for place in range(4)))
        ]  # fmt: skip


COMMAND = "STAGEWRIGHT_COMMAND"
"""The variable that tells workers what was typed: their own command line names the configuration file."""
_COMPUTE_KINDS = {kind.value for kind in COMPUTE}


def gather(run: Run, worker: Worker, points: Sequence[Point], sample_tokens: float | None = None) -> Record:
    """The record of the run, from what each worker saw."""
    plan, device = run.schedule.plan, run.world.device
    own = {
        "spans": [list(span) for span in worker.stopwatch.spans()], "steps": worker.stopwatch.step_s(),
        "points": [point.__dict__ for point in points], **memory_figures(device),
    }  # fmt: skip
    told = gather_json(own, run.world.control, run.world.size)
    steps = told[0]["steps"]
    everything = [Span(*span) for each in told for span in each["spans"]]
    zero = min((span.start_s for span in everything), default=0.0)
    spans = tuple(span._replace(start_s=span.start_s - zero, stop_s=span.stop_s - zero) for span in everything)
    traced_s = sum(steps[-run.settings.trace_steps :] if run.settings.trace_steps else []) or 1.0

    def use_of(number: int) -> DeviceUse:
        busy = sum(
            span.stop_s - span.start_s for span in spans if span.worker == number and span.kind in _COMPUTE_KINDS
        )
        return DeviceUse(
            device=str(plan.devices[number]),
            stages=tuple(stage for stage, members in enumerate(plan.workers) if number in members),
            busy_share=min(1.0, busy / max(traced_s, 1e-9)), peak_bytes=told[number]["memory_bytes"],
            driver_bytes=told[number].get("driver_bytes"),
        )  # fmt: skip

    return Record(
        name=run.job.name, source=run.source, plan=plan, cluster=run.cluster, precision=run.settings.precision,
        data="synthetic" if run.data is None else "records", epoch_samples=run.job.epoch_images, step_s=tuple(steps),
        step_samples=plan.batch, sample_name=run.layered.sample_name, sample_tokens=sample_tokens,
        devices=tuple(map(use_of, range(len(plan.devices)))), spans=spans,
        points=tuple(Point(**point) for each in told for point in each["points"]), command=typed_command(),
        environment={
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
    )  # fmt: skip


def typed_command() -> str:
    """The command line that began the run, where there is one: a worker is told it."""
    try:
        return os.environ.get(COMMAND) or " ".join(this_command()[1:])
    except RunError:
        return ""
