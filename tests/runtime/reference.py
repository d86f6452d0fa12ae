"""Training with delayed updates in one process: what every plan must equal, in a few lines of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Rows = Callable[[int], tuple[Tensor, Tensor]]
MakeOptimizer = Callable[[list[nn.Parameter]], Any]


class Tower(nn.Sequential):
    """Six small layers, enough for every placement of the tests."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)), nn.Linear(6, 4))


def rows_of_batch(batch: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """The inputs and labels of a batch."""
    generator = torch.Generator().manual_seed(1000 + batch)
    inputs = torch.randn(num_rows, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(4, (num_rows,), generator=generator)


def train_delayed(
    model: nn.Sequential, rows: Rows, steps: int, stage_of: Sequence[int], versions: Sequence[int],
    make_optimizer: MakeOptimizer, clip_norm: float | None = None,
) -> tuple[list[float], list[Tensor]]:  # fmt: skip
    """Losses, and the weights after all steps; batch n sees the parameters of stage s after update n − K_s.

    `stage_of` names the stage of each parameter.
    """
    delays = {name: versions[stage] for (name, _), stage in zip(model.named_parameters(), stage_of)}

    def loss_of(batch: int) -> Tensor:
        inputs, labels = rows(batch)
        return nn.functional.cross_entropy(model(inputs), labels)

    losses, weights = train_plainly(model, loss_of, steps, delays, make_optimizer, clip_norm)
    return losses, list(weights.values())


def train_plainly(
    model: nn.Module, loss_of: Callable[[int], Tensor], steps: int, versions: Mapping[str, int],
    make_optimizer: MakeOptimizer, clip_norm: float | None = None, skips: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """Losses, and the weights after all steps; batch n sees a parameter of K versions after update n − K.

    Where it `skips`, a step whose gradients are not finite is left out.
    """
    named = dict(model.named_parameters())
    made = make_optimizer(list(named.values()))
    optimizer, scheduler = made if isinstance(made, tuple) else (made, None)
    history = [{name: parameter.detach().clone() for name, parameter in named.items()}]
    losses = []
    for batch in range(steps):
        now = history[-1]
        for name, parameter in named.items():
            parameter.data = history[max(0, batch - versions.get(name, 1) + 1)][name].clone()
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(named.values(), clip_norm)
        for name, parameter in named.items():
            parameter.data = now[name].clone()
        gradients = [each.grad for each in named.values() if each.grad is not None]
        if not skips or all(bool(each.isfinite().all()) for each in gradients):
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        history.append({name: parameter.detach().clone() for name, parameter in named.items()})
        losses.append(loss.item())
    return losses, history[-1]
