"""A run on a map-style dataset that writes down which items it was asked for: `python -m tests.training.dataset`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import stagewright as sw
from stagewright.data.packing import permuted
from tests.training.bringing import make_model, make_optimizer

NUM, BATCH, STEPS = 40, 12, 4


class Numbered(Dataset[Any]):
    """Items that follow from their index; what each worker was asked for is noted."""

    def __init__(self, noted: Path | None = None) -> None:
        self.noted = noted

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.noted is not None:
            with (self.noted / f"items-{os.environ.get('RANK', '0')}").open("a") as file:
                file.write(f"{index}\n")
        inputs = torch.randn(6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"features": inputs, "labels": inputs[:3].argmax()}


def collate(items: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Items as inputs and labels."""
    return torch.stack([each["features"] for each in items]), torch.stack([each["labels"] for each in items])


def plainly() -> list[float]:
    """The losses of a plain loop over the same rows."""
    model, losses = make_model(), []
    optimizer = make_optimizer(model.parameters())
    for batch in range(STEPS):
        epoch, place = divmod(batch, NUM // BATCH)
        order = permuted(torch.arange(NUM).numpy(), NUM, seed=0, use="dataset", epoch=epoch)
        rows = order[place * BATCH : (place + 1) * BATCH].tolist()
        inputs, labels = collate([Numbered()[index] for index in rows])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder: str, placement: str) -> None:
    model, noted = make_model(), Path(folder) / "noted"
    noted.mkdir(exist_ok=True)
    sample, label = torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    loss = sw.mean_loss(torch.nn.functional.cross_entropy)
    layered = sw.make_layered(model, (sample,), loss=loss, targets=(label,))
    groups = [sw.parse_devices(each) for each in placement.split(".")]
    edges = [0, *(2 for _ in groups[1:]), layered.num_layers]
    stages = tuple(sw.Stage(layers=layered.names[a:b], devices=group) for a, b, group in zip(edges, edges[1:], groups))
    record = sw.train(
        sw.make_schedule(sw.Plan(model="own", stages=stages, batch=BATCH, num_microbatches=2)), layered,
        data=Numbered(noted), collate_fn=collate, job=sw.Job(steps=STEPS, log_every=1), recipe=make_optimizer,
        folder=Path(folder) / "run", settings=sw.Settings(precision="fp64", threads=1, timeout_s=60),
    )  # fmt: skip
    if sw.is_main():
        losses = [point.value for point in record.points if point.name == "loss"]
        (Path(folder) / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
