"""A run whose data come slowly from some batch on: `python -m tests.training.slow FOLDER WORKERS BATCH SECONDS`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import stagewright as sw
from stagewright.cluster import parse_devices

ROWS = 8


def main(folder: str, workers: str, batch: str, seconds: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 4))
    target = torch.zeros(2, dtype=torch.long)
    loss = sw.mean_loss(torch.nn.functional.cross_entropy)
    layered = sw.make_layered(net, (torch.zeros(2, 6),), loss=loss, targets=(target,))

    def rows(number: int, start: int, stop: int):
        if number == int(batch):
            (Path(folder) / "slow").touch()
        if number >= int(batch):
            time.sleep(float(seconds))
        inputs = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(number))
        return (inputs[start:stop],), (inputs[start:stop, :4].argmax(dim=1),)

    stage = sw.Stage(layers=layered.names, devices=parse_devices(f"0:0-{int(workers) - 1}"))
    plan = sw.Plan(model="slow", stages=(stage,), batch=ROWS)
    job, settings = sw.Job(name="slow", steps=100_000), sw.Settings(timeout_s=60)
    sw.train(sw.make_schedule(plan), layered, data=rows, job=job, settings=settings, folder=folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
