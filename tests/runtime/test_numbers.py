"""Numbers that are not finite, and gradients that jump, are told with stage and layer; steps may be skipped."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stagewright.cluster import parse_devices
from stagewright.errors import RunError
from stagewright.models import Layered, cross_entropy_sum, make_layered
from stagewright.plan import Plan, Stage
from stagewright.runtime.settings import Settings
from stagewright.scheduling import make_schedule
from stagewright.training import Job, Recipe, train
from stagewright.training.events import read_events

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


def run(model: Layered, folder: Path, spoil, *, on_nan: str = "stop", rate: float = 0.01) -> list[str]:
    """Trains in this process; `spoil` changes the rows of batch BAD. Returns the sentences that were told."""

    def rows(batch: int, start: int, stop: int):
        inputs = torch.rand(ROWS, 6, generator=torch.Generator().manual_seed(batch)) + 0.1
        inputs = spoil(inputs) if batch == BAD else inputs
        return (inputs[start:stop],), (torch.arange(ROWS)[start:stop] % 4,)

    settings = Settings(on_nan=on_nan)
    plan = Plan(model="m", stages=(Stage(layers=model.names, devices=parse_devices("0:0")),), batch=ROWS)
    train(
        make_schedule(plan, agree=settings.agrees), model, data=rows, recipe=Recipe(learning_rate=rate),
        job=Job(steps=24), settings=settings, folder=folder,
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
