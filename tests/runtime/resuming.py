"""Workers that go from plan to plan over checkpoints: `-m tests.runtime.resuming FOLDER CASE,…` under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stagewright.models import Layered
from stagewright.runtime.checkpoint.resuming import restore
from stagewright.runtime.checkpoint.saving import Checkpointer
from stagewright.runtime.checkpoint.storage import find_checkpoint
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule
from tests.runtime.cases import OPTIMIZERS, Case, layered_tower, plan_of
from tests.runtime.reference import rows_of_batch

STEPS, BATCH = 3, 24
SETTINGS = Settings(precision="fp64", timeout_s=90.0)


def rows(batch: int, start: int, stop: int):
    inputs, labels = rows_of_batch(batch, BATCH)
    return (inputs[start:stop],), (labels[start:stop],)


def worker_of(case: Case, layered: Layered, world: World) -> Worker:
    """A fresh worker of a case."""
    schedule = make_schedule(plan_of(case, layered.names))
    maker = OPTIMIZERS[case.optimizer]
    return Worker(schedule, layered, world, SETTINGS, make_optimizer=maker, feed=FunctionFeed(rows))


def go_on(case: Case, folder: Path, world: World, steps: int = STEPS) -> Worker:
    """Takes up the last checkpoint, if there is one, runs some steps, and saves."""
    layered = layered_tower()
    worker = worker_of(case, layered, world)
    found = find_checkpoint(folder, print)
    first = restore(worker, *found, options=True) if found else 0
    if world.control is not None:
        dist.barrier()
    worker.run(steps, first)
    worker.close()
    checkpointer = Checkpointer(worker, layered, folder, every=None, keep=9)
    checkpointer.save(first + steps)
    checkpointer.close()
    assert [saved.fault for saved in checkpointer.news()] == [None]
    return worker


def main(*words: str) -> None:
    """Runs FOLDER CASE,… pairs, the cases one after another; each is PLACEMENT/OPTIMIZER/STALENESS[/sharded]."""
    torch.set_num_threads(1)
    with open_world(SETTINGS) as world:
        for folder, cases in zip(words[::2], words[1::2]):
            for text in cases.split(","):
                placement, optimizer, staleness, *sharded = text.split("/")
                case = Case(
                    placement, optimizer=optimizer, staleness=staleness, batch=BATCH, shard_optimizer=bool(sharded)
                )
                go_on(case, Path(folder), world)


if __name__ == "__main__":
    main(*sys.argv[1:])
