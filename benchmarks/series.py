"""The series' own experiment on one card: eight workers, data parallel and 7-1, against torch DDP and the limit.

    python benchmarks/series.py --models vgg16 --contenders limit,ddp,7-1:m2:zero-bubble:hold2:b8 --rounds 3

Each worker has an eighth of the card's multiprocessors (CUDA MPS) and NCCL between them runs over loopback sockets, as
it would between hosts on a modest network. All contenders of a model run in the same processes, in turn, and the median
of the rounds counts. `limit` is each worker training on its own rows with no communication at all.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn

from stagewright.cluster import parse_placement
from stagewright.cost import num_buckets
from stagewright.models import Layered, build_model
from stagewright.plan import Plan, Stage, parse_staleness
from stagewright.runtime.launch.local import launch
from stagewright.runtime.settings import Settings
from stagewright.runtime.warm_up import warm_up
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule
from stagewright.training.loop import synthetic_feed

WORKERS = 8
ROWS = {"alexnet": 256, "vgg16": 32, "resnet50": 64, "tiny-cnn": 64}
CUTS = {"alexnet": "fc1", "vgg16": "fc1", "resnet50": "layer4.0", "tiny-cnn": "fc1"}
STEPS = {"alexnet": 8, "vgg16": 6, "resnet50": 8, "tiny-cnn": 8}
LEARNING_RATE = 0.001
PATIENCE_S = 50.0
"""How long a contender may take: NCCL between workers that share a card can hang, and then shows where each stands."""
LOG_CHARACTERS = 6000
"""How much of a worker's output is shown."""

Step = Callable[[int], list[float]]
"""Runs a number of steps; returns the losses that this worker saw, as sums over its rows."""

Contender = tuple[Step, Callable[[], None]]
"""Its steps, and what ends it."""


def sgd(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)  # type: ignore[arg-type]


def plain(model: Layered, world: World, rows: int, spec: str) -> Contender:
    """The plain loop on this worker's rows; with DDP around it, the recommended way, or on a stream that goes first."""
    name, *details = spec.split(":")
    bucket_mb = next((int(detail) for detail in details if detail.isdigit()), 25)
    module: nn.Module = model.stage(0, model.num_layers).to(world.device)
    feed = synthetic_feed(model, Settings(device=world.device.type), world.device)
    start = world.worker * rows
    inputs, targets = feed.inputs(0, start, start + rows), feed.targets(0, start, start + rows)
    if name == "ddp":
        everyone = world.group("ddp", tuple(range(world.size))) if "first" in details else world.everyone
        # At its best: batch norms keep the statistics of their own rows, as ours do, instead of sending them each step.
        module = nn.parallel.DistributedDataParallel(
            module,
            process_group=everyone,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb,
            broadcast_buffers=False,
        )
    optimizer = sgd(module.parameters())

    def step(number: int) -> list[float]:
        losses = []
        for _ in range(number):
            optimizer.zero_grad(set_to_none=True)
            loss = module(*inputs, *targets)[0]
            (loss / rows).backward()
            optimizer.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    return step, lambda: None


def ours(model: Layered, name: str, world: World, rows: int, spec: str) -> Contender:
    """Our worker, by a spec such as `dp`, `dp:2bw` or `7-1:m4:gpipe:b3`."""
    shape, *details = spec.split(":")
    options = {"m": 1, "policy": "1f1b", "staleness": "0", "b": None, "hold": None, "route": "split"}
    for detail in details:
        if detail[0] in "mb" and detail[1:].isdigit():
            options[detail[0]] = int(detail[1:])
        elif detail.startswith("hold"):
            options["hold"] = int(detail[4:])
        elif detail in ("ssp", "2bw"):
            options["staleness"] = detail
        elif detail[0] == "a" and detail[1:].isdigit():
            options["ahead"] = int(detail[1:])
        elif detail in ("nccl", "staged"):
            options["transport"] = detail
        elif detail == "rotate":
            options["route"] = detail
        else:
            options["policy"] = detail
    plan = plan_of(model, name, shape, rows, options)
    settings = Settings(device=world.device.type, transport=options.get("transport", "auto"))  # type: ignore[arg-type]
    feed = synthetic_feed(model, settings, world.device)
    started = time.perf_counter()
    worker = Worker(make_schedule(plan), model, world, settings, make_optimizer=sgd, feed=feed)
    if is_debugging() and world.worker in (0, 7):
        print(f"{world.worker} {spec}: made in {time.perf_counter() - started:.1f} s", flush=True)
    if "ahead" in options:
        worker.transport.lookahead = int(str(options["ahead"]))
    warm_up(worker)
    if is_debugging() and world.worker in (0, 7):
        print(f"{world.worker} {spec}: warm after {time.perf_counter() - started:.1f} s", flush=True)
    done = [0]
    if "SERIES_TIMELINE" in os.environ:
        shown.append(worker)

    def step(number: int) -> list[float]:
        worker.run(number, done[0])
        losses = [float(worker.figures(batch)[0]) for batch in range(done[0], done[0] + number)]
        done[0] += number
        return losses

    return step, worker.close


shown: list[Worker] = []
"""The worker whose timeline is to be printed, where anyone asked."""


def show_timeline(worker: Worker, step: Step) -> None:
    """Prints when each action of two steps ran on the first and the last worker."""
    worker.stopwatch.start()
    step(2)
    spans = worker.stopwatch.spans()
    worker.stopwatch.on = False
    if worker.world.worker not in (0, WORKERS - 1):
        return
    zero = spans[0].start_s
    text = " ".join(
        f"{s.kind}{s.batch % 10}.{s.microbatch}:{(s.start_s - zero) * 1e3:.0f}-{(s.stop_s - zero) * 1e3:.0f}"
        for s in spans
    )
    print(f"worker {worker.world.worker} from {zero % 1000:.4f} s: {text}", flush=True)


def plan_of(model: Layered, name: str, shape: str, rows: int, options: dict[str, object]) -> Plan:
    """The plan of a shape: `dp` on all eight, or `7-1` cut at the first fully connected layer."""
    placement = f"0:0-{WORKERS - 1}" if shape == "dp" else f"0:0-{WORKERS - 2}.0:{WORKERS - 1}"
    groups = parse_placement(placement)
    cut = model.names.index(CUTS[name])
    parts = (model.names,) if shape == "dp" else (model.names[:cut], model.names[cut:])
    versions = parse_staleness(str(options["staleness"]), len(parts))
    edges = (0, model.num_layers) if shape == "dp" else (0, cut, model.num_layers)
    stages = []
    for number, layers in enumerate(parts):
        names = set(model.parameter_names(edges[number], edges[number + 1]))
        size = sum(p.numel() * 4 for key, p in model.model.named_parameters() if key in names)
        buckets = options["b"] or num_buckets(size)
        stages.append(
            Stage(layers=layers, devices=groups[number], versions=versions[number], num_buckets=int(str(buckets)))
        )
    return Plan(
        model=name, stages=tuple(stages), batch=rows * len(groups[0]), num_microbatches=int(str(options["m"])),
        policy=options["policy"], hold=options["hold"], route=options["route"],
    )  # type: ignore[arg-type]  # fmt: skip


def is_debugging() -> bool:
    """Whether the first and the last worker tell what making a contender took."""
    return "SERIES_DEBUG" in os.environ


def measure(step: Step, number: int, world: World) -> float:
    """Seconds a step, over all workers."""
    synchronize(world)
    started = time.perf_counter()
    step(number)
    synchronize(world)
    return (time.perf_counter() - started) / number


def synchronize(world: World) -> None:
    """Waits until every worker's device is idle."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.control is not None:
        dist.barrier(group=world.control)


def contend(name: str, specs: list[str], rounds: int, world: World) -> list[dict[str, object]]:
    """All contenders for one model, in turn, round after round."""
    rows, steps = ROWS[name], STEPS[name]
    times: dict[str, list[float]] = {spec: [] for spec in specs}
    peaks, losses = {}, {}
    for spec in specs:
        # One contender at a time is in memory while it is measured for its peak; weights are the same for all.
        started = time.perf_counter()
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        before = fresh_memory()
        model = build_model(name, seed=0)
        if spec.startswith(("limit", "ddp")):
            step, close = plain(model, world, rows, spec)
        else:
            step, close = ours(model, name, world, rows, spec)
        losses[spec] = step(3)
        synchronize(world)
        if world.worker == 0:
            print(f"{name} {spec}: first losses {losses[spec]}", flush=True)
        for _ in range(rounds):
            times[spec].append(measure(step, steps, world))
        if shown:
            show_timeline(shown.pop(), step)
        peaks[spec] = torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else 0
        if world.worker == 0:
            rate = rows * WORKERS / statistics.median(times[spec])
            print(f"{name} {spec}: {rate:,.0f} rows/s, {time.perf_counter() - started:.1f} s in all", flush=True)
        close()
        del step, close, model
    faulthandler.cancel_dump_traceback_later()
    return [row(name, spec, rows, times[spec], peaks[spec], losses[spec], world) for spec in specs]


def fresh_memory() -> int:
    """Bytes that are in use before a contender begins."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def row(
    name: str, spec: str, rows: int, times: list[float], peak: int, losses: list[float], world: World
) -> dict[str, object]:
    """One line of the table; losses are summed over the workers that saw them."""
    sums = torch.zeros(3, dtype=torch.float64)
    sums[: len(losses)] += torch.tensor(losses, dtype=torch.float64)
    most = torch.tensor([peak])
    if world.control is not None:
        dist.all_reduce(sums, group=world.control)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=world.control)
    images = rows * (WORKERS - 1 if spec.startswith("7-1") else WORKERS)
    seconds = statistics.median(times)
    return {
        "model": name, "contender": spec, "step_ms": seconds * 1e3, "images_per_s": images / seconds,
        "spread": (max(times) - min(times)) / seconds, "peak_gib": int(most) / 2**30,
        "losses": [round(loss / images, 6) for loss in sums.tolist()],
    }  # fmt: skip


def table(results: list[dict[str, object]]) -> str:
    """The results beside the limit and DDP at its best."""
    lines = [
        f"{'model':10} {'contender':22} {'step':>9} {'images/s':>9} {'spread':>7} {'of limit':>8} {'× DDP':>6} "
        f"{'peak':>9}  losses"
    ]
    for name in dict.fromkeys(str(result["model"]) for result in results):
        own = [result for result in results if result["model"] == name]
        limit = max(
            (float(str(r["images_per_s"])) for r in own if str(r["contender"]).startswith("limit")), default=0.0
        )
        ddp = max((float(str(r["images_per_s"])) for r in own if str(r["contender"]).startswith("ddp")), default=0.0)
        for r in own:
            rate = float(str(r["images_per_s"]))
            share = f"{rate / limit:8.1%}" if limit else f"{'–':>8}"
            times = f"{rate / ddp:6.2f}" if ddp else f"{'–':>6}"
            lines.append(
                f"{name:10} {r['contender']:22} {r['step_ms']:6.1f} ms {rate:9,.0f} {r['spread']:7.1%} {share} {times} "
                f"{r['peak_gib']:5.2f} GiB  {r['losses']}"
            )
    return "\n".join(lines)


def work(arguments: argparse.Namespace) -> None:
    """One of the eight workers."""
    torch.set_num_threads(1)
    results: list[dict[str, object]] = []
    with open_world(Settings(device=arguments.device, timeout_s=40.0)) as world:
        for name in arguments.models.split(","):
            results += contend(name, arguments.contenders.split(","), arguments.rounds, world)
            if world.worker == 0:
                Path(arguments.out).write_text(json.dumps(results))
                print(table(results), flush=True)


def main() -> None:
    """Starts the workers, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="alexnet,vgg16,resnet50")
    parser.add_argument("--contenders", default="limit,ddp,dp:b8,dp:2bw:b8,7-1:m4:zero-bubble:hold4:b8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="series.json")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what the workers wrote is shown then too
    groups = parse_placement(f"0:0-{WORKERS - 1}")
    stage = Stage(layers=("all",), devices=groups[0])
    whole = Plan(model="series", stages=(stage,), batch=WORKERS)
    settings = Settings(device=arguments.device, threads=1, transport="nccl")
    with TemporaryDirectory() as folder:
        try:
            launch([sys.executable, *sys.argv], whole, Path(folder), settings, share=WORKERS)
        finally:
            for log in sorted(Path(folder).glob("logs/*/*/*/std*.log")):
                text = log.read_text()
                if text and (log.parent.name == "0" or any(word in text for word in ("Error", "Timeout", "worker 7"))):
                    print(f"--- {log.parent.name}\n{text[-LOG_CHARACTERS:]}", file=sys.stderr)
    if Path(arguments.out).exists():
        print(table(json.loads(Path(arguments.out).read_text())))


if __name__ == "__main__":
    main()
