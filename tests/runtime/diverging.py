"""Workers one of which loses a bit of its weights: `-m tests.runtime.diverging FOLDER PLACEMENT WHO` under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from stagewright.runtime.safety.replicas import ReplicaCheck
from stagewright.runtime.timing import AsyncScalars
from stagewright.runtime.world import Words, open_world
from tests.runtime.cases import Case, layered_tower
from tests.runtime.resuming import BATCH, SETTINGS, worker_of


def main(folder: str, placement: str, who: str) -> None:
    torch.set_num_threads(1)
    with open_world(SETTINGS) as world:
        worker = worker_of(Case(placement, batch=BATCH), layered_tower(), world)
        told: list[str] = []
        words, scalars = Words(world.store, b"s"), AsyncScalars(world.device)
        check = ReplicaCheck(worker.plan, words, scalars, 2, lambda kind, text: told.append(text))

        def after(stage: int, batch: int) -> None:
            if str(world.worker) == who and batch == 4:
                bits = worker.replicas[stage].weights.newest_parameters[0].detach().view(torch.int64)
                bits.view(-1)[3] ^= 1
            check.after_update(worker.replicas[stage], batch)

        worker.on_stage_update = after
        worker.run(9)
        torch.distributed.barrier()
        check.close()
        worker.close()
        Path(folder, f"{placement}-{who}-{world.worker}.txt").write_text("\n".join(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
