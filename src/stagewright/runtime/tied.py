"""Parameters that several stages use: each holder keeps copies of them, and all holders make the same update.

    stage 0 (K = 3)   embedding ◀──┐  gradients of batch n are summed over the replicas of both stages,
    stage 1 (K = 2)                │  then each holder updates its copy: they stay equal to the bit
    stage 2 (K = 1)   head      ◀──┘

They have as many versions as the stage with the most among their holders, in all of them. Backward comes to the first
of these stages last, so its update of a batch is the one that makes theirs. The others are updated earlier, when
gradients are still to come: they make that update when the first forward needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stagewright.models import Layered
from stagewright.plan import Plan
from stagewright.runtime.all_reduce import AllReduce, make_all_reduce
from stagewright.runtime.background import Pending
from stagewright.runtime.precision import Verdict
from stagewright.runtime.reduce import copy_from, shaped_like
from stagewright.runtime.settings import Settings
from stagewright.runtime.transport import is_staged
from stagewright.runtime.weights import OptimizerMaker, Versions, copy_of
from stagewright.runtime.world import World


class _Holders(NamedTuple):
    """Some parameters and the stages that use them."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


def _find_holders(plan: Plan, layered: Layered) -> list[_Holders]:
    """The parameters that the plan's cuts separate, those of the same stages together."""
    stage_of = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
    found: dict[tuple[int, ...], list[str]] = {}
    for name, layers in layered.tied:
        stages = tuple(sorted({stage_of[layer] for layer in layers}))
        if len(stages) > 1:
            found.setdefault(stages, []).append(name)
    return [_Holders(tuple(names), stages) for stages, names in found.items()]


class Tied(Versions):
    """One worker's copies of parameters that it shares with workers of other stages."""

    def __init__(
        self, holders: _Holders, plan: Plan, worker: int, parameters: list[nn.Parameter],
        make_optimizer: OptimizerMaker, all_reduce: AllReduce | None,
    ) -> None:  # fmt: skip
        num_versions = max(plan.versions[stage] for stage in holders.stages)
        slots = [parameters, *([copy_of(each) for each in parameters] for _ in range(num_versions - 1))]
        super().__init__(holders.names, slots, make_optimizer)
        self.owner = holders.stages[0]
        """The stage whose update of a batch makes theirs, and which saves them."""
        self.is_counted = worker == plan.workers[self.owner][0]
        """Whether this is the worker that counts them in the norm of all gradients."""
        self.stages = holders.stages
        self._here = {stage for stage in holders.stages if worker in plan.workers[stage]}
        self._done: dict[int, set[int]] = {}
        self._sums: dict[int, Pending | None] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._all_reduce = all_reduce
        numel, like = sum(each.numel() for each in parameters), parameters[0].detach()
        self._flat = [all_reduce.memory(numel, like) if all_reduce else like.new_zeros(numel) for _ in slots]
        self.inspect: Callable[[int, Sequence[str], Sequence[Tensor | None]], None] | None = None
        """Called with a batch's gradients before they are summed, where they come from one stage of this worker."""

    def finish(self, stage: int, batch: int) -> None:
        """A stage of this worker has gone backward for the last time in a batch: the last one starts the sum."""
        if batch in self._sums or batch < self.num_updates:
            return
        done = self._done.setdefault(batch, set())
        done.add(stage)
        if done != self._here:
            return
        del self._done[batch]
        slot = self.slot(batch)
        gradients = [each.grad for each in self.parameters[slot]]
        if self.inspect is not None and len(self._here) == 1:
            self.inspect(batch, self.names, gradients)
        with torch.no_grad():
            for view, gradient in zip(self._views(slot), gradients):
                view.zero_() if gradient is None else view.copy_(gradient)
        for parameter in self.parameters[slot]:
            parameter.grad = None
        self._sums[batch] = self._all_reduce.start(self._flat[slot]) if self._all_reduce is not None else None

    def gradients(self, batch: int) -> list[Tensor]:
        """The summed gradients of a batch."""
        pending = self._sums[batch]
        if pending is not None:
            pending.wait()
            self._sums[batch] = None
        return self._views(self.slot(batch))

    def judge(self, batch: int, verdict: Verdict) -> None:
        """What all workers agreed on for a batch whose update is still to come."""
        self._verdicts[batch] = verdict

    def catch_up(self, batch: int, *, skips: bool) -> None:
        """Makes the updates of all batches up to one whose gradients are complete on this worker."""
        while self.num_updates <= batch and self.num_updates in self._sums:
            number = self.num_updates
            gradients, verdict = self.gradients(number), self._verdicts.pop(number, None)
            skip = verdict.overflowed if verdict is not None and skips else None
            self.update(number, gradients, skip=skip, divisor=None if verdict is None else verdict.divisor)
            del self._sums[number]

    def close(self) -> None:
        """Ends what runs in the background."""
        if self._all_reduce is not None:
            self._all_reduce.close()
            self._all_reduce = None

    def _views(self, slot: int) -> list[Tensor]:
        parameters = self.parameters[slot]
        pieces = torch.split(self._flat[slot], [each.numel() for each in parameters])
        return [shaped_like(piece, each) for piece, each in zip(pieces, parameters)]


def make_tied(
    plan: Plan, layered: Layered, world: World, settings: Settings, make_optimizer: OptimizerMaker
) -> list[Tied]:
    """What this worker shares with workers of other stages, once its stages are in place. All workers must call it."""
    parameters, found = dict(layered.model.named_parameters()), []
    for number, holders in enumerate(_find_holders(plan, layered)):
        members = tuple(sorted({worker for stage in holders.stages for worker in plan.workers[stage]}))
        group = world.group("tied", members)
        trained = [name for name in holders.names if parameters[name].requires_grad and name not in layered.unreached]
        add_up = (
            make_all_reduce(world, f"tied {number}", members, staged=is_staged(world, settings)) if trained else None
        )
        if world.worker not in members:
            continue
        if group is not None:  # a model that was built without a seed differs from worker to worker
            copy_from(members[0], [parameters[name] for name in holders.names], group)
        if trained:
            own = [parameters[name] for name in trained]
            found.append(Tied(holders._replace(names=tuple(trained)), plan, world.worker, own, make_optimizer, add_up))
    return found


def copies_in(module: nn.Module, tied: Sequence[Tied]) -> dict[str, list[nn.Parameter]]:
    """For each parameter of a stage that others use too its copies, by the name that it has in the stage."""
    copies = {
        id(first): [slot[index] for slot in each.parameters]
        for each in tied
        for index, first in enumerate(each.parameters[0])
    }
    return {name: copies[id(parameter)] for name, parameter in module.named_parameters() if id(parameter) in copies}
