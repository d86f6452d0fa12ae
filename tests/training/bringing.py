"""A script that trains over four devices and looks at its own model afterwards: `python -m tests.training.bringing`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import stagewright as sw

STEPS = 4


def rows(batch: int, start: int, stop: int) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor]]:
    """The same rows of a batch on every worker."""
    inputs = torch.randn(12, 6, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)
    return (inputs[start:stop],), (inputs[start:stop, :3].argmax(dim=1),)


def make_model() -> nn.Sequential:
    """The model before training."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    """As in the plain loop."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def plainly() -> nn.Module:
    """The model after a plain loop."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for batch in range(STEPS):
        (inputs,), (labels,) = rows(batch, 0, 12)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def main(folder: str, placement: str, saves: str = "saved") -> None:
    """Trains, and keeps the model that this process has afterwards."""
    model = make_model()
    sample, label = torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    layered = sw.make_layered(model, (sample,), loss=sw.mean_loss(nn.functional.cross_entropy), targets=(label,))
    groups = [sw.parse_devices(each) for each in placement.split(".")]
    cuts = [0, *(2 for _ in groups[1:]), layered.num_layers]
    stages = tuple(sw.Stage(layers=layered.names[a:b], devices=group) for a, b, group in zip(cuts, cuts[1:], groups))
    sw.train(
        sw.make_schedule(sw.Plan(model="own", stages=stages, batch=12, num_microbatches=2)), layered, data=rows,
        job=sw.Job(name="own", steps=STEPS, save_final=saves == "saved"), recipe=make_optimizer,
        folder=Path(folder) / "run", settings=sw.Settings(precision="fp64", threads=1, timeout_s=60),
    )  # fmt: skip
    torch.save(model.state_dict(), Path(folder) / f"weights-{os.environ.get('RANK', 'main')}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
