"""A stage's weight versions: K copies of its parameters, and the one optimizer that moves them on.

Batch n computes in slot n mod K. Its update makes version n + 1, which batch n + K is the first to use, in the same
slot; the batch that used the slot before is over by then, so K slots are enough:

    K = 2          slot 0                 slot 1
    start          version 0              version 0
    batch 0 ends   version 1 = 0 + Δ0                         Δn: from the gradient of batch n
    batch 1 ends                          version 2 = 1 + Δ1
    batch 2 ends   version 3 = 2 + Δ2

Parameters that several stages use are tied: each holder keeps copies of them, and all holders make the same update.

    stage 0 (K = 3)   embedding ◀──┐  gradients of batch n are summed over the replicas of both stages,
    stage 1 (K = 2)                │  then each holder updates its copy: they stay equal to the bit
    stage 2 (K = 1)   head      ◀──┘

They have as many versions as the stage with the most among their holders, in all of them. Backward comes to the first
of these stages last, so its update of a batch is the one that makes theirs. The others are updated earlier, when
gradients are still to come: they make that update when the first forward needs it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import lcm, nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stagewright.errors import UsageError
from stagewright.models import Layered
from stagewright.plan import Plan
from stagewright.runtime.all_reduce import AllReduce, make_all_reduce
from stagewright.runtime.corrections import CORRECTIONS
from stagewright.runtime.precision import Verdict
from stagewright.runtime.reduce import Reducer, copy_from
from stagewright.runtime.settings import Settings
from stagewright.runtime.sharing import Piece
from stagewright.runtime.world import World

OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer | tuple[Optimizer, LRScheduler]]
"""From a stage's parameters to their optimizer, with a scheduler where there is one: it steps after every update."""


class Versions:
    """K copies of some parameters, and their optimizer."""

    def __init__(
        self, names: Sequence[str], parameters: list[list[nn.Parameter]], make_optimizer: OptimizerMaker,
        correct: str = "none", rescale_steps: int | None = None,
    ) -> None:  # fmt: skip
        """`parameters` are those of each slot, by the whole model's `names`; `correct` is for K > 1."""
        self.names, self.parameters = list(names), parameters
        self.delay = len(parameters) - 1
        self.correction = CORRECTIONS[correct if self.delay else "none"]
        self._rescale_steps = rescale_steps
        self.places: Sequence[Sequence[Tensor]] = parameters
        """For each slot what the optimizer moves there."""
        self.pieces: list[Piece] | None = None
        """The pieces of the parameters that this replica moves, where it shares them with others; else all of them."""
        # The optimizer keeps its state by parameter object, so it gets its own ones: they are made to point at the
        # slot that is being updated, or keep the newest weights where slots are ahead, and no graph ever sees them.
        first = [one.data.clone() if self.is_ahead else one.data for one in parameters[0]]
        self.moved = parameters[0] if self.delay == 0 else [nn.Parameter(each) for each in first]
        for name, parameter in zip(self.names, self.moved):  # for optimizers that treat some apart
            parameter.stagewright_name = name  # type: ignore[attr-defined]
        self.optimizer, self.scheduler = optimizer_by(make_optimizer, self.moved)
        ahead = self.correction.prepare(self.optimizer.param_groups if self.optimizer is not None else (), self.delay)
        self._aheads = [ahead.get(id(each), 0.0) for each in self.moved]
        """How far the slots are ahead of each parameter that the optimizer moves, in moves like its last one."""
        past = self.moved if self.correction.feeds_back else ()
        self.moves = [each.new_full((self.delay, *each.shape), nan) for each in past]
        """The last moves of each parameter, each in the place of its batch; NaN where there was none yet."""
        self.num_updates = 0
        self.rate_of: Callable[[int], float] | None = None
        """The learning rate of a batch's update, where no scheduler sets it."""

    @property
    def num_versions(self) -> int:
        return len(self.parameters)

    @property
    def moved_names(self) -> list[str]:
        """The name of the parameter of each thing that the optimizer moves."""
        return self.names if self.pieces is None else [self.names[piece.parameter] for piece in self.pieces]

    def keep_share(self, pieces: list[Piece], places: list[list[Tensor]]) -> None:
        """Leaves some pieces of the parameters to this replica's optimizer, in the groups that it put these in."""
        whole, self.moved = self.moved, [nn.Parameter(place.data) for place in places[0]]
        self.pieces, self.places = pieces, places
        if self.optimizer is None:
            return
        made: dict[int, list[nn.Parameter]] = {id(parameter): [] for parameter in whole}
        for name, piece, part in zip(self.moved_names, pieces, self.moved):
            part.stagewright_name = name  # type: ignore[attr-defined]
            parameter = whole[piece.parameter]
            made[id(parameter)].append(part)
            for kind, value in self.optimizer.state.get(parameter, {}).items():  # some have states from the first on
                self.optimizer.state[part][kind] = piece.of(value).clone() if is_alike(value, parameter) else value
        for group in self.optimizer.param_groups:
            group["params"] = [part for parameter in group["params"] for part in made[id(parameter)]]
        for parameter in whole:
            self.optimizer.state.pop(parameter, None)

    def slot(self, batch: int) -> int:
        """Where a batch computes."""
        return batch % self.num_versions

    @property
    def is_ahead(self) -> bool:
        """Whether slots hold other weights than those that the optimizer moves."""
        return self.correction.ahead is not None

    @property
    def newest_parameters(self) -> list[nn.Parameter]:
        """The weights after every update so far, without what a correction has put on top of them."""
        return self.moved if self.is_ahead else self.parameters[self.slot(self.num_updates - 1)]

    @contextmanager
    def uncorrected(self) -> Iterator[None]:
        """Inside, the newest slot holds the newest weights themselves."""
        slot = self.parameters[self.slot(self.num_updates - 1)]
        kept = [each.detach().clone() for each in slot] if self.is_ahead else []
        with torch.no_grad():
            for each, newest in zip(slot, self.moved if kept else ()):
                each.copy_(newest)
        yield
        with torch.no_grad():
            for each, before in zip(slot, kept):
                each.copy_(before)

    @torch.no_grad()
    def end_in_first_slot(self) -> None:
        """Copies the newest weights to where the caller's model has its own."""
        newest = self.newest_parameters
        if newest is not self.parameters[0] and newest:
            torch._foreach_copy_([*self.parameters[0]], [*newest])

    @torch.no_grad()
    def update(self, batch: int, gradients: Sequence[Tensor | None], verdict: Verdict | None = None) -> None:
        """Makes version batch + 1 in the batch's slot, from version batch and the batch's gradient.

        The verdict divides the gradient; where it skips the batch, version batch + 1 is version batch.
        """
        target, newest = self.places[self.slot(batch)], self.places[self.slot(batch - 1)]
        before: Sequence[Tensor] = newest
        if self.is_ahead:
            before = [each.detach().clone() for each in self.moved]
        elif target is not newest and target:
            torch._foreach_copy_([*target], [*newest])
        for moved, place, gradient in zip(self.moved, target, gradients):
            if moved is not place and not self.is_ahead:
                moved.data = place.data
            moved.grad = gradient
        if self.optimizer is not None:
            if self.rate_of is not None:
                rate = self.rate_of(batch)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
            over = min(1.0, batch / self._rescale_steps) if self._rescale_steps else 0.0
            with self.correction.rescaled(self.optimizer.param_groups, self.delay, over):
                _step(self.optimizer, verdict)
        self._correct(batch, target, before)
        if self.scheduler is not None:
            with warnings.catch_warnings():  # the optimizer steps under another name, or may skip its first step
                warnings.simplefilter("ignore", UserWarning)
                self.scheduler.step()
        for moved in self.moved:
            moved.grad = None
        torch.clear_autocast_cache()  # it knows the weights by their place, and would give out the old ones
        self.num_updates = batch + 1

    def _correct(self, batch: int, target: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Puts the weights at use into a batch's slot, from those that were there before the step."""
        if self.is_ahead and self.moved:
            ahead = torch._foreach_sub([*self.moved], [*before])
            torch._foreach_mul_(ahead, self._aheads)
            torch._foreach_add_(ahead, [*self.moved])
            torch._foreach_copy_([*target], ahead)
        place = batch % max(1, self.delay)
        for each, then, past in zip(target, before, self.moves):
            move = each - then
            each.add_(torch.where(past[place].isnan(), 0.0, move - past[place]))
            past[place] = move


def is_alike(state: object, parameter: Tensor) -> bool:
    """Whether what an optimizer keeps has a number for each number of the parameter."""
    return isinstance(state, Tensor) and state.shape == parameter.shape


class Weights(Versions):
    """The slots of one stage on one worker."""

    def __init__(
        self, module: nn.Module, num_versions: int, make_optimizer: OptimizerMaker, unreached: Collection[str] = (),
        tied: Mapping[str, Sequence[nn.Parameter]] | None = None, other_names: Mapping[str, str] | None = None,
        correct: str = "none", rescale_steps: int | None = None,
    ) -> None:  # fmt: skip
        """`unreached` are parameters to which no gradient ever comes: no optimizer may decay them.

        `other_names` are what the model calls parameters that the stage knows by another name.
        `tied` are the copies of parameters that other stages use too. They may be more than the stage has versions, so
        that there are modules for each combination; parameters that are not trained have one copy for all.
        """
        tied, named = tied or {}, {name: (other_names or {}).get(name, name) for name, _ in module.named_parameters()}
        self.modules: list[nn.Module] = [module]
        for number in range(1, lcm(num_versions, *map(len, tied.values()))):
            known = {name: copies[number % len(copies)] for name, copies in tied.items()}
            if number >= num_versions:
                others = self.modules[number % num_versions].named_parameters()
                known = {name: each for name, each in others if name not in tied} | known
            self.modules.append(_twin(module, known))
        moving = [name for name, each in module.named_parameters() if each.requires_grad and name not in tied]
        own = [name for name in moving if named[name] not in unreached]
        parameters = [[slot.get_parameter(name) for name in own] for slot in self.modules[:num_versions]]
        super().__init__([named[name] for name in own], parameters, make_optimizer, correct, rescale_steps)

    def index(self, batch: int) -> int:
        """The number of the module that a batch computes with."""
        return batch % len(self.modules)

    def newest(self) -> nn.Module:
        """The stage with the weights after every update so far."""
        return self.modules[self.index(self.num_updates - 1)]


def optimizer_by(make: OptimizerMaker, parameters: list[nn.Parameter]) -> tuple[Optimizer | None, LRScheduler | None]:
    """The optimizer and the scheduler of some parameters; what would not train just these, or not go on, is refused."""
    if not parameters:
        return None, None
    made = make(parameters)
    optimizer, scheduler = made if isinstance(made, tuple) else (made, None)
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS):
        raise UsageError(
            f"what should make an optimizer made {type(optimizer).__name__}",
            "give torch.optim.AdamW, or lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
        )
    given = {id(each) for each in parameters}
    if any(id(each) not in given for group in optimizer.param_groups for each in group["params"]):
        raise UsageError(
            "the optimizer holds other parameters than those it was made of: each stage has its own",
            "make it of the function's argument: lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
        )
    if scheduler is None and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise UsageError(
            "the recipe makes a learning-rate scheduler and keeps it to itself, so that a resumed run would lose it",
            "return it too, `return optimizer, scheduler`: it steps after every update, and checkpoints hold it",
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau follows a figure that stages do not share", "use a scheduler that follows the steps"
        )
    return optimizer, scheduler


def _step(optimizer: Optimizer, verdict: Verdict | None) -> None:
    """One step with the gradients divided, or none where the verdict skips it.

    A fused optimizer takes both as they are on the device, as it does from torch's GradScaler, and no host waits. Its
    first step makes its state, which one that is skipped would leave undefined: that step is the host's to decide.
    """
    skip, divisor = (None, None) if verdict is None else (verdict.skip, verdict.divisor)
    told: Any = optimizer
    if getattr(told, "_step_supports_amp_scaling", False) and optimizer.state:
        told.found_inf, told.grad_scale = skip, None if divisor is None else divisor.float()
        optimizer.step()
        told.found_inf = told.grad_scale = None
        return
    if skip is not None and bool(skip):
        return
    gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    if divisor is not None and gradients:
        torch._foreach_div_(gradients, divisor)
    optimizer.step()


def _twin(module: nn.Module, known: Mapping[str, nn.Parameter]) -> nn.Module:
    """A copy with the known parameters and others of its own, but the very same buffers and frozen parameters."""
    shared: dict[int, Tensor] = {id(buffer): buffer for buffer in module.buffers()}
    own = []
    for name, parameter in module.named_parameters():
        if name in known or not parameter.requires_grad:
            shared[id(parameter)] = known.get(name, parameter)
        else:
            own.append((name, parameter))
    made = copy.deepcopy(module, memo=dict(shared))
    for name, parameter in own:
        _copy_all_hooks(parameter, made.get_parameter(name))
    return made


def _copy_of(parameter: nn.Parameter) -> nn.Parameter:
    """Another parameter with the same numbers and hooks."""
    made = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    _copy_all_hooks(parameter, made)
    return made


def _copy_all_hooks(parameter: Tensor, other: Tensor) -> None:
    """Gives another tensor a parameter's hooks, which copies lose."""
    copy_hooks(parameter, other)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        other.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def copy_hooks(parameter: Tensor, other: Tensor) -> None:
    """Gives another tensor the hooks that change a parameter's gradient."""
    for hook in (parameter._backward_hooks or {}).values():
        other.register_hook(hook)  # type: ignore[no-untyped-call]


class Tied(Versions):
    """One worker's copies of parameters that it shares with workers of other stages."""

    def __init__(
        self, names: Sequence[str], stages: Sequence[int], plan: Plan, worker: int, parameters: list[nn.Parameter],
        make_optimizer: OptimizerMaker, add_up: AllReduce | None, settings: Settings,
    ) -> None:  # fmt: skip
        num_versions = max(plan.versions[stage] for stage in stages)
        slots = [parameters, *([_copy_of(each) for each in parameters] for _ in range(num_versions - 1))]
        correct = settings.correction_of(stages[0])
        super().__init__(names, slots, make_optimizer, correct, settings.rescale_steps)
        self.stages, self.owner = stages, stages[0]
        """The stages that use them, and the one whose update of a batch makes theirs, and which saves them."""
        self.is_counted = worker == plan.workers[self.owner][0]
        """Whether this is the worker that counts them in the norm of all gradients."""
        self.stages_here = {stage for stage in stages if worker in plan.workers[stage]}
        self.reducer = Reducer(slots, 1, add_up)
        self._done: dict[int, set[int]] = {}
        """Of a batch those stages of this worker that have gone backward for the last time."""
        self._summed: dict[int, list[Tensor | None] | None] = {}
        """The gradients of batches whose update is still to come; None for a sum on its way."""

    def finish(self, stage: int, batch: int) -> None:
        """A stage of this worker has gone backward for the last time in a batch: the last one starts the sum."""
        if batch in self._summed or batch < self.num_updates:
            return
        done = self._done.setdefault(batch, set())
        done.add(stage)
        if done == self.stages_here:
            del self._done[batch]
            self.reducer.start(self.slot(batch))
            self._summed[batch] = None

    def gradients(self, batch: int) -> list[Tensor | None]:
        """The summed gradients of a batch."""
        found = self._summed[batch]
        if found is None:
            found = self._summed[batch] = self.reducer.finish(self.slot(batch))
        return found

    def catch_up(self, batch: int, verdicts: Mapping[int, Verdict]) -> None:
        """Makes the updates of all batches up to one whose gradients are complete on this worker."""
        while self.num_updates <= batch and self.num_updates in self._summed:
            number = self.num_updates
            self.update(number, self.gradients(number), verdicts.get(number))
            del self._summed[number]


def make_tied(
    plan: Plan, layered: Layered, world: World, settings: Settings, make_optimizer: OptimizerMaker
) -> list[Tied]:
    """What this worker shares with workers of other stages, once its stages are in place. All workers must call it."""
    parameters, found = dict(layered.model.named_parameters()), []
    for number, (stages, names) in enumerate(_find_holders(plan, layered).items()):
        members = tuple(sorted({worker for stage in stages for worker in plan.workers[stage]}))
        group = world.group("tied", members)
        trained = [name for name in names if parameters[name].requires_grad and name not in layered.unreached]
        staged = world.is_staged(settings)
        add_up = make_all_reduce(world, f"tied {number}", members, staged=staged) if trained else None
        if world.worker not in members:
            continue
        if group is not None:  # a model that was built without a seed differs from worker to worker
            copy_from(members[0], [parameters[name] for name in names], group)
        if trained:
            own = [parameters[name] for name in trained]
            found.append(Tied(trained, stages, plan, world.worker, own, make_optimizer, add_up, settings))
    return found


def _find_holders(plan: Plan, layered: Layered) -> dict[tuple[int, ...], list[str]]:
    """The parameters that the plan's cuts separate, by the stages that use them."""
    stage_of = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
    found: dict[tuple[int, ...], list[str]] = {}
    for name, layers in layered.tied:
        stages = tuple(sorted({stage_of[layer] for layer in layers}))
        if len(stages) > 1:
            found.setdefault(stages, []).append(name)
    return found
