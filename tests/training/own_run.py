"""A script with a Run and a loop of its own, which writes down what it came to: `python -m tests.training.own_run`."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import stagewright as sw

BATCH, EPOCHS, ROWS = 13, 3, 45
WEIGHTS = [1.0 + row % 3 for row in range(ROWS)]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_data(rows: int, seed: int) -> TensorDataset:
    inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    labels = inputs[:, :3].argmax(dim=1)
    labels[::7] = -100  # which torch's mean leaves out
    return TensorDataset(inputs, labels)


def make_loader() -> DataLoader[Any]:
    return DataLoader(make_data(ROWS, 1), batch_size=BATCH, sampler=WeightedRandomSampler(WEIGHTS, ROWS))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def scheduler(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(made, 12)


def confidence(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.softmax(1).amax(1)


class Notes(sw.Callback):
    """What was called, in the process that speaks."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_step(self, now: sw.Moment) -> None:
        self.seen.append(("step", now.step))

    def on_evaluation(self, now: sw.Moment) -> None:
        self.seen.append(("evaluation", now.step))

    def on_epoch(self, now: sw.Moment) -> None:
        self.seen.append(("epoch", now.step))
        if now.step == 6:
            now.stop("two epochs are enough")

    def on_checkpoint(self, now: sw.Moment) -> None:
        assert now.folder.is_dir()
        self.seen.append(("checkpoint", now.step))


def main(folder: str, placement: str) -> None:
    base, notes, model = Path(folder), Notes(), make_model()
    untrained = copy.deepcopy(model)
    options: dict[str, Any] = {
        "data": make_loader(), "loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "placement": placement,
        "microbatches": 3, "precision": "fp64", "device": "cpu", "threads": 1, "timeout": 60,
    }  # fmt: skip
    run = sw.Run(
        model, **options, scheduler=scheduler, epochs=EPOCHS, evaluation_data=make_data(20, 2), callbacks=[notes],
        metrics={"confidence": confidence}, folder=base / "run", checkpoint_every=4,
    )  # fmt: skip
    record = run.fit()
    figures = run.evaluate()
    with sw.workers(untrained, **options, folder=base / "loop") as w:
        losses = []
        for batch in (0, 1, 2, 0):
            losses.append(w.backward(batch))
            for gradient in w.gradients().values():
                gradient.clamp_(-0.01, 0.01)
            for each in w.optimizers.values():
                each.param_groups[0]["lr"] = 0.05 / (1 + batch)
            w.update()
    run.save(base / "saved")
    if sw.is_main():
        told = {
            "losses": [point.value for point in record.points if point.name == "loss"], "figures": figures,
            "seen": notes.seen, "own": losses, "stages": sorted(w.stages), "rank": os.environ.get("RANK"),
        }  # fmt: skip
        (base / "told.json").write_text(json.dumps(told))
        torch.save([run.model.state_dict(), untrained.state_dict()], base / "weights.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
