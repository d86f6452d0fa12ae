"""A run of two workers, one of which takes memory without end: `python -m tests.runtime.greedy FOLDER`."""

from __future__ import annotations

import os
import sys

import torch

import stagewright as sw
from stagewright.models import build_model


def rows(batch: int, start: int, stop: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if batch == 3 and os.environ["RANK"] == "1":
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1 << 20)) * 16)
    return [torch.zeros(stop - start, 3, 32, 32)], [torch.zeros(stop - start, dtype=torch.long)]


def main(folder: str) -> None:
    model = build_model("tiny-cnn")
    devices = sw.parse_devices("0:0-1")
    plan = sw.Plan(model="tiny-cnn", stages=(sw.Stage(layers=model.names, devices=devices),), batch=8)
    sw.train(
        sw.make_schedule(plan), model, data=rows, job=sw.Job(steps=10), folder=folder,
        settings=sw.Settings(threads=1, timeout_s=60),
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
