"""Our runtime against the peers on CPU workers: torch DDP, torch.distributed.pipelining, and the plain loop.

    python benchmarks/peers.py dp          AlexNet and ResNet-18 on four workers, against DDP
    python benchmarks/peers.py pipeline    an even tower in 2 and 4 stages, against Schedule1F1B
    python benchmarks/peers.py single      one worker, against the plain loop

Contenders live in the same processes and take turns; on one device each has a process of its own, for in one heap the
gradients that one keeps would decide where the other's lie. The ratio is the median of those of the rounds, in each of
which they follow one another. Beside it stands that of the CPU time of all workers, which other work on the machine
disturbs less.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.baselines import Rows, Step, data_parallel, make_optimizer, pipelining, plain_loop

from stagewright.cluster import DeviceId
from stagewright.cost import num_buckets
from stagewright.models import Layered, build_model, cross_entropy_sum, make_layered
from stagewright.plan import Plan, Stage
from stagewright.profiling.heap import keep_freed_memory
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule

ROUNDS = 10
MAKINGS, SHORT_ROUNDS = 4, 40
"""How often contenders on one device are made anew, for where weights lie in memory matters; and their turns of one
step each, for neighbours on the same cores come and go."""
ALONE = ("plain loop", "the same, memory kept", "ours")
"""The contenders on one device. Our workers tell the C library to keep freed memory: the second peer does so too."""


def rows(shape: tuple[int, ...], num_classes: int, batch: int) -> tuple[Tensor, Tensor]:
    """One batch for everyone."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, *shape, generator=generator)
    return inputs, torch.randint(num_classes, (batch,), generator=generator)


def ours(
    model: Layered, world: World, parts: list[tuple[int, int]], replicas: int, data: tuple[Tensor, Tensor], m: int
) -> Step:
    """Our worker: these runs of layers as stages, each on `replicas` workers."""
    stages = tuple(
        Stage(
            layers=model.names[first:last],
            devices=tuple(DeviceId(0, number * replicas + each) for each in range(replicas)),
            num_buckets=num_buckets(gradient_bytes(model, first, last)) if replicas > 1 else 1,
        )
        for number, (first, last) in enumerate(parts)
    )
    plan = Plan(model="benchmark", stages=stages, batch=len(data[0]), num_microbatches=m)
    feed = FunctionFeed(lambda _, start, stop: ((data[0][start:stop],), (data[1][start:stop],)))
    worker = Worker(make_schedule(plan), model, world, Settings(), make_optimizer=make_optimizer, feed=feed)
    done = [0]

    def step(number: int) -> None:
        worker.run(number, done[0])
        for batch in range(done[0], done[0] + number):
            worker.figures(batch)
        done[0] += number

    return step


def gradient_bytes(model: Layered, first: int, last: int) -> int:
    """The bytes of some layers' gradients."""
    names = set(model.parameter_names(first, last))
    return sum(each.numel() * 4 for name, each in model.model.named_parameters() if name in names)


class Tower(nn.Sequential):
    """Equal layers, so that stages are even."""

    def __init__(self, depth: int = 8, width: int = 1024) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


Turns = dict[str, list[tuple[float, float]]]


def take_turns(contenders: dict[str, Step], steps: int, world: World, rounds: int = ROUNDS) -> Turns:
    """Seconds a step of each contender, round by round, and those of all workers' CPUs."""
    times: Turns = {name: [] for name in contenders}
    for step in contenders.values():
        step(2)
    for number in range(rounds):
        # Who comes second finds the caches and the clock as the first left them: so they change places.
        for name, step in list(contenders.items())[:: 1 if number % 2 else -1]:
            wait(world)
            started, used = time.perf_counter(), time.process_time()
            step(steps)
            own = torch.tensor([time.process_time() - used], dtype=torch.float64)
            wait(world)
            seconds = time.perf_counter() - started
            if world.control is not None:
                dist.all_reduce(own, group=world.control)
            times[name].append((seconds / steps, own.item() / steps))
    return times


def wait(world: World) -> None:
    """Waits for all workers."""
    if world.control is not None:
        dist.barrier(group=world.control)


def show(title: str, times: Turns) -> None:
    """A line a peer: medians, spreads, and the peer's time over ours, who come last."""
    *peers, own = times
    for peer in peers:
        parts = []
        for name in (peer, own):
            seconds = [turn[0] for turn in times[name]]
            parts.append(f"{name} {statistics.median(seconds) * 1e3:8.2f} ms ±{spread(seconds):5.1%}")
        rounds = list(zip(times[peer], times[own]))
        wall, cpu = (statistics.median(one[what] / other[what] for one, other in rounds) for what in (0, 1))
        print(f"{title:34} {'   '.join(parts)}   ratio {wall:5.3f}, of CPU time {cpu:5.3f}", flush=True)


def spread(values: list[float]) -> float:
    """Half the distance of the quartiles, as a share of the median."""
    quartiles = statistics.quantiles(values, n=4)
    return (quartiles[2] - quartiles[0]) / 2 / quartiles[1]


def compare_dp(world: World) -> None:
    """Data parallelism on all workers against DDP in its recommended form."""
    for name, size, batch in (("alexnet", 64, 64), ("resnet18", 64, 64)):
        data = rows((3, size, size), 1000, batch)
        model = build_model(name, image_size=size)
        contenders = {
            "DDP": data_parallel(build_model(name, image_size=size), Rows((data[0],), data[1]), world),
            "ours": ours(model, world, [(0, model.num_layers)], world.size, data, 1),
        }
        times = take_turns(contenders, 3, world)
        if world.worker == 0:
            show(f"dp, {name}, {world.size} workers", times)


def compare_pipeline(world: World) -> None:
    """An even pipeline, one worker a stage, against Schedule1F1B."""
    batch, microbatches = 512, 8
    data = rows((1024,), 1024, batch)
    sample = (data[0][:2],)
    model, other = (make_layered(Tower(), sample, loss=cross_entropy_sum(), targets=(data[1][:2],)) for _ in range(2))
    count, inner = world.size, model.num_layers - 1
    edges = [inner * number // count for number in range(count)] + [model.num_layers]
    contenders = {
        "Schedule1F1B": pipelining(other, Rows((data[0],), data[1]), world, edges[1:-1], microbatches),
        "ours": ours(model, world, list(zip(edges, edges[1:])), 1, data, microbatches),
    }
    times = take_turns(contenders, 4, world)
    if world.worker == 0:
        show(f"1f1b, {count} even stages, 8 microbatches", times)


def compare_single() -> None:
    """One stage on one device against the plain loop."""
    for name, size, batch in (("alexnet", 64, 32), ("resnet18", 64, 32)):
        times: Turns = {which: [] for which in ALONE}
        for _ in range(MAKINGS):
            for which, turns in take_turns_alone(name, size, batch).items():
                times[which] += turns
        show(f"one device, {name}", times)


def take_turns_alone(name: str, size: int, batch: int) -> Turns:
    """Seconds a step of each contender in its own process, round by round, and those of its CPUs."""
    times: Turns = {which: [] for which in ALONE}
    spawn = multiprocessing.get_context("spawn")
    ends = {which: spawn.Pipe() for which in ALONE}
    processes = [spawn.Process(target=alone, args=(which, name, size, batch, ends[which][1])) for which in ALONE]
    for process in processes:
        process.start()
    for which in ALONE:
        ends[which][0].recv()  # it has taken its first steps
    for number in range(SHORT_ROUNDS):
        # Whoever comes next finds the caches and the clock as the last one left them: so they change places.
        for which in ALONE[number % 3 :] + ALONE[: number % 3]:
            ends[which][0].send("step")
            times[which].append(ends[which][0].recv())
    for which, process in zip(ALONE, processes):
        ends[which][0].send("end")
        process.join()
    return times


def alone(which: str, name: str, size: int, batch: int, pipe: Connection) -> None:
    """All of a model on one device, in the plain loop or as our one stage."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    data = rows((3, size, size), 1000, batch)
    model = build_model(name, image_size=size)
    if which == "ours":
        with open_world(Settings()) as world:
            serve(ours(model, world, [(0, model.num_layers)], 1, data, 1), pipe)
        return
    if which != "plain loop":
        keep_freed_memory()
    serve(plain_loop(model.model, Rows((data[0],), data[1])), pipe)


def serve(step: Step, pipe: Connection) -> None:
    """Takes a step each time it is asked for, and tells how long it took, and its CPUs."""
    step(3)
    pipe.send("ready")
    while pipe.recv() == "step":
        started, used = time.perf_counter(), time.process_time()
        step(1)
        pipe.send((time.perf_counter() - started, time.process_time() - used))


COMPARE = {"dp": (compare_dp, (4,)), "pipeline": (compare_pipeline, (2, 4))}


def main(what: str) -> None:
    """Compares as one of the workers, or starts them."""
    if what == "single":
        compare_single()
        return
    compare, sizes = COMPARE[what]
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        with open_world(Settings(timeout_s=120.0)) as world:
            compare(world)
        return
    for size in sizes:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*launcher, sys.argv[0], what], env=environment, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    for each in sys.argv[1:] or (*COMPARE, "single"):
        main(each)
