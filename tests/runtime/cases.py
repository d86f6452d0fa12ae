"""Exactness cases, run by workers that are started once: `python -m tests.runtime.cases` under the launcher."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stagewright.cluster import parse_placement
from stagewright.models import Layered
from stagewright.plan import Plan, Stage, parse_staleness
from stagewright.runtime.checkpoint.resuming import restore
from stagewright.runtime.checkpoint.saving import Checkpointer
from stagewright.runtime.checkpoint.storage import find_checkpoint
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.replica import Replica
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule
from stagewright.training.recipes import Recipe, optimizer_maker
from tests.runtime.modules import MODELS, ByNumber
from tests.runtime.reference import train_corrected, train_plainly

PLACEMENTS = {
    "1": "0:0", "4": "0:0-3", "2-2": "0:0-1.0:2-3", "3-1": "0:0-2.0:3", "1-3": "0:0.0:1-3", "7-1": "0:0-6.0:7",
    "2-1-1": "0:0-1.0:2.0:3", "2": "0:0-1", "3": "0:0-2", "1-1": "0:0.0:1", "2-1": "0:0-1.0:2", "1-2": "0:0.0:1-2",
    "5-2-1": "0:0-4.0:5-6.0:7", "shared": "0:0-1.0:0-1", "loop": "0:0.0:1.0:0.0:1", "4-1-4": "0:0-3.0:0.0:0-3",
}  # fmt: skip
DEVICE = os.environ.get("STAGEWRIGHT_TEST_DEVICE", "cpu")
"""Where the workers of a case compute."""
TRANSPORT: Any = os.environ.get("STAGEWRIGHT_TEST_TRANSPORT", "auto")
POLICIES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "dynamic")


def scheduled(parameters: Any) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A rate that rises and falls, other than at a constant pace."""
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=30)


OPTIMIZERS = {
    "scheduled": scheduled,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "muon": lambda parameters: optimizer_maker(Recipe(optimizer="muon", learning_rate=0.01))(parameters),
}
STATES = {"scheduled": 2, "sgd": 1, "adamw": 2, "adagrad": 1}
"""How many numbers those that move each number by itself keep for each."""


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
    shard_optimizer: bool = False
    model: str = "tower"
    precision: str = "fp64"
    """With fp16 numbers stay double, which autocast leaves alone, but the loss is scaled and steps may be skipped."""
    overflow_at: int | None = None
    """The batch whose inputs are infinite."""
    correct: str = "none"
    """Of stale weights, by stage where there are several."""
    saved_after: int | None = None
    """The step after which a second worker goes on from a checkpoint."""


def all_cases() -> list[Case]:
    """Everything that the runtime promises to equal the reference in."""
    grid = product(
        [place for place in PLACEMENTS if place not in ("4-1-4", "2-1-1", "2", "3", "1-1", "2-1", "1-2")],
        POLICIES,
        ("split", "rotate"),
        ((4, 24), (3, 23)),
        ("scheduled", "sgd", "adamw"),
    )
    sync = [Case(place, policy, route, many, rows, opt) for place, policy, route, (many, rows), opt in grid]
    stale = [
        Case(place, policy, route, many, 21, "sgd", staleness, 20)
        for place in ("1", "4", "3-1", "7-1", "5-2-1", "shared", "loop")
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
        Case(place, clip_norm=0.05, staleness=stale)
        for place in ("4", "3-1", "5-2-1", "shared", "loop")
        for stale in ("0", "ssp")
    ]
    again = [Case("3-1", recompute=True), Case("5-2-1", "zero-bubble", recompute=False, num_buckets=1)]
    # A send that comes after the window of what it sends is over.
    late = [Case("4-1-4", "dynamic", "rotate", 2, staleness="ssp", steps=20, hold=2)]
    return [*late, *sync, *stale, *held, *clipped, *again]


def plan_of(case: Case, names: tuple[str, ...], cuts: tuple[int, ...] | None = None) -> Plan:
    """The plan of a case, its layers cut evenly, or at some of the given cuts."""
    groups = parse_placement(PLACEMENTS[case.placement])
    places = range(len(names)) if cuts is None else (0, *cuts)
    edges = [*(places[len(places) * number // len(groups)] for number in range(len(groups))), len(names)]
    versions = parse_staleness(case.staleness, len(groups))
    stages = tuple(
        Stage(
            layers=names[edges[n] : edges[n + 1]], devices=devices, versions=versions[n],
            num_buckets=case.num_buckets, recompute=case.recompute,
            shard_optimizer=case.shard_optimizer,
        )
        for n, devices in enumerate(groups)
    )  # fmt: skip
    return Plan(
        model="tower", stages=stages, batch=case.batch, num_microbatches=case.microbatches, route=case.route,
        policy=case.policy, hold=case.hold,
    )  # fmt: skip


def layered_tower(dtype: torch.dtype = torch.float64) -> Layered:
    """The model of the matrix, with its loss."""
    return MODELS["tower"].layered(dtype)


def run_case(case: Case, world: World, folder: Path) -> float:
    """The largest relative difference of losses and weights from the reference's; checkpoints are in the folder."""
    model = MODELS[case.model]
    layered = model.layered()
    plan = plan_of(case, layered.names, layered.cuts())
    settings = Settings(
        precision=case.precision, device=DEVICE, transport=TRANSPORT, clip_norm=case.clip_norm, timeout_s=90.0,
        scale_growth_steps=2, on_nan="skip" if case.overflow_at is not None else "stop",
        correct=tuple(case.correct.split(",")), rescale_steps=4,
    )  # fmt: skip

    def rows(batch: int, start: int, stop: int):
        return tuple([each[start:stop] for each in part] for part in rows_of(case, batch))

    schedule = make_schedule(plan, agree=settings.agrees)
    worker = Worker(
        schedule, layered, world, settings, make_optimizer=OPTIMIZERS[case.optimizer], feed=FunctionFeed(rows)
    )
    worker.run(case.saved_after or case.steps)
    worker.close()
    if case.saved_after is not None:
        layered = model.layered()
        worker = taken_up(case, worker, layered, folder, FunctionFeed(rows))
        worker.run(case.steps - case.saved_after, case.saved_after)
        worker.close()
    return difference(case, layered, worker)


def taken_up(case: Case, worker: Worker, layered: Layered, folder: Path, feed: FunctionFeed) -> Worker:
    """Another worker that goes on from where this one stands, by way of a checkpoint."""
    checkpointer = Checkpointer(worker, layered, folder, every=None, keep=1)
    checkpointer.save(case.saved_after or 0)
    checkpointer.close()
    assert [saved.fault for saved in checkpointer.news()] == [None]
    maker, world = OPTIMIZERS[case.optimizer], worker.world
    again = Worker(worker.schedule, layered, world, worker.settings, make_optimizer=maker, feed=feed)
    found = find_checkpoint(folder, print)
    assert found is not None
    restore(again, *found, options=True)
    again._figures |= worker._figures
    return again


def rows_of(case: Case, batch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The inputs and targets of a whole batch."""
    inputs, targets = MODELS[case.model].rows(batch, case.batch)
    return [each * torch.inf if batch == case.overflow_at else each for each in inputs], list(targets)


def difference(case: Case, layered: Layered, worker: Worker) -> float:
    """How far this worker's losses, weights and buffers are from those of a plain loop."""
    losses, expected = reference(case, layered, worker.plan)
    worst = 0.0
    for here in worker.replicas.values():
        if here.reducer.is_sharing and case.optimizer in STATES:
            _check_share(here, STATES[case.optimizer])
        assert not {**here.runner.held, **worker.exchange.arriving, **worker.exchange.kept}, "something is still held"
        with ExitStack() as stack:
            for versions in (here.weights, *here.tied):
                stack.enter_context(versions.uncorrected())
            for name, found in here.weights.newest().state_dict().items():
                found, wanted = found.cpu(), expected[here.names.get(name, name)]
                worst = max(worst, float((found - wanted).double().norm() / wanted.double().norm().clamp(min=1e-9)))
    last = worker.plan.workers[-1]
    group = worker.world.group("losses", last)
    if worker.world.worker in last:
        sums = torch.stack([worker.figures(batch) for batch in range(case.steps)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        sums, wanted = sums.cpu(), torch.tensor(losses, dtype=torch.float64)
        gaps = (sums[:, 0] / sums[:, 1] - wanted)[wanted.isfinite()]
        worst = max(worst, float(gaps.abs().max() / wanted[wanted.isfinite()].abs().max()))
    return worst


def _check_share(here: Replica, num_states: int) -> None:
    """A replica keeps the states of its share alone: of 1/r of all numbers, give or take one a bucket."""
    states = [each for state in here.weights.optimizer.state.values() for each in state.values()]
    found = sum(each.numel() for each in states if torch.is_tensor(each) and each.dim())
    whole, replicas = sum(each.numel() for each in here.weights.parameters[0]), here.plan.replicas[here.stage]
    most = whole // replicas + here.plan.stages[here.stage].num_buckets
    assert 0 < found <= num_states * most, f"{found} numbers of states for {whole} weights of {replicas} replicas"


def reference(case: Case, layered: Layered, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, weights and buffers of a plain loop with the plan's delays."""
    model, first, versions, correct = MODELS[case.model], 0, dict[str, int](), dict[str, str]()
    wanted = case.correct.split(",")
    for number, stage in enumerate(plan.stages):
        names = layered.parameter_names(first, first + len(stage.layers))
        versions |= {name: max(versions.get(name, 1), stage.versions) for name in names}
        correct = {**dict.fromkeys(names, wanted[min(number, len(wanted) - 1)]), **correct}
        first += len(stage.layers)
    plain = model.make()

    def loss_of(batch: int) -> torch.Tensor:
        inputs, targets = rows_of(case, batch)
        with ByNumber(batch, case.batch) if model.drops else nullcontext():
            outputs = plain(*inputs)
        return model.mean(outputs, *targets)

    how: Any = {"clip_norm": case.clip_norm, "skips": case.overflow_at is not None}
    maker = OPTIMIZERS[case.optimizer]
    if case.correct == "none":
        losses, weights = train_plainly(plain, loss_of, case.steps, versions, maker, **how)
    else:
        losses, weights = train_corrected(plain, loss_of, case.steps, versions, correct, maker, **how)
    return losses, {**plain.state_dict(), **weights}


def size_of(case: Case) -> int:
    """How many workers a case needs."""
    return len({id for devices in parse_placement(PLACEMENTS[case.placement]) for id in devices})


def main(cases_file: str, results_file: str) -> None:
    """Runs every case in a file that needs as many workers as there are; the first worker adds what came out."""
    torch.set_num_threads(1)
    cases = [Case(**case) for case in json.loads(Path(cases_file).read_text())]
    results = []
    with open_world(Settings(timeout_s=90.0, device=DEVICE)) as world:
        for number, case in enumerate(case for case in cases if size_of(case) == world.size):
            folder = Path(results_file).with_suffix("") / str(number)
            worst = torch.tensor([run_case(case, world, folder)], dtype=torch.float64)
            if world.control is not None:
                dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=world.control)
            results.append({**asdict(case), "worst": worst.item()})
            if world.worker == 0:
                Path(results_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
