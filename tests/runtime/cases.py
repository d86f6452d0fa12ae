"""Exactness cases, run by workers that are started once: `python -m tests.runtime.cases` under the launcher."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from stagewright.cluster import parse_placement
from stagewright.models import Layered, cross_entropy_sum, make_layered
from stagewright.plan import Plan, Stage, parse_staleness
from stagewright.runtime.dynamic import run_dynamic
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule
from tests.runtime.reference import Tower, rows_of_batch, train_delayed

PLACEMENTS = {
    "1": "0:0", "4": "0:0-3", "2-2": "0:0-1.0:2-3", "3-1": "0:0-2.0:3", "1-3": "0:0.0:1-3", "7-1": "0:0-6.0:7",
    "5-2-1": "0:0-4.0:5-6.0:7", "shared": "0:0-1.0:0-1", "loop": "0:0.0:1.0:0.0:1", "4-1-4": "0:0-3.0:0.0:0-3",
}  # fmt: skip
POLICIES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "dynamic")
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Case:
    placement: str
    policy: str = "1f1b"
    route: str = "split"
    microbatches: int = 4
    batch: int = 24
    optimizer: str = "sgd"
    staleness: str = "0"
    steps: int = 5
    hold: int | None = None
    clip_norm: float | None = None
    num_buckets: int = 2
    recompute: bool = False


def all_cases() -> list[Case]:
    """Everything that the runtime promises to equal the reference in."""
    grid = product(
        [place for place in PLACEMENTS if place != "4-1-4"],
        POLICIES,
        ("split", "rotate"),
        ((4, 24), (3, 23)),
        OPTIMIZERS,
    )
    sync = [Case(place, policy, route, many, rows, opt) for place, policy, route, (many, rows), opt in grid]
    stale = [
        Case(place, policy, route, many, 21, "sgd", staleness, 20)
        for place in ("1", "4", "3-1", "7-1", "5-2-1", "shared")
        for policy in ("1f1b", "dynamic")
        for route in ("split", "rotate")
        for many in (1, 3)
        for staleness in ("ssp", "2bw", ",".join("3" * len(PLACEMENTS[place].split("."))))
    ]
    held = [
        Case("3-1", staleness="ssp", steps=20, microbatches=1, hold=1),
        Case("7-1", staleness="2bw", steps=20, hold=2),
    ]
    clipped = [
        Case(place, clip_norm=0.05, staleness=stale) for place in ("4", "3-1", "5-2-1") for stale in ("0", "ssp")
    ]
    again = [Case("3-1", recompute=True), Case("5-2-1", "zero-bubble", recompute=False, num_buckets=1)]
    # A send that comes after the window of what it sends is over.
    late = [Case("4-1-4", "dynamic", "rotate", 2, staleness="ssp", steps=20, hold=2)]
    return [*late, *sync, *stale, *held, *clipped, *again]


def plan_of(case: Case, names: tuple[str, ...]) -> Plan:
    """The plan of a case, its layers cut evenly."""
    groups = parse_placement(PLACEMENTS[case.placement])
    edges = [len(names) * number // len(groups) for number in range(len(groups) + 1)]
    versions = parse_staleness(case.staleness, len(groups))
    stages = tuple(
        Stage(
            layers=names[edges[n] : edges[n + 1]], devices=devices, versions=versions[n],
            num_buckets=case.num_buckets, recompute=case.recompute,
        )
        for n, devices in enumerate(groups)
    )  # fmt: skip
    return Plan(
        model="tower", stages=stages, batch=case.batch, num_microbatches=case.microbatches, route=case.route,
        policy=case.policy, hold=case.hold,
    )  # fmt: skip


def layered_tower(dtype: torch.dtype = torch.float64) -> Layered:
    """The model of the cases, with its loss."""
    sample, target = torch.zeros(2, 6, dtype=dtype), torch.zeros(2, dtype=torch.long)
    return make_layered(Tower().to(dtype), (sample,), loss=cross_entropy_sum(), targets=(target,))


def run_case(case: Case, world: World) -> float:
    """The largest relative difference of losses and weights from the reference's."""
    layered = layered_tower()
    plan = plan_of(case, layered.names)
    settings = Settings(precision="fp64", clip_norm=case.clip_norm, timeout_s=90.0)

    def rows(batch: int, start: int, stop: int):
        inputs, labels = rows_of_batch(batch, case.batch)
        return (inputs[start:stop],), (labels[start:stop],)

    schedule = make_schedule(plan, agree=settings.agrees)
    worker = Worker(
        schedule, layered, world, settings, make_optimizer=OPTIMIZERS[case.optimizer], feed=FunctionFeed(rows)
    )
    run_dynamic(worker, case.steps) if case.policy == "dynamic" else worker.run(case.steps)
    worker.close()
    return difference(case, plan, worker)


def difference(case: Case, plan: Plan, worker: Worker) -> float:
    """How far this worker's losses and weights are from the reference's."""
    reference = Tower().double()
    stage_of = [
        next(number for number, stage in enumerate(plan.stages) if name.rpartition(".")[0] in stage.layers)
        for name, _ in reference.named_parameters()
    ]
    losses, weights = train_delayed(
        reference, lambda batch: rows_of_batch(batch, case.batch), case.steps, stage_of, plan.versions,
        lambda parameters: OPTIMIZERS[case.optimizer](parameters), case.clip_norm,
    )  # fmt: skip
    names = dict(zip((name for name, _ in reference.named_parameters()), weights))
    worst = 0.0
    for here in worker.hosted.values():
        assert not {**here.runner.held, **here.activations, **here.gradients}, "something is still held"
        for name, parameter in here.weights.newest().state_dict().items():
            worst = max(worst, float((parameter - names[name]).norm() / names[name].norm()))
    last = worker.plan.workers[-1]
    group = worker.world.group("losses", last)
    if worker.world.worker in last:
        sums = torch.stack([worker.figures.get(batch, torch.zeros(1)).double()[0] for batch in range(case.steps)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        expected = torch.tensor(losses, dtype=torch.float64)
        worst = max(worst, float((sums / case.batch - expected).abs().max() / expected.abs().max()))
    return worst


def size_of(case: Case) -> int:
    """How many workers a case needs."""
    return len({id for devices in parse_placement(PLACEMENTS[case.placement]) for id in devices})


def main(cases_file: str, results_file: str) -> None:
    """Runs every case in a file that needs as many workers as there are; the first worker adds what came out."""
    torch.set_num_threads(1)
    cases = [Case(**case) for case in json.loads(Path(cases_file).read_text())]
    results = []
    with open_world(Settings(timeout_s=90.0)) as world:
        for case in (case for case in cases if size_of(case) == world.size):
            worst = torch.tensor([run_case(case, world)], dtype=torch.float64)
            if world.control is not None:
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            results.append({**asdict(case), "worst": worst.item()})
            if world.worker == 0:
                Path(results_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
