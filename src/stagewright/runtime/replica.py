"""A replica of a stage together with its weights, its reduction and the rows it exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from stagewright.cost import handled_by_each
from stagewright.models import Layered, StageModule, TensorSpec
from stagewright.plan import Plan, Share, overlaps
from stagewright.policy import RULES
from stagewright.runtime.all_reduce import make_all_reduce
from stagewright.runtime.batch_norm import check_batch_norm, synchronize_batch_norm
from stagewright.runtime.compiling import COMPILED, compiled, options_on_card
from stagewright.runtime.deferred import DeferredGradients
from stagewright.runtime.reduce import Reducer, copy_from
from stagewright.runtime.settings import Settings
from stagewright.runtime.stage import InFlight, Key, StageRunner, mix
from stagewright.runtime.tied import Tied, copies_in, make_tied
from stagewright.runtime.transport import is_staged
from stagewright.runtime.weights import OptimizerMaker, Weights
from stagewright.runtime.world import World


class Outbox:
    """Tensors by microbatch, each kept until everyone who needs rows of it has taken them."""

    def __init__(self) -> None:
        self._kept: dict[Key, tuple[list[Tensor], int]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def put(self, key: Key, tensors: list[Tensor], num_takers: int) -> None:
        """Keeps tensors for a number of takers."""
        if num_takers:
            self._kept[key] = (tensors, num_takers)

    def take(self, key: Key, num_takers: int = 1) -> list[Tensor]:
        """The tensors; forgotten once the last taker has them."""
        tensors, left = self._kept.pop(key)
        if left > num_takers:
            self._kept[key] = (tensors, left - num_takers)
        return tensors


@dataclass
class Replica:
    """A worker's replica of one of its stages, with all that belongs to it."""

    stage: int
    replica: int
    plan: Plan
    runner: StageRunner
    weights: Weights
    reducer: Reducer
    tied: list[Tied] = field(default_factory=list)
    """Parameters that other stages use too."""
    names: dict[str, str] = field(default_factory=dict)
    """What the model calls the tensors that its stage knows by another name."""
    deferred: list[DeferredGradients] = field(default_factory=list)
    """For each of its modules the linear layers whose weight gradients are made for several microbatches at once."""
    activations: dict[Key, InFlight] = field(default_factory=dict)
    """Inputs on their way, by microbatch."""
    gradients: dict[Key, InFlight] = field(default_factory=dict)
    """Gradients of the outputs on their way."""
    made: Outbox = field(default_factory=lambda: Outbox())
    """Outputs that the stage after has yet to take."""
    returned: Outbox = field(default_factory=lambda: Outbox())
    """Gradients of the inputs that the stage before has yet to take."""
    reduced: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """Reduced gradients of batches that wait for their update."""
    waiting: dict[int, int] = field(default_factory=dict)
    """How many backwards of a batch are still to come."""
    _shares: dict[int, Share | None] = field(default_factory=dict)
    _partners: dict[tuple[int, int], dict[int, tuple[int, int]]] = field(default_factory=dict)

    @property
    def trained(self) -> list[str]:
        """The stage's own names of all parameters that are trained."""
        trained = {name for versions in (self.weights, *self.tied) for name in versions.names}
        named = (name.removeprefix(COMPILED) for name, _ in self.weights.modules[0].named_parameters())
        return [name for name in named if self.names.get(name, name) in trained]

    @cached_property
    def num_backwards(self) -> int:
        """How many microbatches of a batch this replica has rows of."""
        return sum(self.share(microbatch) is not None for microbatch in range(self.plan.num_microbatches))

    def backward_of(self, batch: int, *, is_last: bool) -> AbstractContextManager[None]:
        """What a backward of the batch runs in: its linear layers may keep rows for later."""
        if not self.deferred:
            return nullcontext()
        at_once = is_last and self.reducer.group is not None
        return self.deferred[self.weights.index(batch)].backward(at_once=at_once)

    def finish(self, batch: int) -> list[Tensor | None]:
        """The gradients of a batch, whole and summed over the replicas."""
        if self.deferred:
            self.deferred[self.weights.index(batch)].make()
        self.finish_tied(batch)  # a replica without rows has had no backward
        return self.reducer.finish(self.weights.slot(batch))

    def finish_tied(self, batch: int) -> None:
        """Lets the sums of tied parameters' gradients start: this stage has added its own of a batch."""
        for each in self.tied:
            each.finish(self.stage, batch)

    def share(self, microbatch: int) -> Share | None:
        """The rows of a microbatch that are this replica's, or None where it has none."""
        if microbatch not in self._shares:
            shares = self.plan.shares(self.stage, microbatch)
            self._shares[microbatch] = next((share for share in shares if share.replica == self.replica), None)
        return self._shares[microbatch]

    def partners(self, other: int, microbatch: int) -> dict[int, tuple[int, int]]:
        """The workers with which this replica shares rows of a microbatch in stage `other`, with these rows.

        The rows are counted from the first one that this replica has.
        """
        found, mine = self._partners.get((other, microbatch)), self.share(microbatch)
        if found is None and mine is not None:
            common = overlaps([mine], self.plan.shares(other, microbatch))
            found = self._partners[other, microbatch] = {
                self.plan.workers[other][replica]: (start - mine.start, stop - mine.start)
                for _, replica, start, stop in common
            }
        return found or {}


def make_replicas(
    plan: Plan, layered: Layered, world: World, settings: Settings, make_optimizer: OptimizerMaker
) -> dict[int, Replica]:
    """The stages that the plan puts on this worker, ready to run. All workers must call it, for the groups."""
    replicas: dict[int, Replica] = {}
    if settings.sync_batch_norm:
        check_batch_norm(plan)
    edges = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
    own = [number for number, workers in enumerate(plan.workers) if world.worker in workers]
    for number in own:
        layered.load(edges[number], edges[number + 1], world.device)
    modules = {number: _place(layered.stage(*edges[number : number + 2]), settings, world.device) for number in own}
    shared = make_tied(plan, layered, world, settings, make_optimizer)
    for number, stage in enumerate(plan.stages):
        group = world.group("reduce", plan.workers[number])
        add_up = make_all_reduce(world, f"stage {number}", plan.workers[number], staged=is_staged(world, settings))
        norms = world.group("batch norm", plan.workers[number]) if settings.sync_batch_norm else None
        if number in modules:
            module, tied = modules[number], [each for each in shared if number in each.stages]
            module = synchronize_batch_norm(module, norms) if settings.sync_batch_norm else module
            if group is not None:
                # A model that was built without a seed differs from worker to worker; a stage has one beginning.
                copy_from(plan.workers[number][0], [*module.parameters(), *module.buffers()], group)
            runner = StageRunner(
                number, module, settings, recompute=stage.recompute,
                seed=mix(settings.seed, number, plan.workers[number].index(world.worker)),
            )  # fmt: skip
            copies, names = copies_in(module, tied), _other_names(module, layered)
            weights = Weights(module, stage.versions, make_optimizer, layered.unreached, copies, names)
            deferred = []
            if _defers(plan, number, settings):
                apart = {id(each) for slots in copies.values() for each in slots}
                deferred = [DeferredGradients(each, apart) for each in weights.modules]
            reducer = Reducer(weights.parameters, stage.num_buckets, group, add_up)
            for batch, each in enumerate(deferred):
                each.put(reducer.places(weights.slot(batch)))
            replica = plan.workers[number].index(world.worker)
            replicas[number] = Replica(number, replica, plan, runner, weights, reducer, tied, names, deferred)
            if settings.compile:
                options = options_on_card(plan) if world.device.type == "cuda" else {}
                weights.modules = [compiled(slot, options) for slot in weights.modules]
    return replicas


def _other_names(module: nn.Module, layered: Layered) -> dict[str, str]:
    """For the names of a stage's parameters that are not the model's first ones for them, these."""
    first = {id(parameter): name for name, parameter in layered.model.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(each)] for name, each in named if first[id(each)] != name}


def _defers(plan: Plan, stage: int, settings: Settings) -> bool:
    """Whether linear layers make their weight gradients themselves: of several microbatches, or in a known place."""
    if settings.compile or RULES[plan.policy].halves:  # compiled code and backward in halves have their own ways
        return False
    replicas = plan.replicas[stage]
    handled = handled_by_each(plan.policy, plan.route, plan.num_microbatches, replicas)
    return replicas > 1 or handled.microbatches > 1


def _place(module: StageModule, settings: Settings, device: torch.device) -> StageModule:
    """The module on its device, in its number format and layout, in training mode."""
    module = module.to(device, torch.float64) if settings.precision == "fp64" else module.to(device)
    if settings.channels_last:
        for parameter in module.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
    change = {torch.float32: torch.float64} if settings.precision == "fp64" else {}
    module.inputs = with_dtypes(module.inputs, change)
    module.outputs = with_dtypes(module.outputs, change)
    module.targets = with_dtypes(module.targets, change)
    module.train()
    return module


def with_dtypes(specs: Iterable[TensorSpec], change: dict[torch.dtype, torch.dtype]) -> tuple[TensorSpec, ...]:
    """The specs with some number formats exchanged."""
    return tuple(replace(spec, dtype=change.get(spec.dtype, spec.dtype)) for spec in specs)


def rows_of(tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """The same rows of several tensors, as views."""
    if not tensors or (start == 0 and stop == tensors[0].size(0)):
        return list(tensors)
    return [tensor[start:stop] for tensor in tensors]
