"""An overflow in one stage, as each worker saw it: run under torchrun, every worker writes what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from stagewright.plan import Plan
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import open_world
from stagewright.scheduling import make_schedule
from tests.runtime.cases import OPTIMIZERS, Case, layered_tower, plan_of
from tests.runtime.reference import rows_of_batch

STEPS, BAD = 4, 2


def main(folder: str, placement: str) -> None:
    """Trains in fp16; at step BAD one replica of stage 0 gets an infinite gradient."""
    case = Case(placement, microbatches=2)
    settings = Settings(precision="fp16", timeout_s=90.0)
    with open_world(settings) as world:
        layered = layered_tower(torch.float32)
        plan: Plan = plan_of(case, layered.names)
        feed = FunctionFeed(lambda batch, start, stop: float_rows(batch, start, stop, case.batch))
        worker = Worker(
            make_schedule(plan, agree=True), layered, world, settings, make_optimizer=OPTIMIZERS["sgd"], feed=feed
        )
        seen = {"scales": [], "moved": []}
        if world.worker == 0:
            spoil(worker)
        for step in range(STEPS):
            before = weights_of(worker)
            worker.run(1, step)
            seen["scales"].append(float(worker.scale.current))
            seen["moved"].append(any(not torch.equal(a, b) for a, b in zip(before, weights_of(worker))))
        worker.close()
        Path(folder, f"worker-{world.worker}.json").write_text(json.dumps(seen))


def float_rows(batch: int, start: int, stop: int, num_rows: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Rows of a batch in single precision."""
    inputs, labels = rows_of_batch(batch, num_rows)
    return (inputs[start:stop].float(),), (labels[start:stop],)


def spoil(worker: Worker) -> None:
    """Makes the first parameter's gradient infinite in the bad batch."""
    first = worker.replicas[0].weights.parameters[0][0]

    def hook(gradient: Tensor) -> Tensor:
        at = worker.at
        return gradient * float("inf") if at is not None and at.batch == BAD else gradient

    first.register_hook(hook)


def weights_of(worker: Worker) -> list[Tensor]:
    """A copy of all weights of this worker."""
    return [value.clone() for module in worker.current_modules() for value in module.state_dict().values()]


if __name__ == "__main__":
    main(*sys.argv[1:])
