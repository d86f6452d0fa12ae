"""The worker: a loop over its order, and a table of handlers."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stagewright.errors import RunError
from stagewright.models import Layered, MeanLoss, count_of
from stagewright.plan import Share
from stagewright.policy import RULES
from stagewright.runtime.exchange import Exchange
from stagewright.runtime.feed import CheckedFeed, Feed
from stagewright.runtime.precision import LossScale, Verdict, casts_kept, sum_of_squares
from stagewright.runtime.replica import Replica, make_replicas
from stagewright.runtime.safety.flight import Flight
from stagewright.runtime.safety.numbers import Watch
from stagewright.runtime.safety.selfcheck import SelfCheck
from stagewright.runtime.safety.stopping import Gate
from stagewright.runtime.settings import Settings
from stagewright.runtime.stage import Key
from stagewright.runtime.timing import Stopwatch
from stagewright.runtime.transport import make_transport
from stagewright.runtime.weights import OptimizerMaker, Versions
from stagewright.runtime.world import World
from stagewright.schedule import COMPUTE, RECEIVES, TRANSFERS, Action, Kind, Schedule
from stagewright.scheduling.windows import Chooser, windows

_Metric = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(predictions, targets) of some rows → sums over these rows, one a figure."""


class Worker:
    """Runs the replicas placed on one device."""

    def __init__(
        self, schedule: Schedule, layered: Layered, world: World, settings: Settings, *,
        make_optimizer: OptimizerMaker, feed: Feed, metric: _Metric | None = None, num_metrics: int = 0,
        flight: Flight | None = None,
    ) -> None:  # fmt: skip
        if world.size != len(schedule.plan.devices):
            raise RunError(
                f"{world.size} workers were started for a plan with {len(schedule.plan.devices)} devices "
                f"({schedule.plan.placement})",
                f"start {len(schedule.plan.devices)} workers, or change --placement",
            )
        self.schedule, self.plan, self.world, self.settings = schedule, schedule.plan, world, settings
        self.metric, self.num_metrics = metric, num_metrics
        self.count = count_of(layered.loss)
        """What counts the targets of a batch, where the loss is not divided by rows."""
        self._all_labels_count = isinstance(layered.loss, MeanLoss) and self.count is None
        self.feed = CheckedFeed(feed, world.device, all_labels_count=self._all_labels_count)
        self.replicas = make_replicas(self.plan, layered, world, settings, make_optimizer, self.feed.lengths)
        self.transport = make_transport(world, self.plan, settings)
        self.stopwatch = Stopwatch(world.worker, world.device)
        self.scale = LossScale(settings, world.device, self.plan.versions)
        self.verdicts: dict[int, Verdict] = {}
        self.exchange = Exchange(world.worker, self.replicas, self.transport, settings, self.feed.length)
        self._figures: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}
        self._updates: dict[int, int] = {}
        self.on_update: Callable[[int], None] | None = None
        """Called after a worker's last update of a batch."""
        self.on_stage_update: Callable[[int, int], None] | None = None
        """Called with the stage and the batch after each update of a stage."""
        self.watch: Watch | None = None
        """What looks at outputs and gradients."""
        self.gate: Gate | None = None
        """What may end the run early."""
        self.wants_metric: Callable[[int], bool] = lambda batch: True
        """Whether anyone will read a batch's metric, or its loss alone."""
        self.flight = flight
        self.at: Action | None = None
        """The action that is running, for those who ask what went wrong."""
        self.is_training = True
        self.skips = self.scale.is_on or settings.on_nan == "skip"
        """Whether a step with gradients that are not finite is left out."""
        self.handlers = self._table()
        self.self_check = SelfCheck(settings)
        for here in self.replicas.values():
            here.reducer.inspect = partial(self._inspect, here, here.weights)
            for tied in here.tied:
                if len(tied.stages_here) == 1:  # else plain autograd has them apart, stage by stage
                    tied.reducer.inspect = partial(self._inspect, here, tied)

    def _inspect(
        self, here: Replica, versions: Versions, slot: int, members: Sequence[int], gradients: Sequence[Tensor | None]
    ) -> None:
        """Looks at a stage's gradients before they are reduced; those of the batch whose end is running."""
        batch = self.at.batch if self.at is not None else 0
        if versions.slot(batch) == slot:
            self.self_check.compare(here, batch, [versions.names[index] for index in members], gradients)

    def _table(self) -> dict[Kind, Callable[[Action], None]]:
        """What each kind of action does."""
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
            Kind.REDUCE: self.reduce,
            Kind.AGREE: self.agree,
            Kind.UPDATE: self.update,
        }

    def for_evaluation(self, schedule: Schedule, feed: Feed) -> Worker:
        """A worker that shares this one's stages but runs another schedule on other data, forward only."""
        helper = copy.copy(self)
        helper.schedule, helper.plan = schedule, schedule.plan
        helper.feed = CheckedFeed(feed, self.world.device, all_labels_count=self._all_labels_count)
        helper.is_training, helper._figures, helper.gate = False, {}, None
        helper.wants_metric = lambda batch: True
        helper.replicas = {
            stage: Replica(stage, here.replica, schedule.plan, here.runner, here.weights, here.reducer, here.shapes)
            for stage, here in self.replicas.items()
        }
        helper.exchange = Exchange(
            self.world.worker, helper.replicas, self.transport, self.settings, helper.feed.length
        )
        helper.handlers = helper._table()
        return helper

    def current_modules(self) -> list[nn.Module]:
        """The stages with their newest weights."""
        return [here.module(0, length, newest=True) for here in self.replicas.values() for length in here.shapes]

    def run(self, num_batches: int, first_batch: int = 0) -> None:
        """Runs this worker's order over a number of batches: in its own sequence, or as rows arrive."""
        order = self.schedule.unroll(self.world.worker, num_batches, first_batch)
        if self.gate is not None:
            low, high = self.schedule.offsets
            order = self.gate.passing(order, high - low)
        with casts_kept(self.settings, self.plan.num_microbatches):
            if self.is_training and RULES[self.plan.policy].by_arrival:
                self._run_as_rows_arrive(_together(order))
            else:
                for actions in _receives_ahead(_together(order), self.transport.lookahead):
                    self.act(actions)
        self.catch_up()

    def catch_up(self) -> None:
        """Makes the updates of tied parameters that wait for other stages."""
        for here in self.replicas.values():
            for tied in here.tied:
                tied.catch_up(here.weights.num_updates - 1, self.verdicts)
            here.reducer.settle()

    def _run_as_rows_arrive(self, groups: Iterator[list[Action]]) -> None:
        """Runs whatever is ready, backward first, window by window."""
        chooser: Chooser[list[Action]] = Chooser(self.plan)
        for window in windows(groups, lambda group: (group[0], group[0].batch)):
            for group in window.late:
                self.act(group)
            chooser.open(window.units.values())
            while chooser.heads():
                self._run_or_wait(chooser)
            for group in window.rest:
                self.act(group)

    def _run_or_wait(self, chooser: Chooser[list[Action]]) -> None:
        """Runs what is ready, or waits until something arrives."""
        for group in chooser.receives():
            self.act(group)
        self.transport.arrived.clear()
        unit = chooser.choose(lambda unit: self.exchange.is_ready(unit.compute[0]))
        if unit is not None:
            for group in (unit.compute, *unit.sends):
                self.act(group)
            chooser.finish(unit)
            return
        limit_s = self.world.timeout.total_seconds()
        if not self.transport.arrived.wait(limit_s):
            stuck = ", ".join(str(unit.compute[0]) for unit in chooser.heads())
            raise RunError(
                f"worker {self.world.worker} waited {limit_s:g} s for rows of {stuck}",
                "look for the worker that stopped, or raise --timeout",
            )
        self.transport.check()

    def act(self, actions: list[Action]) -> None:
        """Runs one action, or one transfer with several workers."""
        self.at = actions[0]
        kind = self.at.kind
        if self.flight is not None:
            self.flight.note(self.at)
        if kind in RECEIVES:
            self.exchange.receive(actions)
        elif kind in TRANSFERS:
            self.exchange.send(actions)
        elif kind in COMPUTE or kind is Kind.UPDATE:
            with self.stopwatch.span(self.at):
                self.handlers[kind](self.at)
        else:
            self.handlers[kind](self.at)

    # Compute

    def forward(self, action: Action) -> None:
        self._make_full()
        here, key, share = self._find(action)
        length, last = self.feed.length(key[0]), here.runner.has_loss
        inputs = (
            self.exchange.get(here, key, is_forward=True)
            if here.stage
            else self.feed.inputs(here.shapes[length].inputs, key[0], share.start, share.stop)
        )
        targets = self._targets(here, key[0], share.start, share.stop) if last else ()
        for tied in here.tied:
            tied.catch_up(key[0] - tied.num_versions, self.verdicts)
        module = here.module(key[0], length, newest=not self.is_training)
        made = here.runner.forward(module, key, inputs, targets, start=share.start, hold=self.is_training)
        if self.is_training:  # what no layer has asked for lies where backward puts gradients
            here.reducer.settle(here.weights.slot(key[0]))
        if self.watch is not None and self.is_training:
            self.watch.after_forward(here, module, key, inputs, targets, made)
        if last:
            self.note(key[0], share.stop - share.start, made, targets)
        else:
            self.exchange.keep(here, key, [tensor.detach() for tensor in made], is_forward=True)

    def backward(self, action: Action) -> None:
        self._make_full()
        here, key, _ = self._find(action)
        gradients, scale = self._given(here, key)
        again, is_last = self.self_check.keep(here, key), self._arm(here, key)
        with here.backward_of(key[0], is_last=is_last):
            returned = here.runner.backward(key, gradients, scale)
        if again is not None:
            self._make_full()  # rows that are kept for it would lie beside those of the check
        self.self_check.add(here, key, again, gradients, scale, self.feed.length(key[0]))
        if is_last:
            here.finish_tied(key[0])
        self.exchange.keep(here, key, returned, is_forward=False)

    def backward_input(self, action: Action) -> None:
        here, key, _ = self._find(action)
        gradients, scale = self._given(here, key)
        again = self.self_check.keep(here, key)
        self.self_check.add(here, key, again, gradients, scale, self.feed.length(key[0]))
        returned = here.runner.backward_input(here.module(key[0]), key, gradients, scale)
        self.exchange.keep(here, key, returned, is_forward=False)

    def backward_weight(self, action: Action) -> None:
        here, key, _ = self._find(action)
        is_last = self._arm(here, key)
        here.runner.backward_weight(here.module(key[0]), key)
        if is_last:
            here.finish_tied(key[0])

    def _make_full(self) -> None:
        """Makes the weight gradients of which no more rows can be kept, now that the last backward is on its way."""
        for here in self.replicas.values():
            for deferred in here.deferred:
                deferred.make(only_full=True)

    def _arm(self, here: Replica, key: Key) -> bool:
        """Lets the reduction start by itself in the batch's last backward; whether this is the one."""
        batch = key[0]
        left = here.waiting.setdefault(batch, here.num_backwards) - 1
        here.waiting[batch] = left
        if left == 0:
            del here.waiting[batch]
            if here.reducer.adds_up:
                here.reducer.arm(here.weights.slot(batch))
        return left == 0

    def _given(self, here: Replica, key: Key) -> tuple[list[Tensor] | None, Tensor]:
        """What a backward begins with: the gradients of its outputs, or where the loss is that of the summed loss."""
        if here.runner.has_loss:
            return None, self._loss_gradient(here, key[0])
        return self.exchange.get(here, key, is_forward=False), self.scale.current  # which nobody asks for

    def _loss_gradient(self, here: Replica, batch: int) -> Tensor:
        """The gradient of a batch's summed loss: the loss scale, divided by what the whole batch counts."""
        scale = self.scale.of_batch(batch)
        if self.count is None:
            return scale.double() / self.plan.batch
        if batch not in self._counts:
            whole = self.count(*self._targets(here, batch, 0, self.plan.batch))
            self._counts[batch] = torch.where(whole > 0, whole, 1)
        return scale.double() / self._counts[batch]

    def note(self, batch: int, rows: int, made: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Adds a microbatch's loss, what it counts and the metric to the batch's."""
        loss = made[0].detach().to(torch.float64, copy=True).reshape(1)  # a graph replayed writes there again
        number = loss.new_full((1,), rows) if self.count is None else self.count(*targets).to(loss).reshape(1)
        metric: list[Tensor] = []
        if self.metric is not None and self.wants_metric(batch):
            metric = [self.metric(made[1:], targets).double()]
        sums = torch.cat([loss, number, *metric])
        self._figures[batch] = self._figures[batch] + sums if batch in self._figures else sums

    def figures(self, batch: int) -> Tensor:
        """The sums over this worker's rows of a batch, given out once: loss, what the loss counts, metric."""
        width = 2 + (self.num_metrics if self.metric is not None and self.wants_metric(batch) else 0)
        nothing = torch.zeros(width, dtype=torch.float64, device=self.world.device)
        return self._figures.pop(batch, nothing)  # a replica may have no rows of a batch

    # Rows from and to other stages

    def _find(self, action: Action) -> tuple[Replica, Key, Share]:
        here = self.replicas[action.stage]
        share = here.shares[action.microbatch]
        if share is None:
            raise RunError(f"worker {self.world.worker} has no rows for {action} of batch {action.batch}")
        return here, (action.batch, action.microbatch), share

    def _targets(self, here: Replica, batch: int, start: int, stop: int) -> list[Tensor]:
        """The targets of some rows of a batch."""
        return self.feed.targets(here.shapes[self.feed.length(batch)].targets, batch, start, stop)

    # The end of a batch

    def reduce(self, action: Action) -> None:
        here = self.replicas[action.stage]
        here.reducer.start(here.weights.slot(action.batch))

    def agree(self, action: Action) -> None:
        """Adds up the squares of all gradients over all workers; a stage counts once."""
        counted: list[Tensor] = []
        for here in self.replicas.values():
            gradients = self.gradients(here, action.batch)
            if here.replica == 0 or here.reducer.is_sharing:
                counted += [each for each in gradients if each is not None]
        shared = {id(tied): tied for here in self.replicas.values() for tied in here.tied}.values()
        found = [each for tied in shared if tied.is_counted for each in tied.gradients(action.batch)]
        counted += [each for each in found if each is not None]
        squares, scale = sum_of_squares(counted, self.world.device), self.scale.of_batch(action.batch)
        if self.world.everyone is not None:
            dist.all_reduce(squares, group=self.world.everyone)
        verdict = Verdict(squares, scale, self.settings.clip_norm, skips=self.skips)
        self.verdicts[action.batch] = verdict
        self.verdicts.pop(action.batch - 2 * max(self.plan.versions), None)  # every update of that batch is made
        self.scale.note(action.batch, verdict.overflowed)

    def gradients(self, here: Replica, batch: int) -> list[Tensor | None]:
        """A stage's gradients of a batch, summed over its replicas."""
        for tied in here.tied:  # a replica without rows had no forward: what it sums next lies where it summed before
            tied.catch_up(batch - tied.num_versions, self.verdicts)
        return here.finish(batch)

    def update(self, action: Action) -> None:
        here, batch = self.replicas[action.stage], action.batch
        gradients = self.gradients(here, batch)
        del here.finished[batch]
        if self.watch is not None:
            self.watch.after_gradients(here, batch, gradients)
        here.weights.update(batch, gradients, self.verdicts.get(batch))
        here.reducer.give_out(here.weights.slot(batch))
        for tied in here.tied:
            if tied.owner == here.stage:
                tied.catch_up(batch, self.verdicts)
        if self.on_stage_update is not None:
            self.on_stage_update(action.stage, batch)
        # Stages with more versions are updated later: the batch is over when all of this worker's have been.
        self._updates[batch] = self._updates.get(batch, 0) + 1
        if self._updates[batch] == len(self.replicas):
            del self._updates[batch]
            self._counts.pop(batch, None)
            if self.on_update is not None:
                self.on_update(batch)

    def close(self) -> None:
        """Waits until everything sent has left, and ends what runs in the background."""
        self.transport.close()
        for here in self.replicas.values():
            here.reducer.close()
            for tied in here.tied:
                tied.reducer.close()
            for deferred in here.deferred:
                deferred.close()


def _together(order: Iterable[Action]) -> Iterator[list[Action]]:
    """The actions one by one, but neighbouring transfers of one microbatch in one piece."""
    for _, group in groupby(order, lambda action: action[:4] if action.kind in TRANSFERS else object()):
        yield list(group)


def _receives_ahead(steps: Iterator[list[Action]], num_computes: int) -> Iterator[list[Action]]:
    """The same steps, with each receive drawn forward past that many compute actions."""
    window: deque[list[Action]] = deque()
    ahead = 0
    for step in steps:
        if step[0].kind in RECEIVES:
            yield step
            continue
        window.append(step)
        ahead += step[0].kind in COMPUTE
        while ahead > num_computes:
            ahead -= window[0][0].kind in COMPUTE
            yield window.popleft()
    yield from window
