"""One stage: its backward in two halves, whatever its outputs are, and what it draws at random."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from stagewright.models import cross_entropy_sum, make_layered
from stagewright.models.stage import StageModule
from stagewright.runtime.settings import Settings
from stagewright.runtime.stage import StageRunner, _mix

ENDS = {"a view": nn.Flatten(), "its own memory": nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(75, 75))}


def middle_stage(end: nn.Module) -> StageModule:
    """The second of three stages: a convolution, and what its outputs come from."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 3, 1), copy.deepcopy(end)), nn.Linear(75, 4))
    labels = torch.zeros(2, dtype=torch.int64)
    model = make_layered(body, (torch.randn(2, 3, 5, 5),), loss=cross_entropy_sum(), targets=(labels,))
    return model.stage(1, model.num_layers - 2)  # before it a convolution, after it a linear layer and the loss


def run(end: nn.Module, *, in_halves: bool) -> list[Tensor]:
    """The gradients of the stage's inputs and of its weights, over two microbatches."""
    module = middle_stage(end)
    runner = StageRunner(1, module, Settings())
    scale, found = torch.ones(()), []
    for number in range(2):
        torch.manual_seed(number)
        key = (0, number)
        (made,) = runner.forward(module, key, [torch.randn(2, 3, 5, 5)], [])
        gradients = [torch.randn_like(made)]
        if in_halves:
            found += runner.backward_input(module, key, gradients, scale)
            assert all(parameter.grad is None for parameter in module.parameters()) or number
            runner.backward_weight(module, key)
        else:
            found += runner.backward(key, gradients, scale)
    return [*found, *(parameter.grad for parameter in module.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("end", ENDS)
def test_halves_make_the_gradients_of_the_whole(end: str) -> None:
    whole, halves = (run(ENDS[end], in_halves=each) for each in (False, True))
    assert len(whole) > 3
    torch.testing.assert_close(halves, whole)


class Noise(nn.Module):
    """Draws as many numbers as it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_dropped_is_by_row_and_batch_whatever_microbatch_a_row_is_in(recompute: bool) -> None:
    module = middle_stage(nn.Sequential(nn.Dropout(), nn.Flatten()))
    rows = torch.ones(6, 3, 5, 5)

    def forward(key: tuple[int, int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        runner = StageRunner(1, module, Settings(seed=3), recompute=recompute)
        (made,) = runner.forward(module, key, [rows[start:stop]], [], start=start)
        module.zero_grad()
        runner.backward(key, [torch.ones_like(made)], torch.ones(()))
        return made, module.get_parameter("1.0.weight").grad.clone()

    (whole, gradient), parts = forward((4, 0), 0, 6), [forward((4, 0), 0, 2), forward((4, 1), 2, 6)]
    assert 0.3 < float((whole == 0).double().mean()) < 0.7
    torch.testing.assert_close(torch.cat([made for made, _ in parts]), whole, rtol=0, atol=0)
    torch.testing.assert_close(parts[0][1] + parts[1][1], gradient)
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, forward((5, 0), 0, 6)[0])


@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_microbatch_draws_is_its_own_in_any_order(recompute: bool) -> None:
    """As after torch.manual_seed with the seed that batch and microbatch make, whatever was drawn before."""
    module = middle_stage(nn.Sequential(Noise(), nn.Flatten()))
    runner = StageRunner(1, module, Settings(seed=7), recompute=recompute)
    rows = torch.ones(2, 3, 5, 5)
    keys = [(0, 0), (0, 1), (1, 0)]
    forth, back = (
        {key: runner.forward(module, key, [rows], [], hold=False)[0] for key in order} for order in (keys, keys[::-1])
    )
    for key in keys:
        torch.manual_seed(_mix(runner.seed, *key))
        torch.testing.assert_close(forth[key], module(rows)[0], rtol=0, atol=0)
        torch.testing.assert_close(back[key], forth[key], rtol=0, atol=0)
    assert not torch.equal(forth[0, 0], forth[0, 1])
    assert not torch.equal(forth[0, 0], forth[1, 0])
