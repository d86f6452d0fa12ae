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
from stagewright.training.config import Job
from stagewright.training.recipes import Recipe
from stagewright.training.start import train
from tests.runtime.cases import Case, layered_tower, plan_of
from tests.runtime.reference import rows_of_batch

VICTIMS = {"nan": 0, "skip": 0, "device": 1}
"""Workers that come to harm, where it is not the last one."""
BATCH = 24
RAISED = {
    "raise": RuntimeError("the disk is on fire"),
    "again": ValueError("row 7 has no label"),
    "timed out": TimeoutError("the server timed out"),
    "socket": ConnectionResetError("socket: connection reset by peer"),
    "exit": SystemExit(3),
    "memory": MemoryError("no room for the images"),
}
"""What the data function raises."""


def rows(how: str) -> object:
    """A feed that does harm at batch 5 of the last stage's worker."""

    def get(batch: int, start: int, stop: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
        inputs, labels = rows_of_batch(batch, BATCH)
        if batch == 5 and os.environ.get("RANK") == str(VICTIMS.get(how, 3)):
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
    elif how in RAISED:
        raise RAISED[how]
    elif how == "silent":
        os._exit(3)
    elif how in ("nan", "skip"):
        inputs.fill_(float("nan"))
    elif how == "device" and os.environ["WORLD_SIZE"] == "4":
        os.kill(os.getpid(), signal.SIGKILL)


def main(how: str, folder: str) -> None:
    """Trains on four workers, 3-1."""
    layered = layered_tower(torch.float32)
    plan: Plan = plan_of(Case("3-1", batch=BATCH), layered.names)
    settings = Settings(timeout_s=5.0, threads=1, on_nan="skip" if how == "skip" else "stop")
    saves = how in ("device", "again")
    job = Job(
        name="failing", steps=10, checkpoint_every=2 if saves else None, replan=how == "device",
        max_restarts=9 if how == "again" else 0,
    )  # fmt: skip
    record = train(
        make_schedule(plan, agree=settings.agrees), layered, data=rows(how), recipe=Recipe(learning_rate=0.1), job=job,
        settings=settings, folder=Path(folder), command=[sys.executable, "-m", "tests.runtime.failing", how, folder],
    )  # fmt: skip
    print(f"done {len(record.step_s)}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except StagewrightError as fault:
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(2)
