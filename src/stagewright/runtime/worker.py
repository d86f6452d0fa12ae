"""The worker: a loop over its order, and a table of handlers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from stagewright.errors import RunError
from stagewright.models import Layered, MeanLoss, count_of
from stagewright.plan import Share
from stagewright.runtime.clock import Clock
from stagewright.runtime.dtypes import infer_dtypes
from stagewright.runtime.feed import Feed, OnDevice, check_labels, check_rows, lengths_of
from stagewright.runtime.flight import Flight
from stagewright.runtime.numbers import Watch
from stagewright.runtime.order import receives_ahead, together
from stagewright.runtime.precision import LossScale, Verdict, agree, rounded, sum_of_squares
from stagewright.runtime.replica import Outbox, Replica, make_replicas, rows_of
from stagewright.runtime.selfcheck import SelfCheck
from stagewright.runtime.settings import Settings
from stagewright.runtime.stage import InFlight, Key
from stagewright.runtime.stopping import Gate
from stagewright.runtime.transport import Channel, make_transport
from stagewright.runtime.weights import OptimizerMaker
from stagewright.runtime.world import World, check_world
from stagewright.schedule import COMPUTE, RECEIVES, TRANSFERS, Action, Kind, Schedule

_Metric = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(predictions, targets) of some rows → sums over these rows, one a figure."""


class Worker:
    """Runs the replicas placed on one device."""

    def __init__(
        self, schedule: Schedule, layered: Layered, world: World, settings: Settings, *,
        make_optimizer: OptimizerMaker, feed: Feed, metric: _Metric | None = None, num_metrics: int = 0,
        flight: Flight | None = None,
    ) -> None:  # fmt: skip
        check_world(world, schedule.plan)
        self.schedule, self.plan, self.world, self.settings = schedule, schedule.plan, world, settings
        self.feed, self.metric, self.num_metrics = OnDevice(feed, world.device), metric, num_metrics
        self.replicas = make_replicas(self.plan, layered, world, settings, make_optimizer, lengths_of(feed))
        infer_dtypes(self.replicas, self.plan, layered, world, settings)
        self.transport = make_transport(world, self.plan, settings)
        self.clock = Clock(world.worker, world.device)
        self.scale = LossScale(settings, world.device, self.plan.versions)
        self.verdicts: dict[int, Verdict] = {}
        self.count = count_of(layered.loss)
        """What counts the targets of a batch, where the loss is not divided by rows."""
        self.is_mean_of_rows = isinstance(layered.loss, MeanLoss) and self.count is None
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
            here.reducer.inspect = partial(self._inspect, here)
            for tied in here.tied:
                tied.inspect = partial(self.self_check.compare, here)

    def _inspect(self, here: Replica, slot: int, members: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Looks at a stage's gradients before they are reduced; those of the batch whose end is running."""
        batch = self.at.batch if self.at is not None else 0
        if here.weights.slot(batch) == slot:
            self.self_check.compare(here, batch, [here.weights.names[index] for index in members], gradients)

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
        helper.feed = OnDevice(feed, self.world.device)
        helper.is_training, helper._figures, helper.gate = False, {}, None
        helper.wants_metric = lambda batch: True
        helper.replicas = {
            stage: Replica(stage, here.replica, schedule.plan, here.runner, here.weights, here.reducer, at=here.at)
            for stage, here in self.replicas.items()
        }
        helper.handlers = helper._table()
        return helper

    def current_modules(self) -> list[nn.Module]:
        """The stages with their newest weights."""
        return [here.module(0, length, newest=True) for here in self.replicas.values() for length in (None, *here.at)]

    def run(self, num_batches: int, first_batch: int = 0) -> None:
        """Runs this worker's order over a number of batches, in the order's own sequence."""
        order = self.order(num_batches, first_batch)
        for actions in receives_ahead(together(order), self.transport.lookahead):
            self.act(actions)
        self.catch_up()

    def catch_up(self) -> None:
        """Makes the updates of tied parameters that wait for other stages, at the end of a stretch."""
        for here in self.replicas.values():
            for tied in here.tied:
                tied.catch_up(here.weights.num_updates - 1, skips=self.skips)

    def order(self, num_batches: int, first_batch: int) -> Iterator[Action]:
        """This worker's actions over a number of batches, or until the gate closes."""
        order = self.schedule.unroll(self.world.worker, num_batches, first_batch)
        low, high = self.schedule.offsets
        return order if self.gate is None else self.gate.passing(order, high - low)

    def is_ready(self, action: Action) -> bool:
        """Whether a forward or backward has all its rows."""
        here, key = self.replicas[action.stage], (action.batch, action.microbatch)
        is_forward = action.kind is Kind.FORWARD
        other = action.stage + (-1 if is_forward else 1)
        if not 0 <= other < len(self.plan.stages):
            return True
        partners, near = here.partners(other, action.microbatch), self.replicas.get(other)
        is_near = near is not None and self.world.worker in partners
        if near is not None and is_near and key not in (near.made if is_forward else near.returned):
            return False
        arriving = (here.activations if is_forward else here.gradients).get(key)
        return len(partners) == is_near or (arriving is not None and arriving.is_done())

    def act(self, actions: list[Action]) -> None:
        """Runs one action, or one transfer with several workers."""
        self.at = actions[0]
        kind = self.at.kind
        if self.flight is not None:
            self.flight.note(self.at)
        if kind in RECEIVES:
            self.receive(actions)
        elif kind in TRANSFERS:
            self.send(actions)
        elif kind in COMPUTE or kind is Kind.UPDATE:
            with self.clock.span(self.at):
                self.handlers[kind](self.at)
        else:
            self.handlers[kind](self.at)

    # Compute

    def forward(self, action: Action) -> None:
        self._make_full()
        here, key, share = self._find(action)
        inputs = self._inputs(here, key, share)
        last = here.runner.has_loss
        targets = self._targets(here, key[0], share.start, share.stop) if last else ()
        for tied in here.tied:
            tied.catch_up(key[0] - tied.num_versions, skips=self.skips)
        module = here.module(key[0], self.feed.length(key[0]), newest=not self.is_training)
        made = here.runner.forward(module, key, inputs, targets, start=share.start, hold=self.is_training)
        if self.watch is not None and self.is_training:
            self.watch.after_forward(here, module, key, inputs, targets, made)
        if last:
            self.note(key[0], share.stop - share.start, made, targets)
        else:
            takers = here.partners(here.stage + 1, key[1])
            here.made.put(key, [tensor.detach() for tensor in made], len(takers))

    def backward(self, action: Action) -> None:
        self._make_full()
        here, key, _ = self._find(action)
        gradients = self._output_gradients(here, key)
        scale = self.loss_gradient(here, key[0])
        self.self_check.add(here, key, gradients, scale, self.feed.length(key[0]))
        is_last = self._arm(here, key)
        with here.backward_of(key[0], is_last=is_last):
            returned = here.runner.backward(key, gradients, scale)
        if is_last:
            here.finish_tied(key[0])
        self._return(here, key, returned)

    def backward_input(self, action: Action) -> None:
        here, key, _ = self._find(action)
        module = here.weights.module(key[0])
        gradients = self._output_gradients(here, key)
        scale = self.loss_gradient(here, key[0])
        self.self_check.add(here, key, gradients, scale, self.feed.length(key[0]))
        returned = here.runner.backward_input(module, key, gradients, scale)
        self._return(here, key, returned)

    def backward_weight(self, action: Action) -> None:
        here, key, _ = self._find(action)
        is_last = self._arm(here, key)
        here.runner.backward_weight(here.weights.module(key[0]), key)
        if is_last:
            here.finish_tied(key[0])

    def _make_full(self) -> None:
        """Makes the weight gradients of which no more rows can be kept, now that the last backward is on its way."""
        for here in self.replicas.values():
            for deferred in here.deferred:
                deferred.make(only_full=True)

    def _return(self, here: Replica, key: Key, gradients: list[Tensor]) -> None:
        """Keeps the gradients of a microbatch's inputs for the stage before."""
        takers = here.partners(here.stage - 1, key[1]) if here.stage else {}
        here.returned.put(key, gradients, len(takers))

    def _arm(self, here: Replica, key: Key) -> bool:
        """Lets the reduction start by itself in the batch's last backward; whether this is the one."""
        batch = key[0]
        left = here.waiting.setdefault(batch, here.num_backwards) - 1
        here.waiting[batch] = left
        if left == 0:
            del here.waiting[batch]
            if here.reducer.group is not None:
                here.reducer.arm(here.weights.slot(batch))
        return left == 0

    def loss_gradient(self, here: Replica, batch: int) -> Tensor:
        """The gradient of a batch's summed loss: the loss scale, divided by what the whole batch counts."""
        if not here.runner.has_loss:
            return self.scale.current  # nobody asks for it
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
        sums = torch.cat([loss, number, *self._metric(batch, made, targets)])
        self._figures[batch] = self._figures[batch] + sums if batch in self._figures else sums

    def _metric(self, batch: int, made: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        if self.metric is None or not self.wants_metric(batch):
            return []
        return [self.metric(made[1:], targets).double()]

    def figures(self, batch: int) -> Tensor:
        """The sums over this worker's rows of a batch, given out once: loss, what the loss counts, metric."""
        width = 2 + (self.num_metrics if self.metric is not None and self.wants_metric(batch) else 0)
        nothing = torch.zeros(width, dtype=torch.float64, device=self.world.device)
        return self._figures.pop(batch, nothing)  # a replica may have no rows of a batch

    # Rows from and to other stages

    def _find(self, action: Action) -> tuple[Replica, Key, Share]:
        here = self.replicas[action.stage]
        share = here.share(action.microbatch)
        if share is None:
            raise RunError(f"worker {self.world.worker} has no rows for {action} of batch {action.batch}")
        return here, (action.batch, action.microbatch), share

    def _inputs(self, here: Replica, key: Key, share: Share) -> list[Tensor]:
        """A microbatch's inputs: from the data, or put together from the stage before."""
        if here.stage == 0:
            given = self.feed.inputs(key[0], share.start, share.stop)
            check_rows("inputs", given, here.inputs(self.feed.length(key[0])), key[0], share.start, share.stop)
            return [rounded(tensor, spec.dtype) for tensor, spec in zip(given, here.runner.inputs)]
        before = self.replicas.get(here.stage - 1)
        return self._gather(here, here.stage - 1, key, here.activations, before.made if before else None)

    def _targets(self, here: Replica, batch: int, start: int, stop: int) -> Sequence[Tensor]:
        """The targets of some rows of a batch."""
        given = self.feed.targets(batch, start, stop)
        check_rows("targets", given, here.targets(self.feed.length(batch)), batch, start, stop)
        if self.is_mean_of_rows:
            check_labels(given, batch)
        return given

    def _output_gradients(self, here: Replica, key: Key) -> list[Tensor] | None:
        """The gradients of a microbatch's outputs: put together from the stage after; None where the loss is."""
        if here.runner.has_loss:
            return None
        after = self.replicas.get(here.stage + 1)
        return self._gather(here, here.stage + 1, key, here.gradients, after.returned if after else None)

    def _gather(
        self, here: Replica, other: int, key: Key, in_flight: dict[Key, InFlight], near: Outbox | None
    ) -> list[Tensor]:
        """Rows that came over the wire, and those that the other stage has on this very worker."""
        arriving = in_flight.pop(key, None)
        rows = here.partners(other, key[1]).get(self.world.worker)
        if near is None or rows is None:
            if arriving is None:
                raise RunError(f"{self.at} found no rows of microbatch {key[1]}: the schedule lacks their receipt")
            return arriving.wait()
        theirs = self.replicas[other].partners(here.stage, key[1])[self.world.worker]
        own = rows_of(near.take(key), *theirs)
        if arriving is None:
            return own
        whole = arriving.wait()
        for target, part in zip(whole, own):
            target[rows[0] : rows[1]].copy_(part)
        return whole

    def _in_flight(self, here: Replica, key: Key, is_forward: bool) -> InFlight:
        """What the rows of a microbatch arrive in, made when the first of them is due."""
        in_flight, share = here.activations if is_forward else here.gradients, here.share(key[1])
        if key not in in_flight and share is not None:
            specs = here.arriving(self.feed.length(key[0]), is_forward=is_forward)
            rows, layout = share.stop - share.start, self.settings.channels_last
            shapes = [((rows, *spec.shape_per_row), spec.dtype) for spec in specs]
            in_flight[key] = InFlight([self.transport.empty(shape, dtype, layout) for shape, dtype in shapes], [])
        return in_flight[key]

    def receive(self, actions: list[Action]) -> None:
        first = actions[0]
        is_forward = first.kind is Kind.RECEIVE_FORWARD
        other, stage = first.stage, first.stage + (1 if is_forward else -1)
        here, key = self.replicas[stage], (first.batch, first.microbatch)
        arriving = self._in_flight(here, key, is_forward)
        parts = self._parts(here, other, arriving.tensors, actions)
        arriving.receipts.append(self.transport.receive(Channel(min(stage, other), is_forward), parts))

    def send(self, actions: list[Action]) -> None:
        first = actions[0]
        is_forward = first.kind is Kind.SEND_FORWARD
        stage, other = first.stage, first.stage + (1 if is_forward else -1)
        here, key = self.replicas[stage], (first.batch, first.microbatch)
        tensors = (here.made if is_forward else here.returned).take(key, len(actions))
        parts = self._parts(here, other, tensors, actions)
        self.transport.send(Channel(min(stage, other), is_forward), parts)

    def _parts(
        self, here: Replica, other: int, tensors: Sequence[Tensor], actions: Sequence[Action]
    ) -> list[tuple[int, list[Tensor]]]:
        """For each action its peer, and the rows that this replica shares with it."""
        partners = here.partners(other, actions[0].microbatch)
        lost = next((action for action in actions if action.peer not in partners), None)
        if lost is not None:
            raise RunError(f"{lost} moves no rows between worker {self.world.worker} and {lost.peer}")
        return [(action.peer, rows_of(tensors, *partners[action.peer])) for action in actions]

    # The end of a batch

    def reduce(self, action: Action) -> None:
        here = self.replicas[action.stage]
        here.reducer.start(here.weights.slot(action.batch), action.peer)

    def agree(self, action: Action) -> None:
        """Adds up the squares of all gradients over all workers; a stage counts once."""
        counted: list[Tensor] = []
        for here in self.replicas.values():
            gradients = here.finish(action.batch)
            here.reduced[action.batch] = gradients
            if here.replica == 0:
                counted += [each for each in gradients if each is not None]
        shared = list({id(tied): tied for here in self.replicas.values() for tied in here.tied}.values())
        counted += [each for tied in shared if tied.is_counted for each in tied.gradients(action.batch)]
        squares, scale = sum_of_squares(counted, self.world.device), self.scale.of_batch(action.batch)
        verdict = agree(squares, scale, self.settings.clip_norm, self.world.everyone)
        self.verdicts[action.batch] = verdict
        for tied in shared:
            tied.judge(action.batch, verdict)
        self.scale.note(action.batch, verdict.overflowed)

    def update(self, action: Action) -> None:
        here, batch = self.replicas[action.stage], action.batch
        gradients = here.reduced.pop(batch, None)
        if gradients is None:
            gradients = here.finish(batch)
        verdict = self.verdicts.get(batch)
        if self.watch is not None:
            self.watch.after_gradients(here, batch, gradients)
        skip = verdict.overflowed if verdict is not None and self.skips else None
        here.weights.update(batch, gradients, skip=skip, divisor=None if verdict is None else verdict.divisor)
        for tied in here.tied:
            if tied.owner == here.stage:
                tied.catch_up(batch, skips=self.skips)
        if self.on_stage_update is not None:
            self.on_stage_update(action.stage, batch)
        # Stages with more versions are updated later: the batch is over when all of this worker's have been.
        self._updates[batch] = self._updates.get(batch, 0) + 1
        if self._updates[batch] == len(self.replicas):
            self._close(batch, verdict)

    def _close(self, batch: int, verdict: Verdict | None) -> None:
        """What follows a worker's last update of a batch."""
        del self._updates[batch]
        self._counts.pop(batch, None)
        if verdict is not None:
            del self.verdicts[batch]
        if self.on_update is not None:
            self.on_update(batch)

    def close(self) -> None:
        """Waits until everything sent has left, and ends what runs in the background."""
        self.transport.close()
        for here in self.replicas.values():
            here.reducer.close()
            for tied in here.tied:
                tied.close()
            for deferred in here.deferred:
                deferred.close()
