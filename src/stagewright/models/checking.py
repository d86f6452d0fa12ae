"""Compares a model with its cut self before anything is trained: outputs, buffers, and the gradient of everything.

    the model      inputs ─▶ model ─▶ loss ─▶ gradients of parameters and inputs, those that are None included
    its layers     inputs ─▶ stage │ stage │ … │ loss ─▶ the same, cut at every place it offers

Both run in training and in evaluation, on two numbers of rows. A model that is too large to run here is compared on
shapes alone: which gradients are None, and which operators evaluation runs.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isclose, isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.errors import ModelError
from stagewright.models.counts import forward_flops
from stagewright.models.drawing import row_keys, rows_drawn
from stagewright.models.layered import Layered
from stagewright.models.loss import LossModule
from stagewright.models.tracing import Sample, tensors_in, undisturbed
from stagewright.models.values import shapes_only

FEW, MANY = 2, 3
LARGEST_FLOPS, LARGEST_BYTES = 5e8, 1 << 30
"""Operations a row and bytes of weights above which a model is compared on shapes alone: every worker does it."""

SEED = 7


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that one forward and backward leaves behind, by name."""

    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]


def checked(layered: Layered, sample: Sample, targets: Sequence[Tensor]) -> tuple[str | None, bool]:
    """What is wrong with a model's layers, if anything, and whether they evaluate as the model does."""
    if _is_large(layered):
        return _compared_on_shapes(layered, sample, targets)
    before, rows = _attributes(layered.model), _varied(sample, targets)
    fault = _compared(layered, rows, training=True)
    if fault is not None:
        return fault, False
    _check_loss(layered, rows)
    evaluates = _compared(layered, rows, training=False) is None
    has_statistics = any(isinstance(module, _NormBase) for module in layered.model.modules())
    if evaluates or not has_statistics:
        _warn_of_mixed_rows(layered, rows, training=not evaluates)
    _warn_of_attributes(layered.model, before)
    _warn_of_buffers(layered, rows)
    _warn_of_hooks(layered.model)
    return None, evaluates


def _is_large(layered: Layered) -> bool:
    num_bytes = sum(parameter.nbytes for parameter in layered.model.parameters())
    if layered.traced.device.type == "meta" or num_bytes > LARGEST_BYTES:
        return True
    return sum(forward_flops(layered)) > LARGEST_FLOPS


# Rows that differ from one another


@dataclass(frozen=True)
class _Rows:
    """Inputs and targets of `MANY` rows; fewer are the first of them."""

    sample: Sample
    targets: tuple[Tensor, ...]

    def first(self, rows: int) -> _Rows:
        return _Rows(self.sample.with_rows(rows), tuple(each[:rows] for each in self.targets))


def _varied(sample: Sample, targets: Sequence[Tensor]) -> _Rows:
    """The sample's rows with noise on them: a sample is often zeros, on which everything looks alike."""
    generator = torch.Generator().manual_seed(SEED)

    def varied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        noise = torch.randn(leaf.shape, generator=generator).to(leaf)
        spread = leaf.double().std() if leaf.numel() > 1 else torch.tensor(0.0)
        return leaf + noise * (float(spread) or 1.0)

    many = sample.with_rows(MANY)
    args, kwargs = pytree.tree_map(varied, (many.args, dict(many.kwargs)))
    repeated = Sample(args=tuple(targets), kwargs={}).with_rows(MANY).tensors if targets else ()
    return _Rows(Sample(args=args, kwargs=kwargs), repeated)


# Whole and cut


def _compared(layered: Layered, rows: _Rows, *, training: bool) -> str | None:
    """The first difference between a model and its layers, in one mode, on each number of rows."""
    cut, uncut = partial(_run_cut, layered.cuts()), partial(_run_cut, ())
    for number in (FEW, MANY):
        part = rows.first(number)
        whole = _outcome(layered, part, _run_whole, training=training)
        if number == FEW and training:
            again = _outcome(layered, part, _run_whole, training=training)
            if difference := _difference(whole, again):
                return f"called again with the same inputs and seed, the model gives another {difference}"
        # No gradient comes back to the inputs of a model that is cut: they are looked at in one piece.
        if difference := _difference(whole, _outcome(layered, part, uncut, training=training)):
            return f"as a graph, it gives another {difference}"
        if difference := _difference(whole, _outcome(layered, part, cut, training=training, to_inputs=False)):
            return f"cut into layers, it gives another {difference}"
    return None


Runner = Callable[[Layered, Sample, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


def _outcome(layered: Layered, rows: _Rows, run: Runner, *, training: bool, to_inputs: bool = True) -> Outcome:
    model = layered.model
    with undisturbed(model), torch.enable_grad():
        model.train(training)
        given = (rows.sample.args, dict(rows.sample.kwargs))
        leaves = pytree.tree_map(partial(_as_leaf, to_inputs), given)
        sample = Sample(args=leaves[0], kwargs=leaves[1])
        parameters = dict(model.named_parameters())
        kept = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        try:
            total, outputs = run(layered, sample, rows.targets)
            drawn = {name: _as_tensor(state) for name, state in _generators().items()}
            gradients = {f"gradient of '{name}'": each.grad for name, each in parameters.items()}
        finally:
            for name, parameter in parameters.items():
                parameter.grad = kept[name]
        inputs = {f"gradient of input {n}": t.grad for n, t in enumerate(sample.tensors) if t.requires_grad}
        buffers = {f"buffer '{name}'": buffer.clone() for name, buffer in model.named_buffers()}
    made = {"loss": total, **{f"output {number}": each for number, each in enumerate(outputs)}}
    return Outcome(values={**made, **buffers, **drawn}, gradients={**gradients, **inputs})


def _generators() -> dict[str, Any]:
    """What numbers are drawn from, as far as they have been drawn: a graph that draws fewer has lost some."""
    return {
        "draw from torch's generator": torch.get_rng_state().tolist(),
        "draw from Python's random": random.getstate(),
        "draw from numpy's random": [str(part) for part in np.random.get_state()],
    }


def _as_tensor(state: Any) -> Tensor:
    return torch.tensor(hash(str(state)))


def _as_leaf(needs_grad: bool, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(needs_grad and leaf.is_floating_point())


def _run_whole(layered: Layered, sample: Sample, targets: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    outputs = tensors_in(layered.model(*sample.args, **sample.kwargs))
    total = _total(layered, outputs, targets)
    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    return total.detach(), [each.detach() for each in outputs]


def _total(layered: Layered, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """The loss, or something that depends on every output where there is none."""
    if layered.loss is not None:
        return LossModule(layered.loss)(outputs, tuple(targets))  # type: ignore[no-any-return]
    floating = [each for each in outputs if each.is_floating_point()]
    return torch.stack([(each.double() * _weights(each)).sum() for each in floating]).sum()


def _weights(output: Tensor) -> Tensor:
    """Fixed weights, so that no two entries of an output count the same."""
    return torch.arange(1.0, output.numel() + 1, device=output.device).double().sin().view(output.shape)


def _run_cut(
    cuts: Sequence[int], layered: Layered, sample: Sample, targets: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """One microbatch through all stages and back; between stages only plain tensors, as between workers."""
    stages = [layered.stage(*ends) for ends in pairwise((0, *cuts, layered.num_layers))]
    values: tuple[Tensor, ...] = tuple(sample.tensors)
    held: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for stage in stages:
        stage.train(layered.model.training)
        received = values if not held else tuple(map(_received, values, stage.inputs))
        values = stage(*received, *targets) if stage.has_loss else stage(*received)
        held.append((received, values))
    outputs = values[1:] if layered.has_loss else values
    total = values[0] if layered.has_loss else _total(layered, outputs, targets)
    ends: list[Tensor] = [total]
    gradients: list[Tensor | None] = [torch.ones_like(total)]
    for received, made in reversed(held):
        ends = ends if ends else list(made)
        pairs = [(end, each) for end, each in zip(ends, gradients) if each is not None and end.requires_grad]
        if pairs:
            torch.autograd.backward([end for end, _ in pairs], [each for _, each in pairs])
        gradients, ends = [each.grad for each in received], []
    return total.detach(), [each.detach() for each in outputs]


def _received(tensor: Tensor, spec: Any) -> Tensor:
    return tensor.detach().clone().requires_grad_(spec.needs_grad)


def _difference(expected: Outcome, found: Outcome) -> str | None:
    """The name of the first value or gradient that differs, and how."""
    for name, value in expected.values.items():
        if not _same(value, found.values.get(name), 1.0):
            return name
    sizes = [float(each.detach().double().norm()) for each in expected.gradients.values() if each is not None]
    typical = max((size for size in sizes if size == size), default=0.0)
    for name in found.gradients:
        gradient, other = expected.gradients[name], found.gradients[name]
        if (gradient is None) != (other is None):
            return (
                f"{name}: {'None' if other is None else 'one'} where the model has {'one' if other is None else 'None'}"
            )
        if gradient is not None and not _same(gradient, other, typical):
            return f"{name}: {_norm(other):.4g} instead of {_norm(gradient):.4g} (norms)"
    return None


def _norm(tensor: Tensor | None) -> float:
    return float(tensor.double().norm()) if tensor is not None else float("nan")


def _same(expected: Tensor, found: Tensor | None, scale: float) -> bool:
    """Whether two tensors agree to rounding: half of their digits, of numbers of some scale."""
    if found is None or expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return False
    one, other = expected[finite].double(), found[finite].double()
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    return bool((one - other).norm() <= tolerance * max(float(one.norm()), 1e-3 * scale))


# What no gradient shows


def _check_loss(layered: Layered, rows: _Rows) -> None:
    """Refuses a loss that is the mean over its rows: only sums add up over microbatches of any sizes."""
    if layered.loss is None:
        return
    with undisturbed(layered.model), torch.no_grad():
        layered.model.eval()
        outputs = tensors_in(layered.model(*rows.sample.args, **rows.sample.kwargs))
        if any(each.dim() == 0 or each.size(0) != MANY for each in outputs):
            return
        whole, first, rest = (
            float(_total(layered, [each[part] for each in outputs], [each[part] for each in rows.targets]))
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
    plain = (bool, int, float, str)
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, plain) and name != "training" and next(module.children(), None) is not None
    }


def _warn_of_buffers(layered: Layered, rows: _Rows) -> None:
    """Warns of buffers that forward changes, other than running statistics: how often depends on the plan."""
    before = {name: buffer.clone() for name, buffer in layered.model.named_buffers()}
    after = _outcome(layered, rows, _run_whole, training=True).values
    for path, module in layered.model.named_modules():
        names = [f"{path}.{name}".lstrip(".") for name, _ in module.named_buffers(recurse=False)]
        changed = [name for name in names if not torch.equal(before[name], after[f"buffer '{name}'"])]
        if changed and not isinstance(module, _NormBase):
            _warn(
                f"forward changes the buffer '{changed[0]}': it does so for the rows of each microbatch, on each "
                "replica for itself, as batch norm does with its statistics"
            )


def _warn_of_mixed_rows(layered: Layered, rows: _Rows, *, training: bool) -> None:
    """Warns of a layer whose rows depend on one another: what it computes depends on how a batch is divided."""
    few, many = (_by_layer(layered, rows.first(number), training=training) for number in (FEW, MANY))
    again = _by_layer(layered, rows.first(FEW), training=training, seed=SEED + 1)
    if any(not _same(a, b, 1.0) for one, other in zip(few, again) for a, b in zip(one, other)):
        return  # it draws numbers that are no dropout
    for name, one, other in zip(layered.names, few, many):
        if any(a.size(0) == FEW and not _same(a, b[:FEW], 1.0) for a, b in zip(one, other) if a.dim()):
            _warn(
                f"layer '{name}' mixes the rows of a microbatch: what it computes depends on how a batch is divided "
                "into microbatches and replicas, as the statistics of batch norm do (rows are the first dimension)"
            )
            return


def _warn_of_hooks(model: nn.Module) -> None:
    """Warns of a parameter's hook that does something else to a sum of gradients than to its parts."""
    for name, parameter in model.named_parameters():
        if not parameter._backward_hooks:
            continue
        generator = torch.Generator().manual_seed(SEED)
        one, other = (torch.randn(parameter.shape, generator=generator).to(parameter) for _ in range(2))
        hooks = list(parameter._backward_hooks.values())
        parts, whole = _hooked(hooks, one) + _hooked(hooks, other), _hooked(hooks, one + other)
        if not _same(whole, parts, 1.0):
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


def _by_layer(layered: Layered, rows: _Rows, *, training: bool, seed: int = SEED) -> list[tuple[Tensor, ...]]:
    """What leaves each layer that a cut follows; what is dropped goes by rows."""
    values, made = tuple(rows.sample.tensors), []
    keys = row_keys(SEED, 0, 0, len(values[0]), values[0].device)
    with undisturbed(layered.model), torch.no_grad(), rows_drawn(keys):
        torch.manual_seed(seed)
        for ends in pairwise((0, *layered.cuts(), layered.num_layers)):
            stage = layered.stage(*ends).train(training)
            values = stage(*values, *rows.targets)[1:] if stage.has_loss else stage(*values)
            made += [values] * (ends[1] - ends[0])
    return made


# On shapes alone


def _compared_on_shapes(layered: Layered, sample: Sample, targets: Sequence[Tensor]) -> tuple[str | None, bool]:
    """The same for a model that is too large to run here: which gradients are None, and which operators it runs."""
    model = layered.model
    with undisturbed(model):
        model.train()
        with shapes_only(layered.traced.device):
            given, labels = _on_shapes(sample), [torch.empty_like(each) for each in targets]
            parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
            total = _total(layered, tensors_in(model(*given.args, **given.kwargs)), labels)
            found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        unreached = {name for name, gradient in zip(parameters, found) if gradient is None}
    for name in sorted(unreached ^ (layered.unreached & parameters.keys())):
        return f"cut into layers, the gradient of '{name}' is {'not ' * (name in unreached)}None", False
    own, graphs = (_operators(layered, given, labels, whole=whole) for whole in (True, False))
    return None, own == graphs


def _on_shapes(sample: Sample) -> Sample:
    leaves = pytree.tree_map(
        lambda leaf: torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf, (sample.args, dict(sample.kwargs))
    )
    return Sample(args=leaves[0], kwargs=leaves[1])


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _operators(layered: Layered, sample: Sample, targets: Sequence[Tensor], *, whole: bool) -> Counter[str]:
    """The operators of an evaluation, by the model itself or by its layers."""
    with undisturbed(layered.model), shapes_only(layered.traced.device), torch.no_grad(), (seen := _Operators()):
        layered.model.eval()
        if not whole:
            layered.traced.runnable().eval()(*sample.tensors, *targets)
        else:
            outputs = tensors_in(layered.model(*sample.args, **sample.kwargs))
            if layered.loss is not None:
                LossModule(layered.loss)(outputs, tuple(targets))
    return seen.counts
