"""What goes along with a worker's updates: rates, clock, log, checkpoints, and the watch on numbers."""

from __future__ import annotations

import math
import time
from array import array
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.console import Console

from stagewright.record import Point
from stagewright.runtime.evaluate import evaluate, means
from stagewright.runtime.feed import Feed
from stagewright.runtime.safety.numbers import Watch
from stagewright.runtime.timing import AsyncScalars
from stagewright.runtime.worker import Worker
from stagewright.training.events import Teller, plain_line
from stagewright.training.gathering import Run, memory_figures
from stagewright.training.metrics import METRICS, peak_flops, perplexity, token_flops, tokens_of_row
from stagewright.training.recipes import Recipe, rate_at
from stagewright.training.sinks import Sink, open_sinks

if TYPE_CHECKING:
    from stagewright.runtime.checkpoint.saving import Checkpointer


class Listener:
    """Keeps the learning rate, the clock, the log, the checkpoints and the watch on numbers while a worker runs."""

    def __init__(self, run: Run, worker: Worker, console: Console | None, checkpointer: Checkpointer | None) -> None:
        self.run, self.worker, self.console, self.checkpointer = run, worker, console, checkpointer
        plan, world = run.schedule.plan, run.world
        self.group = world.group("figures", plan.workers[-1])
        self.speaks = plan.workers[-1][0] == world.worker
        self.is_last = world.worker in plan.workers[-1]
        self.teller = Teller(run.folder, self.sinks() if self.speaks else ())
        self.row_tokens = tokens_of_row(run.layered)
        self.tokens = sum(map(self.tokens_of, range(run.job.first_step)))
        """Tokens seen so far, those before a checkpoint too; 0 where rows are no text."""
        self.logged_at = (time.perf_counter(), run.job.first_step, self.tokens)
        self._names: list[str] = []
        self._points = array("d")
        self.started = time.perf_counter()
        self.scalars = AsyncScalars(world.device)
        if isinstance(run.recipe, Recipe):
            for here in worker.replicas.values():
                for versions in (here.weights, *here.tied):
                    versions.rate_of = partial(rate_at, run.recipe)
        if run.job.warm_up == 0:
            worker.stopwatch.mark()  # where the first step begins that is measured
        worker.watch, worker.wants_metric = self.watch(), self.is_due
        worker.on_update, worker.on_stage_update = self.after_update, self.after_stage_update

    def watch(self) -> Watch:
        """What looks at this worker's numbers."""
        layered, settings, device = self.run.layered, self.run.settings, self.run.world.device
        layers = range(layered.num_layers)
        names = {name: layered.names[layer] for layer in layers for name in layered.parameter_names(layer, layer + 1)}
        watch = Watch(
            names, self.scalars, stops=settings.on_nan == "stop", looks_always=device.type == "cpu",
            forgives_overflow=settings.precision == "fp16",
            tell=lambda text: self.announce("numbers", text, every=True),
        )  # fmt: skip
        watch.is_due = self.is_due
        return watch

    def is_due(self, batch: int) -> bool:
        """Whether a log line follows a batch."""
        return (batch + 1) % self.run.job.log_every == 0 or batch + 1 == self.run.job.steps

    def after_stage_update(self, stage: int, batch: int) -> None:
        """What follows each update of a stage."""
        if self.checkpointer is not None:
            self.checkpointer.note_stage(stage, batch)

    def after_update(self, batch: int) -> None:
        """What follows a worker's last update of a batch."""
        job = self.run.job
        self.scalars.poll()
        if self.checkpointer is not None:
            self.checkpointer.note_worker(batch)
            self.tell_news()
        if batch - job.first_step + 1 >= job.warm_up:
            self.worker.stopwatch.mark()
        if batch + 1 == max(job.steps - self.run.settings.trace_steps, job.first_step + 1):
            self.worker.stopwatch.start()
        if self.is_last:
            self.note_figures(batch)

    def tell_news(self, step: int | None = None) -> list[str]:
        """Tells what became of checkpoints; returns the faults of those of one step."""
        news = list(self.checkpointer.news()) if self.checkpointer is not None else []
        for saved in news:
            self.announce("checkpoint", str(saved))
        return [str(saved) for saved in news if saved.fault is not None and saved.step == step]

    def announce(self, kind: str, text: str, *, every: bool = False) -> None:
        """Tells a sentence; from one worker, or from every one that has something to say."""
        if self.speaks or every:
            event = self.teller.tell(kind, text=text)
            if self.console is not None:
                self.console.print(plain_line(event), highlight=False, markup=False, soft_wrap=True)

    def tokens_of(self, batch: int) -> int:
        """The tokens of a batch; 0 where rows are no text."""
        length = getattr(self.run.data, "length", None)  # rows of a feed may be shorter in some batches
        row = length(batch) if length is not None and self.row_tokens else None
        return self.run.schedule.plan.batch * (row or self.row_tokens or 0)

    @property
    def sample_tokens(self) -> float | None:
        """The tokens of a sample in the steps of this run, on average, where samples are text."""
        steps, plan = range(self.run.job.first_step, self.run.job.steps), self.run.schedule.plan
        return sum(map(self.tokens_of, steps)) / (len(steps) * plan.batch) if steps and self.row_tokens else None

    def rate(self, step: int) -> float | None:
        """The learning rate that made a step, of the first group where groups differ."""
        if isinstance(self.run.recipe, Recipe):
            return rate_at(self.run.recipe, step - 1)
        made = [here.weights.optimizer for here in self.worker.replicas.values()]
        return next((float(each.param_groups[0]["lr"]) for each in made if each is not None), None)

    def close(self) -> None:
        """Lets the log go."""
        self.teller.close()

    def note_figures(self, batch: int) -> None:
        """Looks at the loss where it is cheap, and logs it where it is due."""
        is_cpu, is_due = self.run.world.device.type == "cpu", self.is_due(batch)
        sums = self.worker.figures(batch)
        self.tokens += self.tokens_of(batch)
        if not is_cpu and not is_due:
            return
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        if self.speaks:
            verdict, tokens = self.worker.verdicts.get(batch), self.tokens
            norm = sums.new_full((1,), math.nan) if verdict is None else verdict.norm.reshape(1).to(sums)
            scale = self.worker.scale.current.reshape(1).to(sums.dtype)
            figures = torch.cat([scale, norm, means(sums, self.run.schedule.plan.batch)])
            self.scalars.read(figures, lambda found: self.log(batch + 1, is_due, tokens, *found))

    def log(
        self, step: int, is_due: bool, tokens: int, scale: float, norm: float, loss: float, *accuracy: float
    ) -> None:  # fmt: skip
        """Adds the loss of a step to its curve, and logs it with what else is known, where that is due."""
        self.point("loss", step, loss)
        if not is_due:
            return
        figures = {"learning_rate": self.rate(step), "norm": norm if math.isfinite(norm) else None}
        known = {name: value for name, value in figures.items() if value is not None}
        measures = dict(zip(METRICS, accuracy))
        self.say("train", step, {"loss": loss, **measures, **known, **self.speed(step, tokens), "scale": scale})
        for name, value in {**measures, **known}.items():
            self.point(name, step, value)

    def speed(self, step: int, tokens: int) -> dict[str, float]:
        """The images/s since the last time; of text the tokens/s, those seen, and the share of the cards' peak."""
        now, (before, then, seen) = time.perf_counter(), self.logged_at
        self.logged_at = (now, step, tokens)
        passed, plan = max(now - before, 1e-9), self.run.schedule.plan
        told: dict[str, float] = {"images_per_s": plan.batch * (step - then) / passed}
        if self.row_tokens:
            told |= {"tokens_per_s": (tokens - seen) / passed, "tokens": tokens}
            if self.token_share is not None:
                told["mfu"] = told["tokens_per_s"] * self.token_share
        return told

    @cached_property
    def token_share(self) -> float | None:
        """The share of all cards' peak that one token/s is; None where either is not known."""
        run = self.run
        peak = peak_flops(run.world.device, run.settings.precision)
        flops = token_flops(run.layered, self.row_tokens or 0) if peak is not None else None
        return None if flops is None or peak is None else flops / (peak * len(run.schedule.plan.devices))

    def say(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Tells an event of a step, and prints its line where nobody else watches the events."""
        place = {"epoch": self.run.job.epoch_of(step), "iter": step}
        event = self.teller.tell(kind, **place, **values, **memory_figures(self.run.world.device))
        if self.console is not None:
            self.console.print(plain_line(event), highlight=False, markup=False, soft_wrap=True)

    def point(self, name: str, step: int, value: float) -> None:
        """Adds a point to a curve."""
        if math.isfinite(value):
            if name not in self._names:
                self._names.append(name)
            # As numbers in a row: a point is there for every step, and a long run has many.
            self._points.extend((self._names.index(name), step, value, time.perf_counter() - self.started))

    @property
    def points(self) -> list[Point]:
        """All points of all curves so far."""
        rows = zip(*(self._points[place::4] for place in range(4)))
        per_epoch = self.run.job.steps_per_epoch
        return [
            Point(
                name=self._names[int(name)], step=int(step), epoch=step / per_epoch if per_epoch else 0.0, value=value,
                seconds=seconds,
            )
            for name, step, value, seconds in rows
        ]  # fmt: skip

    def evaluate(self, step: int, feed: Feed) -> None:
        """Evaluates with the newest weights, and logs it."""
        rows, started = self.run.job.evaluation_rows, time.perf_counter()
        means = evaluate(self.worker, feed, rows, self.run.schedule.plan.batch).tolist()
        if self.speaks:
            rate = rows / (time.perf_counter() - started)
            figures = dict(zip(("loss", *METRICS), means))
            accuracy = {name: value for name, value in figures.items() if name != "loss"}
            shown = {**(accuracy or figures), "images_per_s": rate}
            if self.row_tokens:
                found = perplexity(self.run.layered, figures["loss"])
                figures |= {} if found is None else {"perplexity": found}
                shown = {**figures, "images_per_s": rate, "tokens_per_s": rate * self.row_tokens}
            self.say("validation", step, shown)
            for name, value in figures.items():
                self.point(f"validation_{name}", step, value)
        self.logged_at = (time.perf_counter(), step, self.tokens)

    def sinks(self) -> list[Sink]:
        """Where this run's figures go beside its events."""
        run, plan = self.run, self.run.schedule.plan
        about = {
            "name": run.job.name, "placement": plan.placement, "batch": plan.batch, "policy": plan.policy,
            "microbatches": plan.num_microbatches, "versions": plan.versions, "precision": run.settings.precision,
            "seed": run.settings.seed, "recipe": run.recipe if isinstance(run.recipe, Recipe) else "own",
        }  # fmt: skip
        is_resumed = run.job.first_step > 0
        return open_sinks(run.job.sinks, run.folder, about, rank=run.world.worker, is_resumed=is_resumed)
