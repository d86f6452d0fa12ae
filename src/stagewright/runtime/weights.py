"""A stage's weight versions: K copies of its parameters, and the one optimizer that moves them on.

Batch n computes in slot n mod K. Its update makes version n + 1, which batch n + K is the first to use, in the same
slot; the batch that used the slot before is over by then, so K slots are enough:

    K = 2          slot 0                 slot 1
    start          version 0              version 0
    batch 0 ends   version 1 = 0 + Δ0                         Δn: from the gradient of batch n
    batch 1 ends                          version 2 = 1 + Δ1
    batch 2 ends   version 3 = 2 + Δ2
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stagewright.errors import UsageError

OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer | tuple[Optimizer, LRScheduler]]
"""From a stage's parameters to their optimizer, with a scheduler where there is one: it steps after every update."""


class Versions:
    """K copies of some parameters, and their optimizer."""

    def __init__(
        self, names: Sequence[str], parameters: list[list[nn.Parameter]], make_optimizer: OptimizerMaker
    ) -> None:
        """`parameters` are those of each slot, by the whole model's `names`."""
        self.names, self.parameters = list(names), parameters
        # The optimizer keeps its state by parameter object, so it gets its own ones: they are made to point at the
        # slot that is being updated, and no graph ever sees them.
        is_alone = len(parameters) == 1
        self.moved = parameters[0] if is_alone else [nn.Parameter(one.data) for one in parameters[0]]
        for name, parameter in zip(self.names, self.moved):  # for optimizers that treat some apart
            parameter.stagewright_name = name  # type: ignore[attr-defined]
        self.optimizer, self.scheduler = _made(make_optimizer, self.moved)
        self.num_updates = 0
        self.rate_of: Callable[[int], float] | None = None
        """The learning rate of a batch's update, where no scheduler sets it."""

    @property
    def num_versions(self) -> int:
        """K."""
        return len(self.parameters)

    def slot(self, batch: int) -> int:
        """Where a batch computes."""
        return batch % self.num_versions

    @torch.no_grad()
    def end_in_first_slot(self) -> None:
        """Copies the newest weights to where the caller's model has its own."""
        newest = self.parameters[self.slot(self.num_updates - 1)]
        if newest is not self.parameters[0] and newest:
            torch._foreach_copy_([*self.parameters[0]], [*newest])

    @torch.no_grad()
    def update(
        self,
        batch: int,
        gradients: Sequence[Tensor | None],
        *,
        skip: Tensor | None = None,
        divisor: Tensor | None = None,
    ) -> None:
        """Makes version batch + 1 in the batch's slot, from version batch and the batch's gradient, divided.

        Where `skip` is 1, version batch + 1 is version batch.
        """
        target, newest = self.parameters[self.slot(batch)], self.parameters[self.slot(batch - 1)]
        if target is not newest and target:
            torch._foreach_copy_([*target], [*newest])
        for moved, parameter, gradient in zip(self.moved, target, gradients):
            if moved is not parameter:
                moved.data = parameter.data
            moved.grad = gradient
        if self.optimizer is not None:
            if self.rate_of is not None:
                rate = self.rate_of(batch)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
            _step(self.optimizer, skip, divisor)
        if self.scheduler is not None:
            with warnings.catch_warnings():  # the optimizer steps under another name, or may skip its first step
                warnings.simplefilter("ignore", UserWarning)
                self.scheduler.step()
        for moved in self.moved:
            moved.grad = None
        self.num_updates = batch + 1


class Weights(Versions):
    """The slots of one stage on one worker."""

    def __init__(
        self, module: nn.Module, num_versions: int, make_optimizer: OptimizerMaker, unreached: Collection[str] = (),
        tied: Mapping[str, Sequence[nn.Parameter]] | None = None, other_names: Mapping[str, str] | None = None,
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
        super().__init__([named[name] for name in own], parameters, make_optimizer)

    def index(self, batch: int) -> int:
        """The number of the module that a batch computes with."""
        return batch % len(self.modules)

    def module(self, batch: int) -> nn.Module:
        """The stage with the weights that a batch uses."""
        return self.modules[self.index(batch)]

    def newest(self) -> nn.Module:
        """The stage with the weights after every update so far."""
        return self.module(self.num_updates - 1)


def _made(
    make_optimizer: OptimizerMaker, parameters: list[nn.Parameter]
) -> tuple[Optimizer | None, LRScheduler | None]:
    """The optimizer and the scheduler of some parameters; a scheduler that nobody would save is refused."""
    if not parameters:
        return None, None
    made = make_optimizer(parameters)
    optimizer, scheduler = made if isinstance(made, tuple) else (made, None)
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


def _step(optimizer: Optimizer, skip: Tensor | None, divisor: Tensor | None) -> None:
    """One step with the gradients divided, or none where `skip` is 1.

    A fused optimizer takes both as they are on the device, as it does from torch's GradScaler, and no host waits. Its
    first step makes its state, which one that is skipped would leave undefined: that step is the host's to decide.
    """
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
    shared |= {
        id(each): known.get(name, each) for name, each in module.named_parameters() if _is_given(name, each, known)
    }
    made = copy.deepcopy(module, memo=dict(shared))
    for mine, (name, theirs) in zip(made.parameters(), module.named_parameters()):
        if not _is_given(name, theirs, known):
            _copy_all_hooks(theirs, mine)
    return made


def _is_given(name: str, parameter: nn.Parameter, known: Mapping[str, nn.Parameter]) -> bool:
    return name in known or not parameter.requires_grad


def copy_of(parameter: nn.Parameter) -> nn.Parameter:
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
