"""Training with delayed updates in one process: what every plan must equal, in a few lines of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Rows = Callable[[int], tuple[Tensor, Tensor]]


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
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], clip_norm: float | None = None,
) -> tuple[list[float], list[Tensor]]:  # fmt: skip
    """Losses, and the weights after all steps; batch n sees the parameters of stage s after update n − K_s.

    `stage_of` names the stage of each parameter.
    """
    newest = list(model.parameters())
    optimizer = make_optimizer(newest)
    history = [[parameter.detach().clone() for parameter in newest]]
    losses = []
    for batch in range(steps):
        now = history[-1]
        for parameter, stage, index in zip(newest, stage_of, range(len(newest))):
            parameter.data = history[max(0, batch - versions[stage] + 1)][index].clone()
        inputs, labels = rows(batch)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(newest, clip_norm)
        for parameter, value in zip(newest, now):
            parameter.data = value.clone()
        optimizer.step()
        history.append([parameter.detach().clone() for parameter in newest])
        losses.append(loss.item())
    return losses, history[-1]
