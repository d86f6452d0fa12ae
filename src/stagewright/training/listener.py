"""What goes along with a worker's updates: rates, clock, log, checkpoints, and the watch on numbers."""

from __future__ import annotations

import math
import time
from array import array
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.console import Console

from stagewright.record import Point
from stagewright.runtime.async_scalars import AsyncScalars
from stagewright.runtime.evaluate import evaluate, means
from stagewright.runtime.feed import Feed
from stagewright.runtime.numbers import Watch
from stagewright.runtime.worker import Worker
from stagewright.training.events import Teller, plain_line
from stagewright.training.gathering import Run, memory_figures
from stagewright.training.metrics import METRICS
from stagewright.training.recipes import Recipe, rate_at
from stagewright.training.sinks import Sink, open_sinks

if TYPE_CHECKING:
    from stagewright.runtime.checkpoint import Checkpointer


class Listener:
    """Keeps the learning rate, the clock, the log, the checkpoints and the watch on numbers while a worker runs."""

    def __init__(self, run: Run, worker: Worker, console: Console | None, checkpointer: Checkpointer | None) -> None:
        self.run, self.worker, self.console, self.checkpointer = run, worker, console, checkpointer
        plan, world = run.schedule.plan, run.world
        self.group = world.group("figures", plan.workers[-1])
        self.speaks = plan.workers[-1][0] == world.worker
        self.is_last = world.worker in plan.workers[-1]
        self.teller = Teller(run.folder, self.sinks() if self.speaks else ())
        self.logged_at = (time.perf_counter(), run.job.first_step)
        self._names: list[str] = []
        self._points = array("d")
        self.started = time.perf_counter()
        self.scalars = AsyncScalars(world.device)
        for stage in worker.replicas:
            self.set_rate(stage, run.job.first_step)
        if run.job.warm_up == 0:
            worker.clock.mark()  # where the first step begins that is measured
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

    def set_rate(self, stage: int, step: int) -> None:
        """Sets the learning rate of a stage's step."""
        optimizer = self.worker.replicas[stage].weights.optimizer
        if isinstance(self.run.recipe, Recipe) and optimizer is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(self.run.recipe, step)

    def after_stage_update(self, stage: int, batch: int) -> None:
        """What follows each update of a stage."""
        self.set_rate(stage, batch + 1)
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
            self.worker.clock.mark()
        if batch + 1 == max(job.steps - self.run.settings.trace_steps, job.first_step + 1):
            self.worker.clock.start()
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

    def close(self) -> None:
        """Lets the log go."""
        self.teller.close()

    def note_figures(self, batch: int) -> None:
        """Looks at the loss where it is cheap, and logs it where it is due."""
        is_cpu, is_due = self.run.world.device.type == "cpu", self.is_due(batch)
        sums = self.worker.figures(batch)
        if not is_cpu and not is_due:
            return
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        if self.speaks:
            scale = self.worker.scale.current.reshape(1)
            figures = torch.cat([scale.to(sums.dtype), means(sums, self.run.schedule.plan.batch)])
            self.scalars.read(figures, lambda found: self.log(batch + 1, is_due, *found))

    def log(self, step: int, is_due: bool, scale: float, loss: float, *accuracy: float) -> None:
        """Adds the loss of a step to its curve, and logs it with the accuracy, if there is one, where that is due."""
        self.point("loss", step, loss)
        if is_due:
            self.tell(step, scale, loss, dict(zip(METRICS, accuracy)))

    def tell(self, step: int, scale: float, loss: float, accuracy: dict[str, float]) -> None:
        """Logs loss and accuracy of a step, and the images/s since the last time."""
        now, (before, then) = time.perf_counter(), self.logged_at
        self.logged_at = (now, step)
        rate = self.run.schedule.plan.batch * (step - then) / max(now - before, 1e-9)
        self.say("train", step, {"loss": loss, **accuracy, "images_per_s": rate, "scale": scale})
        for name, value in accuracy.items():
            self.point(name, step, value)

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
            self.say("validation", step, {**(accuracy or figures), "images_per_s": rate})
            for name, value in figures.items():
                self.point(f"validation_{name}", step, value)
        self.logged_at = (time.perf_counter(), step)

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
