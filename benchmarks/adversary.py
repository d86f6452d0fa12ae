"""Random models under random plans against a plain loop: nothing may be wrong without a word.

    python benchmarks/adversary.py [--cases 2000] [--first 0] [--out FOLDER]
    python benchmarks/adversary.py --cases 1 --first 17 --show        one case, with its model and plan

Every case has a model made of random parts (layers used twice, weights that are shared, contexts, functions and hooks
of its own, dropout, norms, frozen and unused parameters …), a random plan (placement, order, route, versions,
microbatches, rows that do not divide, recomputation, clipping, a scaled loss with an overflow) and sometimes a resume
under another plan. Real workers train it for a few steps in double precision; losses, weights and buffers have to
equal those of a plain loop. What the library refuses has to be refused before the first step; where it warns that rows
see one another, only plans that do not divide a batch are compared; where it warns that forward changes a number of
the model's own, none. The status is 1 when a case differs or crashes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.odd_models import OddModel, draw_model, dropped_by_number
from torch import Tensor, nn

from stagewright.cluster import parse_placement
from stagewright.errors import StagewrightError
from stagewright.models import Layered
from stagewright.plan import Plan, Stage
from stagewright.runtime.checkpoint.resuming import restore
from stagewright.runtime.checkpoint.saving import Checkpointer
from stagewright.runtime.checkpoint.storage import find_checkpoint
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule

LIMIT = 1e-9
AT_ONCE = 150
"""Cases that the same workers run one after another: each leaves process groups behind, with a thread or two."""
PLACEMENTS = {
    1: ("0:0", "0:0.0:0"),
    2: ("0:0-1", "0:0.0:1", "0:0-1.0:0-1", "0:0.0:1.0:0.0:1"),
    3: ("0:0-2", "0:0-1.0:2", "0:0.0:1-2", "0:0.0:1.0:2"),
    4: ("0:0-3", "0:0-2.0:3", "0:0.0:1-3", "0:0-1.0:2.0:3", "0:0-1.0:2-3"),
}
POLICIES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "dynamic")
OPTIMIZERS = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.005, eps=1e-4),
    "scheduled": lambda given: _scheduled(torch.optim.AdamW(given, lr=0.005, eps=1e-4)),
}


def _scheduled(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=40)


@dataclass(frozen=True)
class Case:
    """How a model is trained."""

    seed: int
    size: int
    placement: str
    policy: str
    route: str
    microbatches: int
    batch: int
    versions: tuple[int, ...]
    recompute: bool
    buckets: int
    optimizer: str
    clip_norm: float | None
    scaled: bool
    overflow_at: int | None
    steps: int
    resume_at: int | None

    @property
    def divides(self) -> bool:
        """Whether a batch is divided among microbatches or replicas."""
        return self.microbatches > 1 or any(len(group) > 1 for group in parse_placement(self.placement))


def draw_case(seed: int) -> Case:
    """The case of a seed, the same on every worker."""
    draw = random.Random(seed)
    size = draw.choice((1, 2, 2, 3, 4, 4))
    placement = draw.choice(PLACEMENTS[size])
    stages = len(parse_placement(placement))
    versions = draw.choice(((1,) * stages, (1,) * stages, tuple(range(stages, 0, -1)), (2,) * stages, (3,) * stages))
    policy = draw.choice(POLICIES if set(versions) == {1} else ("1f1b", "dynamic"))
    whole = draw.random() < 0.15
    scaled, steps = draw.random() < 0.3, draw.choice((4, 6, 8))
    return Case(
        seed=seed, size=size, placement="0:0" if whole and size == 1 else placement, policy=policy,
        route=draw.choice(("split", "split", "rotate")), microbatches=1 if whole else draw.choice((1, 2, 3, 4)),
        batch=draw.choice((3, 5, 7, 8, 11)), versions=versions[: 1 if whole and size == 1 else None],
        recompute=draw.random() < 0.25, buckets=draw.choice((1, 2, 3)), optimizer=draw.choice(tuple(OPTIMIZERS)),
        clip_norm=draw.choice((None, None, 0.05)), scaled=scaled,
        overflow_at=draw.randrange(steps) if scaled and draw.random() < 0.5 else None, steps=steps,
        resume_at=steps // 2 if draw.random() < 0.2 else None,
    )  # fmt: skip


def plan_of(case: Case, layered: Layered) -> Plan:
    """The plan of a case, cut at random, with or without sharded states; after a resume it may be another."""
    groups, draw = parse_placement(case.placement), random.Random(case.seed + 1)
    if len(layered.cuts()) < len(groups) - 1:  # too few places: everything in one stage on the same devices
        everyone = tuple(sorted({id for group in groups for id in group}))
        groups, case = (everyone,), replace(case, versions=case.versions[:1])
    sharing = random.Random(case.seed + 2)
    edges = [0, *sorted(draw.sample(layered.cuts(), len(groups) - 1)), layered.num_layers]
    stages = tuple(
        Stage(
            layers=layered.names[edges[number] : edges[number + 1]], devices=devices, versions=case.versions[number],
            num_buckets=case.buckets, recompute=case.recompute, shard_optimizer=sharing.random() < 0.5,
        )
        for number, devices in enumerate(groups)
    )  # fmt: skip
    return Plan(
        model="odd", stages=stages, batch=case.batch, num_microbatches=min(case.microbatches, case.batch),
        route=case.route, policy=case.policy,
    )  # fmt: skip


# One case, as one of its workers


def run_case(case: Case, world: World) -> dict[str, Any]:
    """What became of a case: equal, differs, refused or told, and how far off it was."""
    odd = draw_model(case.seed)
    about = {"seed": case.seed, "parts": odd.parts}
    if "batch_norm" in odd.parts:  # infinite rows would stay in its statistics, in any loop
        case = replace(case, overflow_at=None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            layered = odd.layered()
        except StagewrightError as fault:
            return {**about, "kind": "refused", "why": fault.what}
    words = [str(each.message) for each in told] + ["batch norm"] * ("batch_norm" in odd.parts)
    matters = ("stages do not do", *(("rows", "batch norm") if case.divides else ()))
    matters += ("linear",) if case.divides or case.scaled else ()
    if any(word in text for text in words for word in matters):
        return {**about, "kind": "told", "why": words[0]}
    try:
        plan = plan_of(case, layered)
        schedule = make_schedule(plan, agree=settings_of(case).agrees)
    except StagewrightError as fault:
        return {**about, "kind": "refused", "why": fault.what}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(_shared(scratch, world))
        worker = trained(case, odd, layered, schedule, world, folder)
        worst = difference(case, odd, layered, plan, worker)
    return {**about, "kind": "equal" if worst < LIMIT else "differs", "worst": worst}


def _shared(text: str, world: World) -> str:
    """The first worker's text."""
    told = [text]
    if world.control is not None:
        dist.broadcast_object_list(told, 0, group=world.control)
    return told[0]


def settings_of(case: Case) -> Settings:
    return Settings(
        precision="fp16" if case.scaled else "fp64", clip_norm=case.clip_norm, timeout_s=60.0, scale_growth_steps=2,
        on_nan="skip" if case.overflow_at is not None else "stop", seed=case.seed,
    )  # fmt: skip


def trained(case: Case, odd: OddModel, layered: Layered, schedule: Any, world: World, folder: Path) -> Worker:
    """A worker that has run all steps, over a checkpoint where the case says so."""
    make = OPTIMIZERS[case.optimizer]

    def rows(batch: int, start: int, stop: int) -> Any:
        return tuple([each[start:stop] for each in part] for part in odd.rows(batch, case.batch, case.overflow_at))

    def worker_of(layered: Layered, schedule: Any) -> Worker:
        return Worker(schedule, layered, world, settings_of(case), make_optimizer=make, feed=FunctionFeed(rows))

    worker = worker_of(layered, schedule)
    first = case.steps if case.resume_at is None else case.resume_at
    run(worker, 0, first)
    if first == case.steps:
        worker.close()
        return worker
    worker.close()
    checkpointer = Checkpointer(worker, layered, folder, every=None, keep=1)
    checkpointer.save(first)
    checkpointer.close()
    if world.control is not None:
        dist.barrier(group=world.control)
    again = odd.layered()
    other = replace(case, seed=case.seed + 7) if set(case.versions) == {1} else case
    worker = worker_of(again, make_schedule(plan_of(other, again), agree=settings_of(case).agrees))
    found = find_checkpoint(folder, print)
    assert found is not None
    restore(worker, *found, options=True)
    run(worker, first, case.steps - first)
    worker.close()
    return worker


def run(worker: Worker, first: int, steps: int) -> None:
    worker.run(steps, first)


def difference(case: Case, odd: OddModel, layered: Layered, plan: Plan, worker: Worker) -> float:
    """The largest relative difference of this worker's losses, weights and buffers from a plain loop's."""
    losses, expected = plain_loop(case, odd, layered, plan)
    worst = 0.0
    for here in worker.replicas.values():
        for name, found in here.weights.newest().state_dict().items():
            wanted = expected[name].double()
            worst = max(worst, float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-2)))
    last = worker.plan.workers[-1]
    group = worker.world.group("losses", last)
    if worker.world.worker in last and case.resume_at is None:
        sums = torch.stack([worker.figures(batch) for batch in range(case.steps)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        wanted = torch.tensor(losses, dtype=torch.float64)
        gaps = (sums[:, 0] / sums[:, 1].clamp(min=1) - wanted)[wanted.isfinite()].abs()
        worst = max([worst, *(gaps / wanted[wanted.isfinite()].abs().clamp(min=1e-2)).tolist()])
    return worst if worst == worst else float("inf")


def plain_loop(case: Case, odd: OddModel, layered: Layered, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, weights and buffers of one process; batch n sees a parameter of K versions after update n − K."""
    versions: dict[str, int] = {}
    first = 0
    for stage in plan.stages:
        names = layered.parameter_names(first, first + len(stage.layers))
        versions |= {name: max(versions.get(name, 1), stage.versions) for name in names}
        first += len(stage.layers)
    model = odd.build()
    named = dict(model.named_parameters())
    made = OPTIMIZERS[case.optimizer](list(named.values()))
    optimizer, scheduler = made if isinstance(made, tuple) else (made, None)
    history, losses = [{name: each.detach().clone() for name, each in named.items()}], []
    for batch in range(case.steps):
        now = history[-1]
        for name, parameter in named.items():
            parameter.data = history[max(0, batch - versions.get(name, 1) + 1)][name].clone()
        optimizer.zero_grad()
        inputs, targets = odd.rows(batch, case.batch, case.overflow_at)
        with dropped_by_number(model, case.seed, batch, case.batch) if odd.drops else nullcontext():
            outputs = model(*inputs)
        loss = odd.mean(outputs, *targets)
        loss.backward()
        gradients = [each.grad for each in named.values() if each.grad is not None]
        finite = all(bool(each.isfinite().all()) for each in gradients)
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(gradients_of(named), case.clip_norm)
        for name, parameter in named.items():
            parameter.data = now[name].clone()
        if finite or case.overflow_at is None:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        history.append({name: each.detach().clone() for name, each in named.items()})
        losses.append(loss.item())
    return losses, {**model.state_dict(), **history[-1]}


def gradients_of(named: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    return [each for each in named.values() if each.grad is not None]


def work(cases: str, results: str) -> None:
    """Runs the cases of a file, one after another; worker 0 adds a line for each."""
    torch.set_num_threads(1)
    with open_world(Settings(timeout_s=60.0)) as world, Path(results).open("a") as out:
        for seed in json.loads(Path(cases).read_text()):
            if world.worker == 0:
                print(json.dumps({"seed": seed, "kind": "started"}), file=out, flush=True)
            found = run_case(draw_case(seed), world)
            worst = torch.tensor([found.get("worst", 0.0)], dtype=torch.float64)
            if world.control is not None:
                dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=world.control)
            if "worst" in found:
                found |= {"worst": worst.item(), "kind": "equal" if worst.item() < LIMIT else "differs"}
            if world.worker == 0:
                print(json.dumps(found), file=out, flush=True)


# All cases


def run_all(seeds: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """What became of each case; workers that crash are started anew after the case that they crashed in."""
    found: list[dict[str, Any]] = []
    for size in sorted({draw_case(seed).size for seed in seeds}):
        left = [seed for seed in seeds if draw_case(seed).size == size]
        while left:
            some = left[:AT_ONCE]
            results = folder / f"results-{size}-{left[0]}.jsonl"
            results.unlink(missing_ok=True)
            (folder / "cases.json").write_text(json.dumps(some))
            done = start(size, folder / "cases.json", results)
            lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
            ended = [line for line in lines if line["kind"] != "started"]
            found += ended
            if len(ended) < len(some):
                found.append({"seed": some[len(ended)], "kind": "crashed", "why": done.stderr[:6000]})
            left = left[min(len(ended) + 1, len(some)) :]
    return found


def start(size: int, cases: Path, results: Path) -> subprocess.CompletedProcess[str]:
    """Runs cases with so many workers."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}",
        "-m", "benchmarks.adversary", "--worker", str(cases), str(results),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    root = Path(__file__).parents[1]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=7200)


def show(found: list[dict[str, Any]]) -> Iterator[str]:
    """The table of what became of all cases, and every one that is wrong."""
    kinds = Counter(each["kind"] for each in found)
    yield f"{len(found):,} cases: " + ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
    worst = max((each["worst"] for each in found if each["kind"] == "equal"), default=0.0)
    yield f"equal to {worst:.1e} at worst"
    parts = Counter(part for each in found if each["kind"] == "equal" for part in set(each["parts"]))
    yield "equal, by part: " + ", ".join(f"{part} {number}" for part, number in parts.most_common())
    reasons = Counter(each["why"].split(":")[0][:80] for each in found if each["kind"] in ("refused", "told"))
    yield from (f"  {number:4d} × {reason}" for reason, number in reasons.most_common(20))
    for each in found:
        if each["kind"] in ("differs", "crashed"):
            yield f"{each['kind']}: {json.dumps(each)[:2000]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--worker", nargs=2)
    given = parser.parse_args()
    if given.worker:
        work(*given.worker)
        return
    seeds = range(given.first, given.first + given.cases)
    if given.show:
        print("\n".join(f"{draw_case(seed)}\n{draw_model(seed).parts}" for seed in seeds))
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = run_all(seeds, folder)
        (folder / "found.json").write_text(json.dumps(found, indent=1))
    print("\n".join(show(found)))
    sys.exit(any(each["kind"] in ("differs", "crashed") for each in found))


if __name__ == "__main__":
    main()
