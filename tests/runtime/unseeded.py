"""Workers that build different models by accident: run under torchrun, every worker writes its weights' sums."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

from stagewright.models import cross_entropy_sum, make_layered
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import open_world
from stagewright.scheduling import make_schedule
from tests.runtime.cases import OPTIMIZERS, Case, plan_of
from tests.runtime.overflow import float_rows


def main(folder: str) -> None:
    """Trains two steps from a model that is another one on every worker."""
    torch.manual_seed(int(os.environ["RANK"]))
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
    target = torch.zeros(2, dtype=torch.long)
    layered = make_layered(model, (torch.zeros(2, 6),), loss=cross_entropy_sum(), targets=(target,))
    with open_world(Settings(timeout_s=90.0)) as world:
        plan = plan_of(Case("4", microbatches=1), layered.names)
        feed = FunctionFeed(lambda batch, start, stop: float_rows(batch, start, stop, 24))
        worker = Worker(make_schedule(plan), layered, world, Settings(), make_optimizer=OPTIMIZERS["sgd"], feed=feed)
        worker.run(2)
        worker.close()
        sums = {name: value.double().sum().item() for name, value in model.named_parameters()}
        Path(folder, f"worker-{world.worker}.json").write_text(json.dumps(sums))


if __name__ == "__main__":
    main(*sys.argv[1:])
