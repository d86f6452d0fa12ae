"""Numbers that are not finite, and gradients that jump, are told with stage and layer; steps may be skipped."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stagewright.cluster import parse_devices
from stagewright.errors import RunError
from stagewright.models import Layered, cross_entropy_sum, make_layered
from stagewright.plan import Plan, Stage
from stagewright.runtime.checkpoint.resuming import whole_model
from stagewright.runtime.checkpoint.saving import Checkpointer
from stagewright.runtime.checkpoint.storage import checkpoints_in, find_checkpoint
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import open_world
from stagewright.scheduling import make_schedule
from stagewright.training.config import Job
from stagewright.training.events import read_events
from stagewright.training.recipes import Recipe
from stagewright.training.start import train
from tests.runtime.cases import Case, layered_tower
from tests.runtime.resuming import BATCH, go_on

ROWS, BAD = 8, 20


class Root(nn.Module):
    """Square roots: not finite below 0."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.sqrt()


def layered(*inside: nn.Module) -> Layered:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *inside, nn.Linear(6, 4))
    return make_layered(
        model, (torch.ones(2, 6),), loss=cross_entropy_sum(), targets=(torch.zeros(2, dtype=torch.long),)
    )


def run(
    model: Layered, folder: Path, spoil, *, on_nan: str = "stop", rate: float = 0.01, steps: int = 24, every=None
) -> list[str]:
    """Trains in this process; `spoil` changes the rows of batch BAD. Returns the sentences that were told."""

    def rows(batch: int, start: int, stop: int):
        inputs = torch.rand(ROWS, 6, generator=torch.Generator().manual_seed(batch)) + 0.1
        inputs = spoil(inputs) if batch == BAD else inputs
        return (inputs[start:stop],), (torch.arange(ROWS)[start:stop] % 4,)

    settings = Settings(on_nan=on_nan)
    plan = Plan(model="m", stages=(Stage(layers=model.names, devices=parse_devices("0:0")),), batch=ROWS)
    train(
        make_schedule(plan, agree=settings.agrees), model, data=rows, recipe=Recipe(learning_rate=rate),
        job=Job(steps=steps, checkpoint_every=every, keep=2), settings=settings, folder=folder,
    )  # fmt: skip
    return [event["text"] for _, event in read_events(folder) if event["event"] == "numbers"]


def test_data_that_are_not_finite_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"the data of batch {BAD}, microbatch 0, are not finite"):
        run(layered(), tmp_path, lambda rows: rows * math.nan)


def test_the_layer_that_makes_nan_is_named(tmp_path: Path) -> None:
    model = layered(Root())
    with torch.no_grad():
        model.model[0].weight.copy_(torch.eye(6))
        model.model[0].bias.zero_()
    with pytest.raises(
        RunError, match=f"layer 1 made numbers that are not finite: stage 0 in batch {BAD}, microbatch 0"
    ):
        run(model, tmp_path, lambda rows: -rows, rate=0.0)


def test_a_bad_step_is_skipped_and_told(tmp_path: Path) -> None:
    model = layered()
    told = run(model, tmp_path, lambda rows: rows * math.inf, on_nan="skip")
    assert [text for text in told if "skipped" in text and f"batch {BAD}" in text]
    assert all(torch.isfinite(parameter).all() for parameter in model.model.parameters())


def test_a_jump_of_the_gradient_norm_is_told_with_its_layer(tmp_path: Path) -> None:
    told = run(layered(), tmp_path, lambda rows: rows * 1e4)
    assert len(told) == 1
    assert "the gradient norm of stage 0 jumped" in told[0]
    assert f"in batch {BAD}, most of it in layer 1" in told[0]


def test_ordinary_numbers_are_not_told(tmp_path: Path) -> None:
    assert run(layered(), tmp_path, lambda rows: rows) == []


def test_skipping_ends_where_the_weights_themselves_are_lost(tmp_path: Path) -> None:
    """Nothing brings them back; what was saved before stays, and nothing is saved in its place."""
    model = layered()

    def spoil(rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.model[0].weight.fill_(math.nan)
        return rows

    with pytest.raises(RunError, match=f"the weights of layer 0 in stage 0 are not finite in batch {BAD}, so that"):
        run(model, tmp_path, spoil, on_nan="skip", every=2, steps=200)
    deadline = time.monotonic() + 30  # the last one may still be on its way to the disk
    while (found := find_checkpoint(tmp_path, print)) is not None and found[1]["step"] < BAD - 1:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    assert found is not None
    assert BAD - 1 <= found[1]["step"] <= BAD
    assert all(torch.isfinite(tensor).all() for tensor in whole_model(found[0]).values())


def test_skipping_ends_where_it_has_no_end(tmp_path: Path) -> None:
    """Weights that are finite and yet beyond all use: good checkpoints are kept for as long as steps are skipped."""
    model = layered()

    def spoil(rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.model[0].weight.fill_(1e38)
        return rows

    with pytest.raises(RunError, match=r"made numbers that are not finite.*as in the 99 steps before it"):
        run(model, tmp_path, spoil, on_nan="skip", every=2, steps=1000)
    good = [path for path in checkpoints_in(tmp_path) if whole_model(path)["0.weight"].max() < 1e30]
    assert good


def test_a_checkpoint_of_weights_that_are_not_finite_is_none(tmp_path: Path) -> None:
    with open_world(Settings()) as alone:
        worker = go_on(Case("1", batch=BATCH), tmp_path, alone)
        with torch.no_grad():
            next(worker.replicas[0].weights.newest().parameters()).view(-1)[0] = math.inf
        checkpointer = Checkpointer(worker, layered_tower(), tmp_path, every=None, keep=1)
        checkpointer.save(99)
        checkpointer.close()
    (saved,) = checkpointer.news()
    assert "has numbers that are not finite" in str(saved.fault)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000003"]
