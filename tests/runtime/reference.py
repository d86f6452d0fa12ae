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


SLOWED = ("nesterov", "slow-predict")


def train_corrected(
    model: nn.Module, loss_of: Callable[[int], Tensor], steps: int, versions: Mapping[str, int],
    correct: Mapping[str, str], make_optimizer: MakeOptimizer, clip_norm: float | None = None, rescale_steps: int = 4,
    skips: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """The same where something is done about the delay: losses, and the newest weights, which the optimizer moves.

    `correct` has the correction of each parameter. Batch n uses x after update n − K; z is what the optimizer moves.
    """
    named = dict(model.named_parameters())
    kinds = {name: (correct[name] if versions[name] > 1 else "none", versions[name] - 1) for name in named}
    made = {kind: make_optimizer([named[name] for name in named if kinds[name] == kind]) for kind in kinds.values()}
    factor = {kind: delay_momentum(each, kind[1]) if kind[0] in SLOWED else None for kind, each in made.items()}
    z = {name: each.detach().clone() for name, each in named.items()}
    x, losses = [dict(z)], []
    u: list[dict[str, Tensor]] = []
    for batch in range(steps):
        for name, each in named.items():
            each.data = x[max(0, batch - versions[name] + 1)][name].clone()
            each.grad = None
        loss = loss_of(batch)
        loss.backward()
        losses.append(loss.item())
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(named.values(), clip_norm)
        for name, each in named.items():
            each.data = (x[-1] if kinds[name][0] == "error-feedback" else z)[name].clone()
        before = {name: each.detach().clone() for name, each in named.items()}
        gradients = [each.grad for each in named.values() if each.grad is not None]
        for (kind, delay), optimizer in made.items():
            rates = [group["lr"] for group in optimizer.param_groups]
            if kind == "rescale":
                for group in optimizer.param_groups:
                    group["lr"] /= (delay + 1) ** (1 - min(1.0, batch / rescale_steps))
            if not skips or all(bool(each.isfinite().all()) for each in gradients):
                optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate
        z = {name: each.detach().clone() for name, each in named.items()}
        u.append({name: z[name] - before[name] for name in named})
        x.append(dict(z))
        for name, (kind, delay) in kinds.items():
            if kind in ("predict", "slow-predict"):
                x[-1][name] = z[name] + delay * u[-1][name]
            if kind == "nesterov":
                x[-1][name] = z[name] + (factor[kind, delay] or 0.0) * u[-1][name]
            if kind == "error-feedback" and batch >= delay:
                x[-1][name] = z[name] = z[name] + u[-1][name] - u[batch - delay][name]
    return losses, z


def delay_momentum(optimizer: Any, delay: int) -> float:
    """Makes an optimizer remember as many times longer as it is late; its new momentum."""
    found = 0.0
    for group in optimizer.param_groups:
        before = group["betas"][0] if "betas" in group else group["momentum"]
        found = 1 - (1 - before) / (delay + 1)
        if "betas" in group:
            group["betas"] = (found, group["betas"][1])
        else:
            group.update(momentum=found, dampening=1 - (1 - found) / (1 - before))
    return found
