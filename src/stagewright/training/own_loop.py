"""A loop of one's own: every process runs it, and each step is over, and its loss known to all, when it returns.

the script      with sw.workers(…) as w:  ── step 0 ── step 1 ── …      hears each loss from the workers
its workers     with sw.workers(…) as w:  ── step 0 ── step 1 ── …      work, each on its own stages
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import cached_property, partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from stagewright.errors import RunError, UsageError
from stagewright.models import Layered
from stagewright.plan import Plan
from stagewright.record import Record
from stagewright.runtime.checkpoint.resuming import give_back
from stagewright.runtime.evaluate import evaluate, means
from stagewright.runtime.feed import Feed, ReadAhead
from stagewright.runtime.launch.environment import RUN_FOLDER, is_main, is_worker, this_command
from stagewright.runtime.launch.local import EndedError, launched
from stagewright.runtime.launch.process import follow_parent
from stagewright.runtime.launch.script import SCRIPT_SO_FAR
from stagewright.runtime.run_folder import RECORD, SCHEDULE_FILE
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import pick_device
from stagewright.schedule import Action, Kind, Schedule
from stagewright.training.before import check_here, check_run
from stagewright.training.config import Job
from stagewright.training.dataset import DatasetFeed
from stagewright.training.events import Teller, read_events
from stagewright.training.listener import COMMAND, Run, gather, typed_command
from stagewright.training.loop import at_work, checkpointer_of, feed_of, make_worker
from stagewright.training.recipes import Recipe, rate_at
from stagewright.training.start import about_run, taken

_ANSWER = "answer"
"""The event by which workers tell the script what a step came to."""


class Loop:
    """The script's part in a loop whose steps its workers make: it hears what they come to."""

    def __init__(self, model: nn.Module, folder: Path, started: Sequence[BaseProcess] | None = None) -> None:
        self.model = model
        """The whole model; it has the trained weights after the loop."""
        self._folder, self._started = folder, started
        self._position = self._number = 0

    @property
    def is_main(self) -> bool:
        """True in one process only: print and write there."""
        return is_main()

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """The stages that are in this process, by number, with their newest weights; none in a script with workers."""
        return {}

    @property
    def optimizers(self) -> Mapping[int, Optimizer]:
        """Those of the stages that are in this process."""
        return {}

    def step(self, batch: int) -> float:
        """Trains on a batch of the data, by its number, and returns its loss, the mean over its rows."""
        loss = self.backward(batch)
        self.update()
        return loss

    def backward(self, batch: int) -> float:
        """The first half of a step: the loss of a batch, and the gradients."""
        return float(self._heard())

    def gradients(self) -> dict[str, Tensor]:
        """After `backward`: those of this process's stages by the model's names, to look at or change before `update`.

        They are those of the batch's mean loss, summed over replicas and microbatches; under fp16 times the loss scale.
        All replicas of a stage must make the same change.
        """
        return {}

    def update(self) -> None:
        """The second half of a step: the optimizers' step."""

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over evaluation_data, with the newest weights."""
        return dict(self._heard())

    def _heard(self) -> Any:
        """The next answer of the workers."""
        while True:
            is_over = self._started is None or all(each.exitcode is not None for each in self._started)
            for position, event in read_events(self._folder, self._position):
                self._position = position
                if event["event"] == _ANSWER:
                    self._number += 1
                    return event["value"]
            if self._started is not None and any(each.exitcode for each in self._started):
                raise EndedError
            if is_over:
                raise RunError(
                    f"the loop ended in the workers after {self._number} answers, and goes on here",
                    "all processes must make the same steps: decide by what w.step returns, not by w.is_main or time",
                )
            time.sleep(0.002)


class _Working(Loop):
    """A worker's part: it makes the steps of its own stages."""

    def __init__(self, run: Run, worker: Worker, feed: _Numbered, teller: Teller) -> None:
        super().__init__(run.layered.model, run.folder)
        self.num_steps = 0
        self._run, self._worker, self._feed, self._teller = run, worker, feed, teller
        self._left: list[Action] = []
        self._handlers = {kind: worker.handlers[kind] for kind in (Kind.AGREE, Kind.UPDATE)}
        worker.handlers |= dict.fromkeys(self._handlers, self._left.append)
        worker.wants_metric = lambda batch: False
        worker.on_update = lambda batch: worker.stopwatch.mark()
        worker.stopwatch.mark()
        if isinstance(run.recipe, Recipe):
            for here in worker.replicas.values():
                for versions in (here.weights, *here.tied):
                    versions.rate_of = partial(rate_at, run.recipe)

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        return {number: here.weights.newest() for number, here in self._worker.replicas.items()}

    @property
    def optimizers(self) -> Mapping[int, Optimizer]:
        found = {number: here.weights.optimizer for number, here in self._worker.replicas.items()}
        return {number: each for number, each in found.items() if each is not None}

    def backward(self, batch: int) -> float:
        if self._left:
            raise UsageError("w.backward comes twice without an update", "call w.update() after each, or w.step(batch)")
        number = self.num_steps
        self._feed.batches = {number: batch}
        self._worker.run(1, number)
        sums = self._worker.figures(number).cpu()
        if self._run.world.control is not None:
            dist.all_reduce(sums, group=self._run.world.control)
        return float(self._answer(means(sums, self._run.schedule.plan.batch)[0].item()))

    def gradients(self) -> dict[str, Tensor]:
        if not self._left:
            raise UsageError("there are no gradients before w.backward, and none after w.update", "call them between")
        found: dict[str, Tensor | None] = {}
        for here in self._worker.replicas.values():
            found |= zip(here.weights.names, self._worker.gradients(here, self.num_steps))
            for tied in here.tied:
                found |= zip(tied.names, tied.gradients(self.num_steps))
        return {name: each for name, each in found.items() if each is not None}

    def update(self) -> None:
        actions = list(self._left)
        self._left.clear()
        for action in actions:
            self._worker.at = action
            self._handlers[action.kind](action)
        self._worker.catch_up()
        self.num_steps += bool(actions)

    def evaluate(self) -> dict[str, float]:
        run, rows = self._run, self._run.job.evaluation_rows
        if run.evaluation is None:
            raise UsageError("there is nothing to evaluate on", "give evaluation_data=dataset")
        found = evaluate(self._worker, self._held_out, rows, run.schedule.plan.batch).tolist()
        return dict(self._answer(dict(zip(("loss", *run.figures), found))))

    @cached_property
    def _held_out(self) -> Feed:
        return feed_of(self._run, self._run.evaluation)

    def _answer(self, value: Any) -> Any:
        """Tells the script, and whoever runs it again later, what all workers have found."""
        if self._run.world.worker == 0:
            self._teller.tell(_ANSWER, value=value)
        return value

    def finish(self) -> None:
        """Saves the last step, and leaves the record."""
        run, worker = self._run, self._worker
        worker.close()
        run.dog.get_on()
        if self.num_steps:
            checkpointer = checkpointer_of(run, worker)
            with run.dog.patience(run.settings.save_timeout_s):
                checkpointer.save(self.num_steps)
                checkpointer.close()
            lost = [str(saved) for saved in checkpointer.news() if saved.fault is not None]
            if lost:
                raise RunError(f"the loop is over, but {lost[0]}", "free the disk, or name another folder=")
        if RUN_FOLDER not in os.environ:  # else the one who started this worker does it
            give_back(run.layered.model, run.folder)
        record = gather(run, worker, ())
        if run.world.worker == 0:
            record.save(run.folder / RECORD)
        if run.world.control is not None:
            dist.barrier(group=run.world.control)


class _Numbered:
    """Rows of the batches that a loop names, whatever their order, under the numbers of its steps."""

    def __init__(self, feed: DatasetFeed) -> None:
        self.about, self.fingerprint = feed.about, feed.fingerprint
        self.batches: Mapping[int, int] = {}
        self._feed: Any = feed

    def settle(self, plan: Plan, settings: Settings) -> None:
        """Learns how many rows a batch has, and reads ahead from now on."""
        self._feed.settle(plan, settings)
        self._feed = ReadAhead(self._feed, pick_device(settings))

    def inputs(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._feed.inputs(self.batches[batch], start, stop)  # type: ignore[no-any-return]

    def targets(self, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        return self._feed.targets(self.batches[batch], start, stop)  # type: ignore[no-any-return]


@contextmanager
def opened(
    schedule: Schedule, layered: Layered, *, data: DatasetFeed, evaluation: DatasetFeed | None, recipe: Any, job: Job,
    settings: Settings, metrics: Any, folder: Path | None, share: int, **_: Any,
) -> Iterator[Loop]:  # fmt: skip
    """The loop's part in this process: a worker's, or that of the script which starts the workers."""
    before = SCRIPT_SO_FAR.meet()
    if before is not None and before.folder is not None:
        yield Loop(layered.model, before.folder)
        before.given_to(layered.model)
        return
    with SCRIPT_SO_FAR.doing() as done:
        check_run(schedule, layered, recipe, job, settings, folder)
        about = about_run(schedule.plan, layered, settings, recipe, data)
        take = partial(taken, None, folder, job.name, about, store=None, resume=None, overwrite=job.overwrite)
        feed = _Numbered(data)
        work = partial(_working, feed, schedule, layered, job, settings, recipe, feed, evaluation, metrics=metrics)
        if is_worker():
            follow_parent()
            with work(lambda again: take(goes_on=again, patience_s=settings.timeout_s)) as loop:
                yield loop
            return
        with take() as own:
            check_here(schedule, layered, settings, recipe, job, own.path)
            if len(schedule.plan.devices) == 1:
                with work(lambda again: nullcontext(own)) as loop:
                    yield loop
            else:
                schedule.save(own.path / SCHEDULE_FILE)
                told = {COMMAND: typed_command(), **SCRIPT_SO_FAR.leave(own.path)}
                with launched(this_command(), schedule.plan, own.path, settings, share=share, extra=told) as started:
                    yield Loop(layered.model, own.path, started)
                give_back(layered.model, own.path)
            done(own.path, Record.load(own.path / RECORD))


@contextmanager
def _working(feed: _Numbered, *rest: Any, metrics: Any) -> Iterator[Loop]:
    """This process as a worker while the loop runs."""
    *given, take = rest
    given += ["local", "measured"]
    with at_work(take, *given, metrics=metrics) as (run, flight):
        worker, _ = make_worker(run, flight)
        run.dog.get_on()
        with closing(Teller(run.folder)) as teller:
            loop = _Working(run, worker, feed, teller)
            yield loop
            loop.finish()
