"""Runs a model whole, and cut into stages as a worker would, and compares every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.models import Layered, StageModule


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Outcome:
    """Everything a forward and backward pass leaves behind."""

    loss: Tensor
    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def differences(self, other: Outcome) -> list[str]:
        """The names of all values that are not the same bit for bit."""
        pairs = {"loss": (self.loss, other.loss)}
        pairs |= {f"output {i}": pair for i, pair in enumerate(zip(self.outputs, other.outputs, strict=True))}
        for mine, theirs in ((self.gradients, other.gradients), (self.buffers, other.buffers)):
            pairs |= {name: (mine[name], theirs.get(name, torch.empty(0))) for name in mine}
            pairs |= {name: (torch.empty(1), theirs[name]) for name in theirs if name not in mine}
        return [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


@pytest.fixture
def run_whole() -> Callable[..., Outcome]:
    def run(layered: Layered, call: Callable[[nn.Module], Sequence[Tensor]], loss: Any, targets: Any) -> Outcome:
        model = layered.model
        with _kept_buffers(model):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(7)
            outputs = tuple(call(model))
            total = loss(*outputs, *targets)
            total.backward()
            return _outcome(model, total, outputs)

    return run


@pytest.fixture
def run_cut() -> Callable[..., Outcome]:
    def run(layered: Layered, cuts: Sequence[int], inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Outcome:
        model = layered.model
        stages = [layered.stage(a, b) for a, b in pairwise((0, *cuts, layered.num_layers))]
        with _kept_buffers(model):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(7)
            loss, outputs = _pipeline(stages, inputs, targets)
            return _outcome(model, loss, outputs)

    return run


def _pipeline(
    stages: Sequence[StageModule], inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One microbatch through all stages and back; between stages only plain tensors."""
    held, values = [], tuple(inputs)
    for stage in stages:
        received = tuple(map(_receive, values, stage.inputs))
        values = stage(*received, *targets) if stage.has_loss else stage(*received)
        held.append((stage, received, values))
    loss, *outputs = values
    gradients: list[Tensor | None] = [torch.ones_like(loss), *[None] * len(outputs)]
    for _, received, made in reversed(held):
        wanted = [(m, g) for m, g in zip(made, gradients, strict=True) if g is not None]
        torch.autograd.backward([m for m, _ in wanted], [g for _, g in wanted])
        gradients = [tensor.grad for tensor in received]
    return loss, tuple(outputs)


def _receive(tensor: Tensor, spec: Any) -> Tensor:
    """A tensor as it comes out of a receive buffer, after checking it against what was settled before."""
    assert tuple(tensor.shape[1:]) == spec.shape_per_row, spec
    assert tensor.dtype == spec.dtype, spec
    assert tensor.requires_grad or not spec.needs_grad, spec
    buffer = torch.empty(tensor.shape, dtype=spec.dtype).copy_(tensor.detach())
    return buffer.requires_grad_(spec.needs_grad)


class _kept_buffers:  # noqa: N801
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.before = copy.deepcopy(dict(self.model.named_buffers()))

    def __exit__(self, *_: object) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.data.copy_(self.before[name])


def _outcome(model: nn.Module, loss: Tensor, outputs: Sequence[Tensor]) -> Outcome:
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Outcome(loss.detach(), tuple(o.detach() for o in outputs), gradients, buffers)
