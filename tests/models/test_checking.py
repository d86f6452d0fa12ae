"""A model that its layers would change is refused before anything runs, and what they cannot show is warned of."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.modules import MODELS, Hooked, Quiet
from torch import Tensor, nn

from stagewright.errors import ModelError
from stagewright.models import checking, cross_entropy_sum, make_layered, mean_loss


class Head(nn.Module):
    """Two layers, and something in between that the subclasses say."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(torch.tanh(self.a(x))))


class Drawn(Head):
    def between(self, x: Tensor) -> Tensor:
        return x * random.random()


class Counted(Head):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Warming(Counted):
    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Centred(Head):
    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class AlikeThenCentred(Head):
    """All rows are alike on the sample, so that their mean is each row's own value."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = nn.Hardtanh()

    def between(self, x: Tensor) -> Tensor:
        x = self.clip(x.abs() + 5)
        return x - x.mean(0)


class CentredInTraining(Head):
    """Cannot be evaluated in stages, since it branches on its mode."""

    def between(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x - x.mean(0), 0.2) if self.training else x


class Listening(Head):
    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        return x


SAMPLE = (torch.randn(2, 4),)


def summed(outputs: Tensor) -> Tensor:
    return outputs.square().sum()


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Warming, "called again with the same inputs and seed, the model gives another (loss|output)"),
        (Drawn, "it gives another (loss|output 0|draw from Python's random)"),
    ],
)
def test_what_changes_from_call_to_call_is_refused(build: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        make_layered(build(), SAMPLE, loss=summed)


def test_a_hook_on_a_tensor_inside_is_refused_by_the_gradient_it_changes() -> None:
    with pytest.raises(
        ModelError, match=r"Listening cannot be cut: as a graph, it gives another gradient of 'a\.weight'"
    ):
        make_layered(Listening(), SAMPLE, loss=summed)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Counted, r"forward changes 'calls' from \d+ to \d+"),
        (Centred, "layer 'a' mixes the rows of a microbatch"),
        (AlikeThenCentred, "layer '(a|clip)' mixes the rows of a microbatch"),
        (CentredInTraining, "layer 'a' mixes the rows of a microbatch"),
    ],
)
def test_what_depends_on_calls_or_on_other_rows_is_told(build: Callable[[], nn.Module], said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        make_layered(build(), SAMPLE, loss=summed)


def test_a_hook_that_is_not_linear_is_told() -> None:
    model = Head()
    model.a.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    with pytest.warns(UserWarning, match=r"the hook on 'a\.weight' is not linear"):
        make_layered(model, SAMPLE, loss=summed)


def test_batch_norm_and_dropout_are_no_reason_to_warn() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_layered(model, SAMPLE, loss=summed)


def test_the_callers_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)).eval()
    model[0].weight.grad = torch.ones(4, 4)
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    make_layered(model, SAMPLE, loss=summed)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert model[3].weight.grad is None


@pytest.mark.parametrize("name", ["no_grad", "no_grad, exported", "own functions, exported", "hooked", "partly"])
def test_large_models_are_compared_on_shapes_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed: a model whose weights have no values passes, and what a trace would lose is seen."""
    monkeypatch.setattr(checking, "LARGEST_BYTES", 0)
    run: list[Any] = []
    monkeypatch.setattr(checking, "compared", lambda *args, **kwargs: run.append(args))
    layered = MODELS[name].layered()
    assert layered.evaluates
    assert not run


def test_on_shapes_a_lost_context_shows_by_the_gradients_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "LARGEST_BYTES", 0)
    monkeypatch.setattr("stagewright.models.tracing.mode_now", lambda before: None)
    monkeypatch.setattr("stagewright.models.making.trace_exported", lambda model, sample: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # the first way was found wanting
        make_layered(Quiet(torch.no_grad, False).double(), (torch.randn(2, 6).double(),), loss=summed)


def test_a_lost_context_is_found_by_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.models.tracing.mode_now", lambda before: None)
    monkeypatch.setattr("stagewright.models.making.trace_exported", lambda model, sample: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_layered(Quiet(torch.no_grad, False), (torch.randn(2, 6),), loss=summed)


def test_a_container_with_a_hook_stays_whole() -> None:
    torch.manual_seed(0)
    assert make_layered(Hooked(), (torch.randn(2, 6),), loss=summed).names[:3] == ("first", "heard", "tail.0.0")


def test_autocast_inside_a_model_is_kept() -> None:
    class Careful(Head):
        def between(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return (x.float() @ torch.ones(4, 4)).sin()

    layered = make_layered(Careful(), SAMPLE, loss=summed)
    rows = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, cut = layered.model(rows), layered.stage(0, layered.num_layers)(rows)[1]
    assert torch.equal(whole, cut)


def test_losses_are_sums_and_say_so() -> None:
    labels = torch.tensor([0, 1])
    with pytest.raises(
        ModelError, match=r"the loss is a mean over its rows, not their sum\nwrap it: loss=sw\.mean_loss"
    ):
        make_layered(Head(), SAMPLE, loss=nn.functional.cross_entropy, targets=(labels,))
    make_layered(Head(), SAMPLE, loss=mean_loss(nn.functional.cross_entropy), targets=(labels,))
    make_layered(Head(), SAMPLE, loss=cross_entropy_sum(), targets=(labels,))


def test_a_loss_that_compares_rows_is_told() -> None:
    def contrast(outputs: Tensor) -> Tensor:
        return torch.logsumexp(outputs @ outputs.t(), dim=1).sum()

    with pytest.warns(UserWarning, match="the loss of some rows together is not the sum of theirs"):
        make_layered(Head(), SAMPLE, loss=contrast)
