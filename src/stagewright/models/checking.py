"""Compares a model with its cut self before anything is trained: outputs, buffers, and the gradient of everything.

Both run in training and in evaluation, on two numbers of rows. A model that is too large to run here is compared on
shapes alone: which gradients are None, and which operators evaluation runs. What no gradient shows is warned of:
losses that are no sums, rows that see one another, state that stages do not keep.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import isclose, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.errors import ModelError
from stagewright.models.comparing import SEED, compared, outcome, run_whole, same, total, varied
from stagewright.models.counts import forward_flops
from stagewright.models.layered import Layered
from stagewright.models.loss import LossModule
from stagewright.models.running import row_keys, rows_drawn
from stagewright.models.tracing import Sample, undisturbed
from stagewright.models.values import FEW, MANY, shapes_only

_LARGEST_FLOPS, LARGEST_BYTES = 5e8, 1 << 30
"""Operations a row and bytes of weights above which a model is compared on shapes alone: every worker does it."""


def checked(layered: Layered, sample: Sample) -> tuple[str | None, bool]:
    """What is wrong with a model's layers, if anything, and whether they evaluate as the model does."""
    model = layered.model
    is_large = layered.traced.device.type == "meta" or sum(each.nbytes for each in model.parameters()) > LARGEST_BYTES
    if is_large or sum(forward_flops(layered)) > _LARGEST_FLOPS:
        return _compared_on_shapes(layered, sample)
    before, rows = _attributes(model), varied(sample)
    fault = compared(layered, rows, training=True)
    if fault is not None:
        return fault, False
    _check_loss(layered, rows)
    evaluates = compared(layered, rows, training=False) is None
    if evaluates or not any(isinstance(module, _NormBase) for module in model.modules()):
        _warn_of_mixed_rows(layered, rows, training=not evaluates)
    _warn_of_attributes(model, before)
    _warn_of_buffers(layered, rows)
    _warn_of_hooks(model)
    return None, evaluates


# On shapes alone


def _compared_on_shapes(layered: Layered, sample: Sample) -> tuple[str | None, bool]:
    """The same for a model that is too large to run here: which gradients are None, and which operators it runs."""
    model = layered.model
    with undisturbed(model):
        model.train()
        with shapes_only(layered.traced.device):
            shapes = sample.map(torch.empty_like)
            parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
            made = total(layered, shapes.call(model), shapes.targets)
            found = torch.autograd.grad(made, list(parameters.values()), allow_unused=True)
        unreached = {name for name, gradient in zip(parameters, found) if gradient is None}
    for name in sorted(unreached ^ (layered.unreached & parameters.keys())):
        return f"cut into layers, the gradient of '{name}' is {'not ' * (name in unreached)}None", False

    def whole() -> None:
        outputs = shapes.call(model)
        if layered.loss is not None:
            LossModule(layered.loss)(outputs, shapes.targets)

    def graph() -> None:
        layered.traced.module(in_modes=True).eval()(*shapes.tensors, *shapes.targets)

    return None, _operators(layered, whole) == _operators(layered, graph)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run, without those that only look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _operators(layered: Layered, run: Callable[[], None]) -> Counter[str]:
    """The operators of an evaluation."""
    with undisturbed(layered.model), shapes_only(layered.traced.device), torch.no_grad(), (seen := _Operators()):
        layered.model.eval()
        run()
    return seen.counts


# What no gradient shows


def _check_loss(layered: Layered, rows: Sample) -> None:
    """Refuses a loss that is the mean over its rows: only sums add up over microbatches of any sizes."""
    if layered.loss is None:
        return
    with undisturbed(layered.model), torch.no_grad():
        layered.model.eval()
        outputs = rows.call(layered.model)
        if any(each.dim() == 0 or each.size(0) != MANY for each in outputs):
            return
        whole, first, rest = (
            float(total(layered, [each[part] for each in outputs], [each[part] for each in rows.targets]))
            for part in (slice(None), slice(1), slice(1, None))
        )
    if isclose(whole, first + rest, rel_tol=1e-3, abs_tol=1e-6) or not isfinite(whole):
        return
    if isclose(whole, (first + (MANY - 1) * rest) / MANY, rel_tol=1e-3, abs_tol=1e-6):
        raise ModelError("the loss is a mean over its rows, not their sum", "wrap it: loss=sw.mean_loss(…)")
    _warn("the loss of some rows together is not the sum of theirs: it depends on how a batch is divided")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)


def _warn_of_attributes(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Warns of attributes that the model's forward changes: a stage does not run the model's own code."""
    for place, value in _attributes(model).items():
        if place in before and value != before[place]:
            _warn(
                f"forward changes '{place}' from {before[place]!r} to {value!r}, which stages do not do: "
                "keep such state outside of the model, or in a module without children"
            )


def _attributes(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
        and name != "training"
        and next(module.children(), None) is not None
    }


def _warn_of_buffers(layered: Layered, rows: Sample) -> None:
    """Warns of buffers that forward changes, other than running statistics: how often depends on the plan."""
    before = {name: buffer.clone() for name, buffer in layered.model.named_buffers()}
    after = outcome(layered, rows, run_whole, training=True).values
    for path, module in layered.model.named_modules():
        names = [f"{path}.{name}".lstrip(".") for name, _ in module.named_buffers(recurse=False)]
        changed = [name for name in names if not torch.equal(before[name], after[f"buffer '{name}'"])]
        if changed and not isinstance(module, _NormBase):
            _warn(
                f"forward changes the buffer '{changed[0]}': it does so for the rows of each microbatch, on each "
                "replica for itself, as batch norm does with its statistics"
            )


def _warn_of_hooks(model: nn.Module) -> None:
    """Warns of a parameter's hook that does something else to a sum of gradients than to its parts."""
    for name, parameter in model.named_parameters():
        if not parameter._backward_hooks:
            continue
        generator = torch.Generator().manual_seed(SEED)
        one, other = (torch.randn(parameter.shape, generator=generator).to(parameter) for _ in range(2))
        hooks = list(parameter._backward_hooks.values())
        if not same(_hooked(hooks, one + other), _hooked(hooks, one) + _hooked(hooks, other), 1.0):
            _warn(
                f"the hook on '{name}' is not linear: it sees the gradient of each microbatch on each replica, and "
                "what it makes of these does not add up to what it makes of the batch's"
            )


def _hooked(hooks: Sequence[Callable[[Tensor], Tensor | None]], gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    for hook in hooks:
        made = hook(gradient)
        gradient = gradient if made is None else made
    return gradient


def _warn_of_mixed_rows(layered: Layered, rows: Sample, *, training: bool) -> None:
    """Warns of a layer whose rows depend on one another: what it computes depends on how a batch is divided."""
    few, many = (_by_layer(layered, rows.with_rows(number), training=training) for number in (FEW, MANY))
    again = _by_layer(layered, rows.with_rows(FEW), training=training, seed=SEED + 1)
    if any(not same(a, b, 1.0) for one, other in zip(few, again) for a, b in zip(one, other)):
        return  # it draws numbers that are no dropout
    for name, one, other in zip(layered.names, few, many):
        if any(a.size(0) == FEW and not same(a, b[:FEW], 1.0) for a, b in zip(one, other) if a.dim()):
            _warn(
                f"layer '{name}' mixes the rows of a microbatch: what it computes depends on how a batch is divided "
                "into microbatches and replicas, as the statistics of batch norm do (rows are the first dimension)"
            )
            return


def _by_layer(layered: Layered, rows: Sample, *, training: bool, seed: int = SEED) -> list[tuple[Tensor, ...]]:
    """What leaves each layer that a cut follows; what is dropped goes by rows."""
    values, made = rows.tensors, []
    keys = row_keys(SEED, 0, 0, len(values[0]), values[0].device)
    with undisturbed(layered.model), torch.no_grad(), rows_drawn(keys), _rows_unlike(layered.model):
        torch.manual_seed(seed)
        for ends in pairwise((0, *layered.cuts(), layered.num_layers)):
            stage = layered.stage(*ends).train(training)
            values = stage(*values, *rows.targets)[1:] if stage.has_loss else stage(*values)
            made += [values] * (ends[1] - ends[0])
            values = tuple(map(_unlike, values))
    return made


@contextmanager
def _rows_unlike(model: nn.Module) -> Iterator[None]:
    """Noise on what every module returns: a norm of two values, or a rounding, can make all rows alike."""
    hooks = [each.register_forward_hook(lambda _, __, made: pytree.tree_map(_unlike, made)) for each in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _unlike(value: Any) -> Any:
    """A tensor with noise on its rows, the same on a row whatever rows come after it."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() == 0 or value.size(0) > MANY:
        return value
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn((MANY, *value.shape[1:]), generator=generator)[: value.size(0)]
    return value + 0.1 * noise.to(value)
