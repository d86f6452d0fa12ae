"""A training run in which one worker comes to harm: `python -m tests.runtime.failing HOW FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from stagewright.errors import StagewrightError
from stagewright.plan import Plan
from stagewright.runtime.settings import Settings
from stagewright.scheduling import make_schedule
from stagewright.training import Job, Recipe, train
from tests.runtime.cases import Case, layered_tower, plan_of
from tests.runtime.reference import rows_of_batch

VICTIM = 3
BATCH = 24


def rows(how: str) -> object:
    """A feed that does harm at batch 5 of the last stage's worker."""

    def get(batch: int, start: int, stop: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
        inputs, labels = rows_of_batch(batch, BATCH)
        if batch == 5 and os.environ.get("RANK") == str(VICTIM if how != "nan" else 0):
            harm(how, inputs)
        return (inputs[start:stop].float(),), (labels[start:stop],)

    return get


def harm(how: str, inputs: Tensor) -> None:
    """What goes wrong."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hang":
        time.sleep(600)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise RuntimeError("the disk is on fire")
    elif how == "nan":
        inputs.fill_(float("nan"))


def main(how: str, folder: str) -> None:
    """Trains on four workers, 3-1."""
    torch.set_num_threads(1)
    layered = layered_tower(torch.float32)
    plan: Plan = plan_of(Case("3-1", batch=BATCH), layered.names)
    record = train(
        make_schedule(plan), layered, data=rows(how), recipe=Recipe(learning_rate=0.1),
        job=Job(name="failing", steps=10), settings=Settings(timeout_s=8.0), folder=Path(folder),
    )  # fmt: skip
    print(f"done {len(record.step_s)}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except StagewrightError as fault:
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(2)
