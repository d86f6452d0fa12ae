"""Runs a model whole and cut, and compares everything that comes out.

the model      inputs ─▶ model ─▶ loss ─▶ gradients of parameters and inputs, those that are None included
its layers     inputs ─▶ stage │ stage │ … │ loss ─▶ the same, cut at every place it offers
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stagewright.models.layered import Layered
from stagewright.models.loss import LossModule
from stagewright.models.tracing import Sample, undisturbed
from stagewright.models.values import FEW, MANY

SEED = 7


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Everything that one forward and backward leaves behind, by name."""

    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]


def varied(sample: Sample) -> Sample:
    """`MANY` rows of the sample with noise on them: a sample is often zeros, on which everything looks alike."""
    generator = torch.Generator().manual_seed(SEED)

    def noisy(each: Tensor) -> Tensor:
        if not each.is_floating_point():
            return each
        noise = torch.randn(each.shape, generator=generator).to(each)
        spread = each.double().std() if each.numel() > 1 else torch.tensor(0.0)
        return each + noise * (float(spread) or 1.0)

    many = sample.with_rows(MANY)
    args, kwargs = pytree.tree_map_only(Tensor, noisy, (many.args, dict(many.kwargs)))
    return replace(many, args=args, kwargs=kwargs)


def compared(layered: Layered, rows: Sample, *, training: bool) -> str | None:
    """The first difference between a model and its layers, in one mode, on each number of rows."""
    cut, uncut = partial(_run_cut, layered.cuts()), partial(_run_cut, ())
    for number in (FEW, MANY):
        part = rows.with_rows(number)
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


_Runner = Callable[[Layered, Sample], tuple[Tensor, Sequence[Tensor]]]


def outcome(layered: Layered, rows: Sample, run: _Runner, *, training: bool, to_inputs: bool = True) -> _Outcome:
    """What a way to run a model leaves behind; the model itself stays as it was."""
    model = layered.model
    with undisturbed(model), torch.enable_grad():
        model.train(training)
        leaves = rows.map(lambda each: each.detach().clone().requires_grad_(to_inputs and each.is_floating_point()))
        sample = replace(leaves, targets=rows.targets)
        parameters = dict(model.named_parameters())
        kept = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(SEED)
        try:
            summed, outputs = run(layered, sample)
            # A graph that draws fewer numbers has lost some.
            drawn = {
                "draw from torch's generator": torch.get_rng_state().tolist(),
                "draw from Python's random": random.getstate(),
                "draw from numpy's random": [str(part) for part in np.random.get_state()],
            }
            gradients = {f"gradient of '{name}'": each.grad for name, each in parameters.items()}
        finally:
            for name, parameter in parameters.items():
                parameter.grad = kept[name]
        inputs = {f"gradient of input {n}": t.grad for n, t in enumerate(sample.tensors) if t.requires_grad}
        buffers = {f"buffer '{name}'": buffer.clone() for name, buffer in model.named_buffers()}
    made = {"loss": summed, **{f"output {number}": each for number, each in enumerate(outputs)}}
    states = {name: torch.tensor(hash(str(state))) for name, state in drawn.items()}
    return _Outcome(values={**made, **buffers, **states}, gradients={**gradients, **inputs})


def run_whole(layered: Layered, sample: Sample) -> tuple[Tensor, Sequence[Tensor]]:
    """The loss and the outputs of the model itself, and its gradients."""
    outputs = sample.call(layered.model)
    summed = total(layered, outputs, sample.targets)
    if summed.requires_grad:
        summed.backward()  # type: ignore[no-untyped-call]
    return summed.detach(), [each.detach() for each in outputs]


def total(layered: Layered, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """The loss; where there is none, the outputs with weights, so that no two entries count the same."""
    if layered.loss is not None:
        return LossModule(layered.loss)(outputs, tuple(targets))  # type: ignore[no-any-return]
    floating = [each for each in outputs if each.is_floating_point()]
    weights = [torch.arange(1.0, each.numel() + 1, device=each.device).double().sin() for each in floating]
    return torch.stack([(each.double() * some.view(each.shape)).sum() for each, some in zip(floating, weights)]).sum()


def _run_cut(cuts: Sequence[int], layered: Layered, sample: Sample) -> tuple[Tensor, Sequence[Tensor]]:
    """One microbatch through all stages and back; between stages only plain tensors, as between workers."""
    values = sample.tensors
    held: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for first, last in pairwise((0, *cuts, layered.num_layers)):
        stage = layered.stage(first, last).train(layered.model.training)
        received = values
        if held:
            specs = zip(values, stage.inputs)
            received = tuple(each.detach().clone().requires_grad_(spec.needs_grad) for each, spec in specs)
        values = stage(*received, *sample.targets) if stage.has_loss else stage(*received)
        held.append((received, values))
    outputs = values[1:] if layered.has_loss else values
    summed = values[0] if layered.has_loss else total(layered, outputs, sample.targets)
    ends: list[Tensor] = [summed]
    gradients: list[Tensor | None] = [torch.ones_like(summed)]
    for received, made in reversed(held):
        ends = ends or list(made)
        pairs = [(end, each) for end, each in zip(ends, gradients) if each is not None and end.requires_grad]
        if pairs:
            torch.autograd.backward([end for end, _ in pairs], [each for _, each in pairs])
        gradients, ends = [each.grad for each in received], []
    return summed.detach(), [each.detach() for each in outputs]


def _difference(expected: _Outcome, found: _Outcome) -> str | None:
    """The name of the first value or gradient that differs, and how."""
    for name, value in expected.values.items():
        if not same(value, found.values.get(name), 1.0):
            return name
    sizes = [_norm(each) for each in expected.gradients.values() if each is not None]
    typical = max((size for size in sizes if size == size), default=0.0)
    for name in found.gradients:
        gradient, other = expected.gradients[name], found.gradients[name]
        if (gradient is None) != (other is None):
            has, lacks = ("None", "one") if other is None else ("one", "None")
            return f"{name}: {has} where the model has {lacks}"
        if gradient is not None and other is not None and not same(gradient, other, typical):
            return f"{name}: {_norm(other):.4g} instead of {_norm(gradient):.4g} (norms)"
    return None


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())


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
