"""What the wires between eight workers on one card carry: the gather before a last stage, its way back, a reduction.

    python benchmarks/wires.py --megabytes 64

Each figure is the median of several rounds, alone on the machine: no worker computes meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from stagewright.cluster import parse_placement
from stagewright.plan import Plan, Stage
from stagewright.runtime.all_reduce import make_all_reduce
from stagewright.runtime.common_memory import APART
from stagewright.runtime.launch.local import launch
from stagewright.runtime.settings import Settings
from stagewright.runtime.transport import TRANSPORTS, Channel, Transport
from stagewright.runtime.world import World, open_world

WORKERS = 8
ROUNDS = 7


def uneven_plan() -> Plan:
    """Seven replicas of a first stage, one of a second."""
    first, last = parse_placement(f"0:0-{WORKERS - 2}.0:{WORKERS - 1}")
    stages = (Stage(layers=("a",), devices=first), Stage(layers=("b",), devices=last))
    return Plan(model="wires", stages=stages, batch=WORKERS)


def median_s(once: Callable[[], None], world: World) -> float:
    """Seconds of one round, all workers starting together."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier(group=world.control)
        started = time.perf_counter()
        once()
        torch.cuda.synchronize()
        dist.barrier(group=world.control)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def move(transport: Transport, is_forward: bool, numel: int, world: World) -> Callable[[], None]:
    """A round of the gather of seven workers' rows at the last, or of its way back."""
    last, channel = WORKERS - 1, Channel(0, is_forward)
    is_last = world.worker == last
    rows = [torch.ones(numel // last, device=world.device) for _ in range(last if is_last else 1)]
    parts = list(zip(range(last), [[each] for each in rows])) if is_last else [(last, rows)]

    def once() -> None:
        if is_last == is_forward:
            transport.receive(channel, parts).wait()
        else:
            transport.send(channel, parts)

    return once


def work(megabytes: int) -> None:
    """One of the eight workers."""
    torch.set_num_threads(1)
    numel, everyone = megabytes * 250_000, tuple(range(WORKERS))
    with open_world(Settings(device="cuda", timeout_s=40.0)) as world:
        flat, plan = torch.zeros(numel, device=world.device), uneven_plan()
        ways: dict[str, Callable[[], None]] = {}
        for transport in (TRANSPORTS[name](world, plan) for name in ("staged", "nccl")):
            for is_forward, what in ((True, "7 → 1"), (False, "1 → 7")):
                ways[f"{what} {transport.name}"] = move(transport, is_forward, numel, world)
        ways["all-reduce NCCL"] = adding(world, everyone, flat, staged=False)
        ways["all-reduce staged in common memory"] = adding(world, everyone, flat, staged=True)
        os.environ[APART] = "1"
        ways["all-reduce staged over sockets"] = adding(world, everyone, flat, staged=True)
        for name, once in ways.items():
            seconds = median_s(once, world)
            if world.worker == 0:
                print(f"{name:36} {megabytes:4} MB  {seconds * 1e3:7.1f} ms  {megabytes / seconds / 1e3:6.2f} GB/s")


def adding(world: World, everyone: tuple[int, ...], like: torch.Tensor, *, staged: bool) -> Callable[[], None]:
    """A round of adding up one tensor."""
    add_up = make_all_reduce(world, "stage 0", everyone, staged=staged)
    assert add_up is not None
    flat = add_up.memory(like.numel(), like)
    return lambda: void(add_up.start(flat).wait())


def void(_: object) -> None:
    """Nothing."""


def main() -> None:
    """Starts the workers, and shows what the first of them says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments.megabytes)
        return
    stage = Stage(layers=("all",), devices=parse_placement(f"0:0-{WORKERS - 1}")[0])
    whole = Plan(model="wires", stages=(stage,), batch=WORKERS)
    settings = Settings(device="cuda", threads=1, transport="nccl")
    with TemporaryDirectory() as folder:
        try:
            launch([sys.executable, *sys.argv], whole, Path(folder), settings, share=WORKERS)
        finally:
            for log in sorted(Path(folder).glob("logs/*/*/0/std*.log")):
                print(log.read_text()[-3000:])


if __name__ == "__main__":
    main()
