"""Recipes against a few lines of plain PyTorch: `-m tests.training.optimizing FOLDER CASES.json RESULTS.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import lr_scheduler

from stagewright.runtime.checkpoint.resuming import restore
from stagewright.runtime.checkpoint.saving import Checkpointer
from stagewright.runtime.checkpoint.storage import find_checkpoint
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.run_folder import RunFolder
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule
from stagewright.training.config import Job
from stagewright.training.listener import Listener
from stagewright.training.loop import Run, maker_of
from stagewright.training.recipes import Recipe
from tests.runtime.cases import Case, plan_of, size_of
from tests.runtime.modules import MODELS
from tests.runtime.reference import train_plainly

RATE, STEPS, BATCH = 0.02, 6, 8
MODEL = "tied words"


@dataclass(frozen=True)
class Trial:
    """A recipe, by the names of its fields, on a plan."""

    placement: str
    plain: str
    """The function below that says the same in plain PyTorch."""
    recipe: dict[str, Any] = field(default_factory=dict)
    staleness: str = "0"
    clip_norm: float | None = None
    precision: str = "fp64"
    then: str | None = None
    """The placement under which the second half goes on, from a checkpoint."""


class Together:
    """Several optimizers, or several schedulers, as one."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def zero_grad(self) -> None:
        for each in self.parts:
            each.zero_grad()

    def step(self) -> None:
        for each in self.parts:
            each.step()


def split(parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """The embedding, which is the head too; matrices; norms and biases."""
    embedding, *rest = parameters
    return [embedding], [each for each in rest if each.dim() == 2], [each for each in rest if each.dim() < 2]


def adamw(parameters: Sequence[nn.Parameter]) -> Any:
    embedding, matrices, small = split(parameters)
    groups = [{"params": matrices}, {"params": [*embedding, *small], "weight_decay": 0.0}]
    made = optim.AdamW(groups, lr=RATE, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    return made, lr_scheduler.CosineAnnealingLR(made, STEPS, eta_min=0.1 * RATE)


def adamw_on_all(parameters: Sequence[nn.Parameter]) -> Any:
    made = optim.AdamW(parameters, lr=RATE, weight_decay=0.1)
    return made, lr_scheduler.LinearLR(made, 1.0, 0.25, STEPS)


def warmed_up(step: int) -> float:
    """Two steps up, two steps level, two steps down."""
    return (0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0)[step]


def muon(parameters: Sequence[nn.Parameter]) -> Any:
    embedding, matrices, small = split(parameters)
    first = optim.Muon(matrices, lr=RATE, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [*embedding, *small], "weight_decay": 0.0}]
    second = optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    falls = [lr_scheduler.LambdaLR(each, warmed_up) for each in (first, second)]
    return Together(first, second), Together(*falls)


def adafactor(parameters: Sequence[nn.Parameter]) -> Any:
    embedding, matrices, small = split(parameters)
    groups = [{"params": matrices}, {"params": [*embedding, *small], "weight_decay": 0.0}]
    return optim.Adafactor(groups, lr=RATE, weight_decay=0.1)


PLAIN: dict[str, Callable[[Sequence[nn.Parameter]], Any]] = {
    "adamw": adamw, "adamw on all": adamw_on_all, "muon": muon, "adafactor": adafactor,
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "adamw": {
        "optimizer": "adamw", "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "decay": "cosine", "decay_floor": 0.1,
    },
    "adamw on all": {"optimizer": "adamw", "decay_all": True, "decay": "linear", "decay_floor": 0.25},
    "muon": {
        "optimizer": "muon", "momentum": 0.95, "beta2": 0.95, "decay": "wsd", "decay_share": 1 / 3, "warm_up_steps": 2,
    },
    "adafactor": {"optimizer": "adafactor"},
}  # fmt: skip


def rows(batch: int, start: int, stop: int) -> Any:
    inputs, labels = MODELS[MODEL].rows(batch, BATCH)
    return tuple([each[start:stop] for each in part] for part in (inputs, labels))


def run(trial: Trial, placement: str, first: int, stop: int, world: World, folder: Path) -> Worker:
    """Some steps of a trial as training takes them, from the last checkpoint where it is not the first."""
    layered = MODELS[MODEL].layered()
    case = Case(placement, microbatches=2, batch=BATCH, staleness=trial.staleness, model=MODEL)
    settings = Settings(
        precision=trial.precision,
        clip_norm=trial.clip_norm,
        timeout_s=60.0,
        loss_scale=1024.0,  # type: ignore[arg-type]
    )
    schedule = make_schedule(plan_of(case, layered.names, layered.cuts()), agree=settings.agrees)
    recipe = Recipe(learning_rate=RATE, weight_decay=0.1, total_steps=STEPS, **trial.recipe)
    job = Job(steps=stop, first_step=first, warm_up=0, log_every=2)
    run = Run(schedule, layered, job, settings, recipe, rows, None, "here", "measured", RunFolder(folder, ""), world)
    worker = Worker(schedule, layered, world, settings, make_optimizer=maker_of(run), feed=FunctionFeed(rows))
    if first:
        found = find_checkpoint(folder, print)
        assert found is not None
        assert restore(worker, *found, options=False) == first
    listener = Listener(run, worker, None, None)
    worker.run(stop - first, first)
    worker.close()
    listener.close()
    if stop < STEPS:
        checkpointer = Checkpointer(worker, layered, folder, every=None, keep=9)
        checkpointer.save(stop)
        checkpointer.close()
        assert [saved.fault for saved in checkpointer.news()] == [None]
    return worker


def worst_of(trial: Trial, worker: Worker) -> float:
    """The largest relative difference of a weight from the plain loop's."""
    model = MODELS[MODEL]
    plain, layered = model.make(), model.layered()
    versions: dict[str, int] = {}
    first = 0
    for stage in worker.plan.stages:
        for name in layered.parameter_names(first, first + len(stage.layers)):
            versions[name] = max(versions.get(name, 1), stage.versions)
        first += len(stage.layers)

    def loss_of(batch: int) -> torch.Tensor:
        inputs, targets = model.rows(batch, BATCH)
        return model.mean(plain(*inputs), *targets)

    _, expected = train_plainly(plain, loss_of, STEPS, versions, PLAIN[trial.plain], trial.clip_norm)
    worst = 0.0
    for here in worker.replicas.values():
        for name, found in here.weights.newest().named_parameters():
            wanted = expected[here.names.get(name, name)]
            worst = max(worst, float((found - wanted).norm() / wanted.norm()))
    return worst


def main(folder: str, cases: str, results: str) -> None:
    """Runs every trial that needs as many workers as there are."""
    torch.set_num_threads(1)
    trials = [Trial(**each) for each in json.loads(Path(cases).read_text())]
    told = []
    with open_world(Settings(timeout_s=60.0)) as world:
        for number, trial in enumerate(trials):
            if size_of(Case(trial.placement)) != world.size:
                continue
            here, half = Path(folder) / f"{number}", STEPS if trial.then is None else STEPS // 2
            here.mkdir(exist_ok=True)
            worker = run(trial, trial.placement, 0, half, world, here)
            if trial.then is not None:
                dist.barrier(group=world.control)
                worker = run(trial, trial.then, half, STEPS, world, here)
            worst = torch.tensor([worst_of(trial, worker)], dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=world.control)
            told.append({**asdict(trial), "worst": worst.item()})
        if world.worker == 0:
            Path(results).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
