"""Linear layers that make the weight gradients of several microbatches at once: the sums of plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from stagewright.runtime.deferred import DeferredGradients, _can_defer

ROWS = (3, 4, 1, 4)
"""Of four microbatches."""


class Twice(nn.Module):
    """One layer that is used twice, and a weight that an embedding shares."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 24)
        self.middle = nn.Linear(24, 24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, rows: Tensor) -> Tensor:
        chosen: Tensor = self.words(rows.abs().mul(7).long() % 40)
        return self.head(self.middle(torch.tanh(self.middle(chosen))))


class Siamese(nn.Module):
    """Two layers of one weight, and one layer that both halves of a row go through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight

    def forward(self, rows: Tensor) -> Tensor:
        left, right = (torch.tanh(self.encoder(half)) for half in rows.chunk(2, dim=-1))
        return self.second(torch.tanh(self.first(left))) * right


class Penalised(nn.Module):
    """Asks for the gradient of its own inputs on the way, as a gradient penalty does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, rows: Tensor) -> Tensor:
        inputs = rows.detach().requires_grad_()
        made = self.last(torch.tanh(self.first(inputs)))
        (slope,) = torch.autograd.grad(made.sum(), inputs, create_graph=True)
        return made + slope.square().sum(-1, keepdim=True)


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48, bias=False), nn.Tanh(), nn.Linear(48, 8))


MODELS = {
    "tower": (tower, (16,)), "words": (tower, (5, 16)), "shared": (Twice, ()), "siamese": (Siamese, (16,)),
    "penalty": (Penalised, (16,)),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, list[Tensor]]:
    """A model and its microbatches."""
    torch.manual_seed(0)
    make, shape = MODELS[request.param]
    return make().double(), [torch.randn(rows, *shape, dtype=torch.float64) for rows in ROWS]


def run(
    model: nn.Module, microbatches: list[Tensor], deferred: DeferredGradients | None = None, *, at_once: bool = False
) -> list[Tensor]:
    """The gradients of a batch."""
    for number, rows in enumerate(microbatches):
        loss = model(rows).square().sum()
        if deferred is None:
            loss.backward()
            continue
        deferred.make(only_full=True)
        with deferred.backward(at_once=at_once and number == len(microbatches) - 1):
            loss.backward()
    if deferred is not None:
        deferred.make()
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    assert all(gradient is not None for gradient in gradients)
    return [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("in_buckets", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_are_those_of_plain_pytorch(
    case: tuple[nn.Module, list[Tensor]], at_once: bool, in_buckets: bool
) -> None:
    model, microbatches = case
    expected = run(copy.deepcopy(model), microbatches)
    deferred = DeferredGradients(model)
    assert deferred.weights
    if in_buckets:
        deferred.put({weight: torch.full_like(weight, 7.0) for weight in deferred.weights})
    for _ in range(2):
        for found, wanted in zip(run(model, microbatches, deferred, at_once=at_once), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
            assert not found.requires_grad
    assert all(not layer.rows for layer in deferred.weights.values())


def test_rows_are_kept_up_to_half_of_the_weights() -> None:
    layer = nn.Linear(16, 16)
    deferred = DeferredGradients(layer)
    most, has_gradient = 0, []
    for _ in range(7):
        deferred.make(only_full=True)
        has_gradient.append(layer.weight.grad is not None)
        with deferred.backward(at_once=False):
            layer(torch.ones(2, 16, requires_grad=True) * 1.0).sum().backward()
        kept = [part for pair in next(iter(deferred.weights.values())).rows for part in pair]
        assert all(part.grad_fn is None for part in kept)
        most = max(most, sum(part.numel() for part in kept))
    deferred.make()
    # 4 rows are half of the weights: every second microbatch is followed by a product.
    assert most == 16 * 16 // 2
    assert has_gradient == [False, False, True, True, True, True, True]
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, torch.full((16, 16), 14.0))


def test_a_gradient_stays_where_it_is_so_that_nothing_is_copied() -> None:
    layer = nn.Linear(64, 64)
    deferred, places = DeferredGradients(layer), set()
    for _ in range(3):
        with deferred.backward(at_once=True):
            layer(torch.ones(2, 64)).sum().backward()
        assert layer.weight.grad is not None
        places.add(layer.weight.grad.data_ptr())
    assert len(places) == 1


def test_the_hook_that_starts_a_reduction_finds_the_whole_gradient_in_the_last_backward() -> None:
    layer = nn.Linear(32, 32)
    seen: list[Tensor | None] = []
    deferred = DeferredGradients(layer)
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    for number in range(4):
        with deferred.backward(at_once=number == 3):
            layer(torch.ones(2, 32)).sum().backward()
    assert seen[:3] == [None] * 3
    torch.testing.assert_close(seen[3], torch.full((32, 32), 8.0))


def test_a_gradient_is_made_where_it_is_wanted() -> None:
    layer, bucket = nn.Linear(8, 8), torch.full((64,), 7.0)
    deferred = DeferredGradients(layer)
    deferred.put({layer.weight: bucket.view(8, 8)})
    for number in range(3):
        with deferred.backward(at_once=number == 2):
            layer(torch.ones(1, 8)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.data_ptr() == bucket.data_ptr()
    torch.testing.assert_close(bucket, torch.full((64,), 3.0))


def test_weights_that_someone_listens_to_are_left_alone() -> None:
    heard, after, frozen, plain = (nn.Linear(4, 4) for _ in range(4))
    heard.weight.register_hook(lambda gradient: gradient)
    after.weight.register_post_accumulate_grad_hook(lambda weight: None)
    frozen.weight.requires_grad_(False)
    assert [_can_defer(each) for each in (heard, after, frozen, plain)] == [False, False, False, True]
    with pytest.warns(FutureWarning):
        computed = nn.utils.weight_norm(nn.Linear(4, 4))  # its weight is made of two parameters at every forward
    assert not _can_defer(computed)


def test_a_layer_that_the_last_microbatch_passes_by_keeps_nothing_back() -> None:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    deferred = DeferredGradients(nn.ModuleList([first, second]))
    with deferred.backward(at_once=False):
        second(first(torch.ones(1, 16))).sum().backward()
    assert second.weight.grad is None
    with deferred.backward(at_once=True):
        first(torch.ones(1, 16)).sum().backward()
    assert second.weight.grad is not None
    assert not deferred.weights[second.weight].rows


def test_closed_layers_are_ordinary_ones_again() -> None:
    layer = nn.Linear(4, 4)
    DeferredGradients(layer).close()
    assert _can_defer(layer)
    assert layer(torch.ones(1, 4)).grad_fn.name() == "AddmmBackward0"
