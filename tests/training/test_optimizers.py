"""Every optimizer and schedule of recipes equals a few lines of plain PyTorch, with real processes in fp64."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.models import build_model
from stagewright.models.counts import parameter_roles
from stagewright.training.recipes import OPTIMIZERS, Recipe, optimizer_maker
from tests.runtime.modules import MODELS
from tests.runtime.running import run_workers
from tests.training.optimizing import PLAIN, RECIPES, Trial


def run(trials: list[Trial], size: int, folder: Path) -> list[dict[str, Any]]:
    cases, results = folder / "cases.json", folder / f"results-{size}.json"
    cases.write_text(json.dumps([asdict(each) for each in trials]))
    run_workers(size, "tests.training.optimizing", str(folder), str(cases), str(results))
    found: list[dict[str, Any]] = json.loads(results.read_text())
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("placement", "size", "ways"),
    [
        ("1-1", 2, ({}, {"staleness": "ssp", "clip_norm": 0.05})),
        ("2-1", 3, ({"precision": "fp16", "clip_norm": 0.05}, {"then": "1-2"})),
    ],
)
def test_recipes_equal_plain_torch(placement: str, size: int, ways: Any, tmp_path: Path) -> None:
    """As they are, stale and clipped, with a loss scale, and resumed under another plan; the head is tied."""
    trials = [Trial(placement, plain, RECIPES[plain], **how) for plain in PLAIN for how in ways]
    found = run(trials, size, tmp_path)
    assert len(found) == len(trials)
    assert [each for each in found if not each["worst"] < 1e-9] == []


# What is treated apart


def test_roles_follow_from_what_reads_a_parameter() -> None:
    tied = parameter_roles(MODELS["tied words"].layered())
    assert {name: role for name, role in tied.items() if role != "other"} == {
        "embed.weight": "embedding", "a.weight": "matrix", "b.weight": "matrix", "c.weight": "matrix",
    }  # fmt: skip
    gpt = parameter_roles(build_model("gpt-tiny"))
    assert {name for name, role in gpt.items() if role in ("embedding", "head")} != set()
    cnn = parameter_roles(build_model("tiny-cnn"))
    assert "embedding" not in cnn.values()


def kept(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    return sum(each.numel() for each in optimizer.state[parameter].values() if each.dim() > 0)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("rmsprop", "sgd")])
def test_the_states_that_are_counted_are_those_that_are_kept(name: str) -> None:
    matrix, bias = nn.Parameter(torch.ones(64, 32)), nn.Parameter(torch.ones(64))
    optimizer = optimizer_maker(Recipe(optimizer=name))([matrix, bias])
    for each in (matrix, bias):
        each.grad = torch.ones_like(each)
    optimizer.step()
    kind = OPTIMIZERS[name]
    assert kept(optimizer, bias) == 64 * kind.states_of("other")
    assert kept(optimizer, matrix) == pytest.approx(64 * 32 * kind.states_of("matrix"), abs=64 + 32)
