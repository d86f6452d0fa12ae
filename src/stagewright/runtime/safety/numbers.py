"""The watch on numbers: what is not finite, and gradient norms that jump, with stage and layer.

Forward: a stage whose inputs are finite and whose outputs are not is where it began; its layers are run once more, one
by one, to name the first. Backward: the parameter nearest to the loss whose gradient is not finite is where it began.
On a card only steps that a log line is due after are looked at, when their numbers have come to the host: a card never
waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from stagewright.errors import RunError
from stagewright.runtime.replica import Replica
from stagewright.runtime.stage import Key
from stagewright.runtime.timing import AsyncScalars

_MOST_SKIPPED = 100
"""Steps in a row after which skipping has no end."""


class Watch:
    """Looks at one worker's outputs and gradients; raises, or tells and goes on."""

    def __init__(
        self, layer_of: Mapping[str, str], scalars: AsyncScalars, *, stops: bool, looks_always: bool,
        forgives_overflow: bool, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.layer_of, self.scalars, self.tell = layer_of, scalars, tell
        self.stops, self.looks_always, self.forgives_overflow = stops, looks_always, forgives_overflow
        self.is_due: Callable[[int], bool] = lambda batch: True
        self._flags: dict[tuple[int, int], Tensor] = {}
        self._norms: dict[int, deque[float]] = {}
        self._told: set[int] = set()
        self.skipped = 0
        """Steps that were skipped, one after the other up to now."""
        self._high: set[int] = set()
        """Stages whose norm has jumped and not come back: one word is enough."""

    def after_forward(
        self, here: Replica, module: nn.Module, key: Key, inputs: Sequence[Tensor], targets: Sequence[Tensor],
        made: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Looks at a stage's outputs, now or, on a card, when a log line is due."""
        if not self.looks_always and not self.is_due(key[0]):
            return
        # A mask may well hold -inf: what counts is what the loss depends on.
        outputs = here.runner.outputs
        looked_at = made[:1] if here.runner.has_loss else [t for t, spec in zip(made, outputs) if spec.needs_grad]
        bad = _not_finite(looked_at)
        if not self.looks_always:
            flag = self._flags.get((here.stage, key[0]))
            self._flags[here.stage, key[0]] = bad if flag is None else flag | bad
        elif bool(bad):
            if not bool(_not_finite(inputs)):
                self.report(key[0], _origin(here, module, key, inputs, targets, self.layer_of))
            elif here.stage == 0:
                self.report(key[0], f"the data of batch {key[0]}, microbatch {key[1]}, are not finite")

    def after_gradients(self, here: Replica, batch: int, gradients: Sequence[Tensor | None]) -> None:
        """Looks at a stage's reduced gradients, on the first replica only where all have the same."""
        due = self.looks_always or self.is_due(batch)
        flag = self._flags.pop((here.stage, batch), None)
        if not due or (here.replica != 0 and not here.reducer.is_sharing):
            return
        named = [(name, each) for name, each in zip(here.weights.moved_names, gradients) if each is not None]
        names = [name for name, _ in named]
        numbers = [torch.zeros(1, dtype=torch.float64, device=self.scalars.device) if flag is None else flag.reshape(1)]
        if named:
            numbers.append(torch.stack(torch._foreach_norm([each for _, each in named])))
        self.scalars.read(torch.cat(numbers), lambda found: self._judge(here, batch, names, bool(found[0]), found[1:]))

    def _judge(self, here: Replica, batch: int, names: Sequence[str], bad: bool, norms: Sequence[float]) -> None:
        """Says what is wrong with a step: whether its outputs were `bad`, and the norms of its gradients."""
        stage = here.stage
        wrong = [name for name, norm in zip(names, norms) if not math.isfinite(norm)]
        if (bad or wrong) and (self.forgives_overflow or not self.stops):
            self._refuse_lost(here, batch)
        if bad:
            self.report(batch, f"stage {stage} made numbers that are not finite in batch {batch}")
        if wrong and not self.forgives_overflow:
            self.report(
                batch, f"the gradient of layer {self.layer_of.get(wrong[-1], wrong[-1])} in stage {stage} is not "
                f"finite in batch {batch}",
            )  # fmt: skip
        elif not wrong:
            self.skipped = 0
            self._look_for_jump(stage, batch, names, norms)

    def _refuse_lost(self, here: Replica, batch: int) -> None:
        """Ends a run whose weights are not finite: no step that is skipped brings them back."""
        layer = _lost_layer(here.weights.newest(), self.layer_of)
        if layer is not None:
            raise RunError(
                f"the weights of layer {layer} in stage {here.stage} are not finite in batch {batch}, so that "
                "every step would be skipped",
                "go on from a checkpoint by --resume, with a lower learning rate or --clip-norm",
            )

    def _look_for_jump(self, stage: int, batch: int, names: Sequence[str], norms: Sequence[float]) -> None:
        """Tells of a norm that is ten times the usual one: the median of the last 64, of at least 16."""
        norm, past = math.hypot(*norms), self._norms.setdefault(stage, deque(maxlen=64))
        usual = median(past) if len(past) >= 16 else math.inf
        is_high, was_high = norm > 10.0 * usual, stage in self._high
        (self._high.add if is_high else self._high.discard)(stage)
        if is_high and not was_high:
            layer = self.layer_of.get(names[norms.index(max(norms))], "?")
            self.tell(
                f"the gradient norm of stage {stage} jumped from {usual:.3g} to {norm:.3g} in batch {batch}, "
                f"most of it in layer {layer}"
            )
        past.append(norm)

    def report(self, batch: int, what: str) -> None:
        """Ends the run, or tells once a batch where steps with such numbers are skipped."""
        if self.stops:
            raise RunError(
                what, "lower the learning rate, clip the gradients with --clip-norm, or go on with --on-nan skip"
            )
        if batch not in self._told:
            self._told, self.skipped = {batch}, self.skipped + 1
            if self.skipped == _MOST_SKIPPED:
                raise RunError(f"{what}, as in the {_MOST_SKIPPED - 1} steps before it", "lower the learning rate")
            self.tell(f"{what}; the step is skipped")


def _not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether any number in any tensor is infinite or NaN, as a tensor that nobody has waited for."""
    flags = [~torch.isfinite(each.detach()).all() for each in tensors if each.dtype.is_floating_point]
    return torch.stack(flags).any() if flags else torch.tensor(False)


def _lost_layer(module: nn.Module, layer_of: Mapping[str, str]) -> str | None:
    """The first layer whose weights are not finite."""
    lost = (name for name, parameter in module.named_parameters() if bool(_not_finite([parameter])))
    return next((layer_of.get(name, name) for name in lost), None)


@torch.no_grad()
def _origin(
    here: Replica, module: nn.Module, key: Key, inputs: Sequence[Tensor], targets: Sequence[Tensor],
    layer_of: Mapping[str, str],
) -> str:  # fmt: skip
    """Where a stage's numbers stopped being finite: a weight, or the first layer that made one of finite ones."""
    place = f"stage {here.stage} in batch {key[0]}, microbatch {key[1]}"
    lost = _lost_layer(module, layer_of)
    if lost is not None:
        return f"the weights of layer {lost} are not finite: {place}"
    layer = _first_bad_module(module, inputs, targets, layer_of)
    what = f"layer {layer} made numbers that are not finite" if layer else "the loss is not finite"
    return f"{what}: {place}"


def _first_bad_module(
    module: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], layer_of: Mapping[str, str]
) -> str | None:
    """The layer of the first module inside whose output is not finite, running the stage once more."""
    found: list[str] = []

    def look(name: str, _: nn.Module, __: object, made: object) -> None:
        if not found and bool(_not_finite([each for each in tree_leaves(made) if isinstance(each, Tensor)])):
            found.append(name)

    leaves = [(name, each) for name, each in module.named_modules() if name and not list(each.children())]
    hooks = [each.register_forward_hook(partial(look, name)) for name, each in leaves]
    functional_call(module, {name: buffer.clone() for name, buffer in module.named_buffers()}, (*inputs, *targets))
    for hook in hooks:
        hook.remove()
    if not found:
        return None
    # The layer that the module belongs to, by the parameters under it; else the module's own name.
    return next((layer for name, layer in layer_of.items() if name.startswith(f"{found[0]}.")), found[0])
