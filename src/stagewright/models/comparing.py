"""Runs a model whole and cut, and compares everything that comes out.

the model      inputs ─▶ model ─▶ loss ─▶ gradients of parameters and inputs, those that are None included
its layers     inputs ─▶ stage │ stage │ … │ loss ─▶ the same, cut at every place it offers
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stagewright.models.layered import Layered
from stagewright.models.loss import LossModule
from stagewright.models.tracing import Sample, tensors_in, undisturbed

FEW, MANY = 2, 3
SEED = 7


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Everything that one forward and backward leaves behind, by name."""

    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Rows:
    """Inputs and targets of `MANY` rows; fewer are the first of them."""

    sample: Sample
    targets: tuple[Tensor, ...]

    def first(self, rows: int) -> Rows:
        return Rows(self.sample.with_rows(rows), tuple(each[:rows] for each in self.targets))


def varied(sample: Sample, targets: Sequence[Tensor]) -> Rows:
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
    return Rows(Sample(args=args, kwargs=kwargs), repeated)


def compared(layered: Layered, rows: Rows, *, training: bool) -> str | None:
    """The first difference between a model and its layers, in one mode, on each number of rows."""
    cut, uncut = partial(_run_cut, layered.cuts()), partial(_run_cut, ())
    for number in (FEW, MANY):
        part = rows.first(number)
        whole = outcome(layered, part, run_whole, training=training)
        if number == FEW and training:
            again = outcome(layered, part, run_whole, training=training)
            if difference := _difference(whole, again):
                return f"called again with the same inputs and seed, the model gives another {difference}"
        # No gradient comes back to the inputs of a model that is cut: they are looked at in one piece.
        if difference := _difference(whole, outcome(layered, part, uncut, training=training)):
            return f"as a graph, it gives another {difference}"
        if difference := _difference(whole, outcome(layered, part, cut, training=training, to_inputs=False)):
            return f"cut into layers, it gives another {difference}"
    return None


_Runner = Callable[[Layered, Sample, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


def outcome(layered: Layered, rows: Rows, run: _Runner, *, training: bool, to_inputs: bool = True) -> _Outcome:
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
            summed, outputs = run(layered, sample, rows.targets)
            drawn = {name: _as_tensor(state) for name, state in _generators().items()}
            gradients = {f"gradient of '{name}'": each.grad for name, each in parameters.items()}
        finally:
            for name, parameter in parameters.items():
                parameter.grad = kept[name]
        inputs = {f"gradient of input {n}": t.grad for n, t in enumerate(sample.tensors) if t.requires_grad}
        buffers = {f"buffer '{name}'": buffer.clone() for name, buffer in model.named_buffers()}
    made = {"loss": summed, **{f"output {number}": each for number, each in enumerate(outputs)}}
    return _Outcome(values={**made, **buffers, **drawn}, gradients={**gradients, **inputs})


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


def run_whole(layered: Layered, sample: Sample, targets: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    outputs = tensors_in(layered.model(*sample.args, **sample.kwargs))
    summed = total(layered, outputs, targets)
    if summed.requires_grad:
        summed.backward()  # type: ignore[no-untyped-call]
    return summed.detach(), [each.detach() for each in outputs]


def total(layered: Layered, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
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
    summed = values[0] if layered.has_loss else total(layered, outputs, targets)
    ends: list[Tensor] = [summed]
    gradients: list[Tensor | None] = [torch.ones_like(summed)]
    for received, made in reversed(held):
        ends = ends if ends else list(made)
        pairs = [(end, each) for end, each in zip(ends, gradients) if each is not None and end.requires_grad]
        if pairs:
            torch.autograd.backward([end for end, _ in pairs], [each for _, each in pairs])
        gradients, ends = [each.grad for each in received], []
    return summed.detach(), [each.detach() for each in outputs]


def _received(tensor: Tensor, spec: Any) -> Tensor:
    return tensor.detach().clone().requires_grad_(spec.needs_grad)


def _difference(expected: _Outcome, found: _Outcome) -> str | None:
    """The name of the first value or gradient that differs, and how."""
    for name, value in expected.values.items():
        if not same(value, found.values.get(name), 1.0):
            return name
    sizes = [float(each.detach().double().norm()) for each in expected.gradients.values() if each is not None]
    typical = max((size for size in sizes if size == size), default=0.0)
    for name in found.gradients:
        gradient, other = expected.gradients[name], found.gradients[name]
        if (gradient is None) != (other is None):
            return (
                f"{name}: {'None' if other is None else 'one'} where the model has {'one' if other is None else 'None'}"
            )
        if gradient is not None and not same(gradient, other, typical):
            return f"{name}: {_norm(other):.4g} instead of {_norm(gradient):.4g} (norms)"
    return None


def _norm(tensor: Tensor | None) -> float:
    return float(tensor.double().norm()) if tensor is not None else float("nan")


def same(expected: Tensor, found: Tensor | None, scale: float) -> bool:
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
