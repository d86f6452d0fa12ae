"""A replica of a stage together with its weights, its reduction and the rows it exchanges."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stagewright.cost import handled_by_each
from stagewright.errors import ModelError, UsageError
from stagewright.models import Layered, StageModule, TensorSpec
from stagewright.models.tracing import undisturbed
from stagewright.plan import Plan, Share, overlaps
from stagewright.policy import RULES
from stagewright.runtime.all_reduce import AllReduce, make_all_reduce
from stagewright.runtime.batch_norm import check_batch_norm, synchronize_batch_norm
from stagewright.runtime.compiling import COMPILED, compiled
from stagewright.runtime.deferred import DeferredGradients
from stagewright.runtime.precision import AUTOCAST, autocast
from stagewright.runtime.reduce import Reducer, copy_from
from stagewright.runtime.settings import Settings
from stagewright.runtime.sharing import ELEMENTWISE, Sharing
from stagewright.runtime.stage import StageRunner
from stagewright.runtime.weights import OptimizerMaker, Tied, Weights, make_tied
from stagewright.runtime.world import World, gather_json


class _Shape(NamedTuple):
    """A stage for rows of some length: its modules, one for each slot of the weights, and what goes in and out."""

    modules: list[nn.Module]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    targets: tuple[TensorSpec, ...]


@dataclass
class Replica:
    """A worker's replica of one of its stages, with all that belongs to it."""

    stage: int
    replica: int
    plan: Plan
    runner: StageRunner
    weights: Weights
    reducer: Reducer
    shapes: dict[int | None, _Shape]
    """The stage by the length of rows, where that changes from batch to batch; None is that of the model's sample."""
    tied: list[Tied] = field(default_factory=list)
    """Parameters that other stages use too."""
    names: dict[str, str] = field(default_factory=dict)
    """What the model calls the tensors that its stage knows by another name."""
    deferred: list[DeferredGradients] = field(default_factory=list)
    """For each of its modules the linear layers whose weight gradients are made for several microbatches at once."""
    finished: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """The gradients of batches that wait for their update."""
    waiting: dict[int, int] = field(default_factory=dict)
    """How many backwards of a batch are still to come."""
    shares: list[Share | None] = field(init=False)
    """The rows of each microbatch that are this replica's; None where it has none."""
    num_backwards: int = field(init=False)
    """How many microbatches of a batch this replica has rows of."""
    _partners: dict[tuple[int, int], dict[int, tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = [self.plan.shares(self.stage, microbatch) for microbatch in range(self.plan.num_microbatches)]
        self.shares = [next((share for share in each if share.replica == self.replica), None) for each in rows]
        self.num_backwards = sum(share is not None for share in self.shares)

    def module(self, batch: int, length: int | None = None, *, newest: bool = False) -> nn.Module:
        """The stage with the weights that a batch uses, or the newest ones, for rows of a length."""
        index = self.weights.index(self.weights.num_updates - 1 if newest else batch)
        if newest or length is not None:
            self.reducer.settle()
        else:
            self.reducer.begin(self.weights.slot(batch))
        return self.shapes[length].modules[index]

    @property
    def trained(self) -> list[str]:
        """The stage's own names of all parameters that are trained."""
        trained = {name for versions in (self.weights, *self.tied) for name in versions.names}
        named = (name.removeprefix(COMPILED) for name, _ in self.weights.modules[0].named_parameters())
        return [name for name in named if self.names.get(name, name) in trained]

    def backward_of(self, batch: int, *, is_last: bool) -> AbstractContextManager[None]:
        """What a backward of the batch runs in: its linear layers may keep rows for later."""
        if not self.deferred:
            return nullcontext()
        at_once = is_last and self.reducer.adds_up
        return self.deferred[self.weights.index(batch)].backward(at_once=at_once)

    def finish(self, batch: int) -> list[Tensor | None]:
        """The gradients of a batch, whole and summed over the replicas."""
        if batch not in self.finished:
            if self.deferred:
                self.deferred[self.weights.index(batch)].make()
            self.finish_tied(batch)  # a replica without rows has had no backward
            self.finished[batch] = self.reducer.finish(self.weights.slot(batch))
        return self.finished[batch]

    def finish_tied(self, batch: int) -> None:
        """Lets the sums of tied parameters' gradients start: this stage has added its own of a batch."""
        for each in self.tied:
            each.finish(self.stage, batch)

    def partners(self, other: int, microbatch: int) -> dict[int, tuple[int, int]]:
        """The workers with which this replica shares rows of a microbatch in stage `other`, with these rows.

        The rows are counted from the first one that this replica has.
        """
        found, mine = self._partners.get((other, microbatch)), self.shares[microbatch]
        if found is None and mine is not None:
            common = overlaps([mine], self.plan.shares(other, microbatch))
            found = self._partners[other, microbatch] = {
                self.plan.workers[other][replica]: (start - mine.start, stop - mine.start)
                for _, replica, start, stop in common
            }
        return found or {}


def make_replicas(
    plan: Plan, layered: Layered, world: World, settings: Settings, make_optimizer: OptimizerMaker,
    lengths: Sequence[int] = (),
) -> dict[int, Replica]:  # fmt: skip
    """The stages that the plan puts on this worker, ready to run. All workers must call it, for the groups.

    With `lengths` rows may have any of these, batch by batch.
    """
    if lengths and settings.compile:
        raise UsageError("--compile makes code for one length of rows, and these have several", "leave --compile out")
    others = {length: layered.at_length(length) for length in lengths}
    replicas: dict[int, Replica] = {}
    if settings.sync_batch_norm:
        check_batch_norm(plan)
    edges = plan.edges
    own = [number for number, workers in enumerate(plan.workers) if world.worker in workers]
    for number in own:
        layered.load(edges[number], edges[number + 1], world.device)
    modules = {number: _place(layered.stage(*edges[number : number + 2]), settings, world.device) for number in own}
    _set_formats(modules, plan, layered, world, settings)
    shared = make_tied(plan, layered, world, settings, make_optimizer)
    for number, members in enumerate(plan.workers):
        group = world.group("reduce", members)
        add_up, give_out = _collectives(world, settings, number, members, shares=plan.shard_optimizer[number])
        norms = world.group("batch norm", members) if settings.sync_batch_norm else None
        if number not in modules:
            continue
        module = modules[number]
        if norms is not None:
            synchronize_batch_norm(module, norms)
        if group is not None:
            # A model that was built without a seed differs from worker to worker; a stage has one beginning.
            copy_from(members[0], [*module.parameters(), *module.buffers()], group)
        tied, replica = [each for each in shared if number in each.stages], members.index(world.worker)
        copies, names = _copies_in(module, tied), _other_names(module, layered)
        weights = Weights(
            module, plan.versions[number], make_optimizer, layered.unreached, copies, names,
            settings.correction_of(number), settings.rescale_steps,
        )  # fmt: skip
        deferred: list[DeferredGradients] = []
        if not lengths and _defers(plan, number, settings):  # before a reducer listens to the weights
            apart = {id(each) for slots in copies.values() for each in slots}
            deferred = [DeferredGradients(each, apart) for each in weights.modules]
        reducer = _make_reducer(weights, plan, number, replica, add_up, give_out)
        for batch, each in enumerate(deferred):
            each.put(reducer.places(weights.slot(batch)))
        runner = StageRunner(number, module, settings, replica=replica, recompute=plan.stages[number].recompute)
        if reducer.is_sharing and not settings.compile:
            for index, slot in enumerate(weights.modules):
                reducer.gate(weights.slot(index), slot, module.called, module.read)
        if settings.compile:
            weights.modules = [compiled(slot, plan, world.device) for slot in weights.modules]
        shapes: dict[int | None, _Shape] = {
            None: _Shape(weights.modules, module.inputs, module.outputs, module.targets)
        }
        for length, other in others.items():
            stage = other.stage(edges[number], edges[number + 1])
            shapes[length] = _at_length(stage, other, shapes[None], settings, world.device)
        replicas[number] = Replica(number, replica, plan, runner, weights, reducer, shapes, tied, names, deferred)
    return replicas


def _collectives(
    world: World, settings: Settings, stage: int, members: tuple[int, ...], *, shares: bool
) -> tuple[AllReduce | None, AllReduce | None]:
    """What adds gradients up, and what gives weights out where replicas share the optimizer's states."""
    staged, back = world.is_staged(settings), f"weights of stage {stage}"
    add_up = make_all_reduce(world, f"stage {stage}", members, staged=staged)
    return add_up, make_all_reduce(world, back, members, staged=staged, channel=back, like=add_up) if shares else None


def _make_reducer(
    weights: Weights, plan: Plan, stage: int, replica: int, add_up: AllReduce | None, give_out: AllReduce | None
) -> Reducer:
    """What reduces a stage's gradients; where replicas share out states, the optimizer keeps this one's share alone."""
    num_buckets, optimizer = plan.stages[stage].num_buckets, weights.optimizer
    if give_out is None or optimizer is None:
        return Reducer(weights.parameters, num_buckets, add_up, give_out=give_out)
    sharing = Sharing(replica, plan.replicas[stage], is_whole=type(optimizer) not in ELEMENTWISE)
    reducer = Reducer(weights.parameters, num_buckets, add_up, sharing, give_out)
    weights.keep_share(*reducer.shares())
    return reducer


def _at_length(
    stage: StageModule, layered: Layered, sample: _Shape, settings: Settings, device: torch.device
) -> _Shape:
    """A stage found for rows of another length, with the weights and buffers of every slot."""
    own = {name for name, _ in layered.model.named_buffers()}
    named = [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)]
    modules: list[nn.Module] = []
    for slot in sample.modules:
        buffers = {name: each for name, each in slot.named_buffers(remove_duplicate=False) if name in own}
        known: dict[str, Tensor] = {**buffers, **dict(slot.named_parameters(remove_duplicate=False))}
        made = copy.deepcopy(stage, memo={id(each): known[name] for name, each in named if name in known})
        if {id(each) for each in made.parameters()} != {id(each) for each in slot.parameters()}:
            raise ModelError("a stage has other parameters when its rows have another length", "use one length")
        modules.append(_place(made, settings, device))

    def reshaped(specs: Sequence[TensorSpec], others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        pairs = zip(specs, others, strict=True)
        return tuple(replace(spec, shape_per_row=other.shape_per_row) for spec, other in pairs)

    return _Shape(
        modules, reshaped(sample.inputs, stage.inputs), reshaped(sample.outputs, stage.outputs),
        reshaped(sample.targets, stage.targets),
    )  # fmt: skip


def _copies_in(module: nn.Module, tied: Sequence[Tied]) -> dict[str, list[nn.Parameter]]:
    """For each parameter of a stage that others use too its copies, by the name that it has in the stage."""
    copies = {id(slots[0]): list(slots) for each in tied for slots in zip(*each.parameters)}
    return {name: copies[id(parameter)] for name, parameter in module.named_parameters() if id(parameter) in copies}


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
    module = module.to(device)
    if settings.precision == "fp64":
        module = module.to(torch.float64)
        module.inputs, module.outputs, module.targets = map(_in_fp64, (module.inputs, module.outputs, module.targets))
    if settings.channels_last:
        for parameter in module.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
    module.train()
    return module


def _in_fp64(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, dtype=torch.float64) if spec.dtype == torch.float32 else spec for spec in specs)


def fed_inputs(layered: Layered, settings: Settings) -> tuple[TensorSpec, ...]:
    """The model's inputs in the formats in which the first stage gets them.

    Those that only products read are rounded to autocast's format before they come: the products would do the same,
    and half as many bytes move until then.
    """
    if settings.precision == "fp64":
        return _in_fp64(layered.inputs)
    rounded = AUTOCAST.get(settings.precision)
    return tuple(
        replace(spec, dtype=rounded) if rounded and only_multiplied and spec.dtype == torch.float32 else spec
        for spec, only_multiplied in zip(layered.inputs, layered.only_multiplied)
    )


def _set_formats(
    modules: Mapping[int, StageModule], plan: Plan, layered: Layered, world: World, settings: Settings
) -> None:
    """Sets the formats of what goes into the stages of this worker and comes out of them; all workers must call it.

    Under autocast a stage's outputs have the formats that its operators choose. The first replica of each stage runs
    two rows of zeros through it and tells the others.
    """
    if settings.precision not in AUTOCAST:
        return
    if 0 in modules:
        modules[0].inputs = fed_inputs(layered, settings)
    for stage in range(len(plan.stages) - 1):
        here, after, first = modules.get(stage), modules.get(stage + 1), plan.workers[stage][0]
        made: Sequence[Tensor] = ()
        if here is not None and world.worker == first:
            zeros = [
                torch.zeros((2, *spec.shape_per_row), dtype=spec.dtype, device=world.device) for spec in here.inputs
            ]
            with undisturbed(here), torch.no_grad(), autocast(settings):
                made = here(*zeros)
        names = [str(tensor.dtype).removeprefix("torch.") for tensor in made]
        formats = [getattr(torch, name) for name in gather_json(names, world.control, world.size)[first]]
        if here is not None:
            here.outputs = _with_formats(here.outputs, formats)
        if after is not None:
            after.inputs = _with_formats(after.inputs, formats)


def _with_formats(specs: Sequence[TensorSpec], formats: Sequence[torch.dtype]) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, dtype=dtype) for spec, dtype in zip(specs, formats, strict=True))
