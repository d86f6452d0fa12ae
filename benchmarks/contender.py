"""One worker of one contender: trains until it is ended, and tells through a pipe when steps are done.

FOLDER/contender.json says what to run. The first worker tells the moment of every step; on a card of every few, once
the card is done with them, for a card works through what it was given long after it was given it.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.baselines import Rows, data_parallel, each_alone, make_optimizer, make_rows, pipelining

from stagewright.models import Layered, build_model
from stagewright.plan import Plan
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.settings import Settings
from stagewright.runtime.transport import STRANDS
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule

MOMENT = struct.Struct("d")
LASTS_S = 3600.0
"""How long a worker may wait that is stopped now and then."""
ENDLESS = 1_000_000
Tell = Callable[[int], None]
"""Called with the number of each step that is done."""


def main(folder: str) -> None:
    """Runs as one of the workers."""
    spec = json.loads((Path(folder) / "contender.json").read_text(encoding="utf-8"))
    torch.set_num_threads(spec["threads"])
    with open_world(Settings(device=spec["device"], timeout_s=LASTS_S)) as world:
        if spec["kind"] == "links":
            rates = move_all_at_once(world, spec["num_bytes"])
            (Path(folder) / f"links-{world.worker}.json").write_text(json.dumps(rates), encoding="utf-8")
            return
        model = build_model(spec["model"], **spec["options"])
        rows = make_rows(model, spec["batch"]).to(world.device)
        run = ours if spec["kind"] == "plan" else peer
        run(model, rows, world, spec, teller(spec, world))


def teller(spec: Mapping[str, Any], world: World) -> Tell:
    """What the first worker tells of its steps; the others say nothing."""
    if world.worker:
        return lambda step: None
    pipe, every = os.open(spec["pipe"], os.O_RDWR), spec["steps_a_word"]

    def tell(step: int) -> None:
        if (step + 1) % every == 0:
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            os.write(pipe, MOMENT.pack(time.perf_counter()))

    return tell


def ours(model: Layered, rows: Rows, world: World, spec: Mapping[str, Any], tell: Tell) -> None:
    """Our worker with a plan."""
    feed = FunctionFeed(lambda _, a, b: (tuple(tensor[a:b] for tensor in rows.inputs), (rows.labels[a:b],)))
    schedule, settings = make_schedule(Plan.from_dict(spec["plan"])), Settings(device=spec["device"])
    worker = Worker(schedule, model, world, settings, make_optimizer=make_optimizer, feed=feed)
    worker.on_update = tell
    ctypes.CDLL(None).malloc_trim(0)  # what building took
    worker.run(ENDLESS)


def peer(model: Layered, rows: Rows, world: World, spec: Mapping[str, Any], tell: Tell) -> None:
    """DDP, torch's pipelining, or the plain loop of each worker alone."""
    if spec["kind"] == "pipelining":
        step = pipelining(model, rows, world, spec["cuts"], spec["microbatches"])
    else:
        step = {"ddp": data_parallel, "alone": each_alone}[spec["kind"]](model, rows, world)
    del model
    ctypes.CDLL(None).malloc_trim(0)  # what building took
    for number in range(ENDLESS):
        step(1)
        tell(number)


def move_all_at_once(world: World, num_bytes: int) -> dict[str, float]:
    """Bytes a second of a host when all send: to one and from one, and in an all-reduce over all its connections."""
    strands = [dist.new_group(backend="gloo") for _ in range(STRANDS)]
    others = range(1, world.size) if world.worker == 0 else (0,)
    parts = {other: torch.zeros(num_bytes, dtype=torch.uint8) for other in others}
    sums = [torch.zeros(num_bytes // 4) for _ in strands]

    def through_one(sends: bool) -> list[dist.Work | None]:
        move = dist.isend if sends else dist.irecv
        return [move(part, other, strands[(other + world.worker) % STRANDS]) for other, part in parts.items()]

    def reduced() -> list[dist.Work | None]:
        return [dist.all_reduce(each, group=group, async_op=True) for each, group in zip(sums, strands)]

    to_s, from_s = (middle_s(lambda sends=sends: through_one(sends == bool(world.worker))) for sends in (True, False))
    all_s, passes = middle_s(reduced), 2 * (world.size - 1) / world.size
    # As many rows go to a host as gradients of them come from it, so its link has the mean of both ways.
    return {
        "one": 2 * (world.size - 1) * num_bytes / (to_s + from_s), "each": passes * num_bytes * STRANDS / all_s,
    }  # fmt: skip


def middle_s(start: Callable[[], list[dist.Work | None]], repeats: int = 5) -> float:
    """Seconds from a moment at which all workers are here until all are done; the first time opens connections."""
    spent = []
    for _ in range(1 + repeats):
        dist.barrier()
        began = time.perf_counter()
        for work in start():
            if work is not None:
                work.wait()
        dist.barrier()
        spent.append(time.perf_counter() - began)
    return median(spent[1:])


if __name__ == "__main__":
    main(sys.argv[1])
