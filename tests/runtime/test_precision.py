"""The loss scale and the step behind it, against torch's own GradScaler, clipping and optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from stagewright.runtime.precision import LossScale, Verdict, sum_of_squares
from stagewright.runtime.settings import Settings
from stagewright.runtime.weights import Weights

CPU = torch.device("cpu")
GRADIENTS = (0.5, 2.0, math.inf, 0.25, math.nan, 1.0, 3.0)


@pytest.mark.parametrize("growth_steps", [1, 2, 3])
def test_the_scale_moves_as_that_of_torch(growth_steps: int) -> None:
    scale = LossScale(Settings(precision="fp16", scale_growth_steps=growth_steps), CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=float(scale.current), growth_interval=growth_steps)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for batch, overflowed in enumerate((False, False, True, False, False, False, True, True, False, False)):
        scale.note(batch, torch.tensor(float(overflowed)))
        scaler.scale(torch.zeros(()))  # it begins with the first loss
        weight.grad = torch.full((1,), math.inf if overflowed else 1.0)
        scaler.step(optimizer)
        scaler.update()
        told = scaler.state_dict()
        assert scale.saved(batch + 1) == (told["scale"], told["_growth_tracker"])


def test_a_scale_goes_on_from_a_checkpoint() -> None:
    scale, other = (LossScale(Settings(precision="fp16", scale_growth_steps=2), CPU) for _ in range(2))
    scale.note(0, torch.tensor(1.0))
    scale.note(1, torch.tensor(0.0))
    other.restore(2, *scale.saved(2))
    for each in (scale, other):
        each.note(2, torch.tensor(0.0))
    assert other.saved(3) == scale.saved(3) == (2.0**15, 0)


def test_a_batch_has_the_scale_after_the_update_that_its_backward_waited_for() -> None:
    """With K = 2 batch n is scaled as after update n − 2, whatever has been updated since, also after a resume."""
    scale, other = (LossScale(Settings(precision="fp16", scale_growth_steps=100), CPU, (2, 2)) for _ in range(2))
    first = float(scale.current)
    for batch, overflowed in enumerate((1.0, 0.0, 1.0)):
        assert float(scale.of_batch(batch + 1)) == first * (1.0, 0.5, 0.5)[batch]
        scale.note(batch, torch.tensor(overflowed))
    other.restore(3, *scale.saved(3))
    for each in (scale, other):
        assert [float(each.of_batch(batch)) for batch in (3, 4)] == [first * 0.5, first * 0.25]


def test_without_fp16_the_scale_is_one_for_ever() -> None:
    scale = LossScale(Settings(precision="bf16"), CPU)
    scale.note(0, torch.tensor(1.0))
    assert float(scale.current) == 1.0


@pytest.mark.parametrize("clip_norm", [None, 0.7])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("num_versions", [1, 2])
def test_steps_on_the_device_are_those_that_the_host_decides(
    optimizer: str, clip_norm: float | None, num_versions: int
) -> None:
    """A fused optimizer is handed the scale and the verdict; a plain one is asked for each step. Here both are new."""
    fused, plain = (trained(optimizer, clip_norm, num_versions, fused) for fused in (True, False))
    assert len(set(plain)) == 1 + sum(map(math.isfinite, GRADIENTS)), "only finite steps move the weights"
    torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=1e-6, atol=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_overflow_in_the_very_first_step_leaves_nothing_behind(optimizer: str) -> None:
    late = trained(optimizer, None, 1, True, gradients=(math.inf, 0.5, 0.5))
    assert late[1:] == trained(optimizer, None, 1, True, gradients=(0.5, 0.5))


def trained(
    optimizer: str, clip_norm: float | None, num_versions: int, fused: bool, gradients: Sequence[float] = GRADIENTS
) -> list[float]:
    """A weight before and after each step, the gradients scaled as in fp16."""
    torch.manual_seed(0)
    weights = Weights(nn.Linear(3, 2), num_versions, lambda given: made(optimizer, given, fused))
    scale = LossScale(Settings(precision="fp16"), CPU)
    seen = [weights.newest().weight[0, 0].item()]
    for batch, size in enumerate(gradients):
        scaled: list[Tensor] = [torch.full_like(each, size) * float(scale.current) for each in weights.parameters[0]]
        verdict = Verdict(sum_of_squares(scaled, CPU), scale.current, clip_norm)
        weights.update(batch, scaled, verdict)
        scale.note(batch, verdict.overflowed)
        seen.append(weights.newest().weight[0, 0].item())
    return seen


def made(optimizer: str, parameters: object, fused: bool) -> torch.optim.Optimizer:
    if optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=fused)  # type: ignore[arg-type]
    return torch.optim.Adam(parameters, lr=0.1, fused=fused)  # type: ignore[arg-type]


def test_clipping_is_that_of_torch() -> None:
    parameters = [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(7))]
    for each in parameters:
        each.grad = torch.randn_like(each) * 3
    verdict = Verdict(
        sum_of_squares([each.grad for each in parameters if each.grad is not None], CPU), torch.tensor(1.0), 0.5
    )
    expected = [each.grad / verdict.divisor for each in parameters if each.grad is not None]
    norm = nn.utils.clip_grad_norm_(parameters, 0.5)
    torch.testing.assert_close(verdict.norm.float(), norm)
    for each, value in zip(parameters, expected):
        torch.testing.assert_close(each.grad, value)
