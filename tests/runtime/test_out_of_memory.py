"""A worker that runs out of memory all the same says what was predicted, what it held, and what to change.

That there is no memory is made up: the optimizer of one worker raises what torch raises then.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from stagewright.errors import RunError
from stagewright.memory import StageBytes
from stagewright.planning import LayerTable, PlanOptions, fixed_plan
from stagewright.runtime.safety.memory import keep_prediction, out_of_memory
from stagewright.scheduling import make_schedule
from tests.cli.conftest import Run, run

__all__ = ["run"]
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.80 GiB"
MODEL = """
import os
import torch
from torch import nn
import stagewright as sw

def short(self, closure=None):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 11.80 GiB")

def make():
    if FAILS and os.environ.get("RANK") == "1":
        torch.optim.SGD.step = short
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    loss, targets = sw.models.cross_entropy_sum(), (torch.zeros(2, dtype=torch.long),)
    return sw.make_layered(model, (torch.randn(2, 6),), loss=loss, targets=targets)
"""


def said_of(fault: BaseException, folder: Path, worker: int) -> RunError | None:
    """What worker 0, 1 or 2 of a plan of 2-1 says."""
    table = LayerTable(model="m", names=("a", "b"), flops=(1.0, 1.0), parameter_bytes=(1, 1))
    plan = fixed_plan(table, PlanOptions(batch=6, placement="0:0-1.0:2"))
    return out_of_memory(fault, make_schedule(plan), folder, worker)


def test_it_says_what_was_predicted_and_held_by_kind_and_what_to_change(tmp_path: Path) -> None:
    gib = 1 << 30
    keep_prediction(tmp_path, [StageBytes(gib, 0, gib, 2 * gib, 3 * gib, 0, 0, 0)] * 3)
    weight = nn.Parameter(torch.zeros(1 << 20))
    weight.grad = torch.zeros(1 << 20)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    error = said_of(torch.OutOfMemoryError(FULL), tmp_path, 1)
    assert error is not None
    assert error.what == "worker 1 (stage 0, device 0:1) ran out of memory: Tried to allocate 2.00 GiB"
    predicted, held, ways = (error.todo or "").splitlines()
    assert predicted == (
        "predicted were 7.00 GiB: activations 3.00 GiB, optimizer 2.00 GiB, weights 1.00 GiB, gradients 1.00 GiB"
    )
    assert held.startswith("it held ")
    assert "rest" in held
    assert ways.startswith("use --recompute, more --microbatches, or a smaller --batch")
    assert "--shard-optimizer" in ways
    alone = said_of(torch.OutOfMemoryError(FULL), tmp_path, 2)
    assert alone is not None
    assert "--shard-optimizer" not in (alone.todo or "")


def test_what_is_not_of_memory_is_left_alone(tmp_path: Path) -> None:
    full = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")
    assert said_of(full, tmp_path, 0) is not None
    assert (
        said_of(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), tmp_path, 0)
        is not None
    )
    assert said_of(MemoryError("no room for the images"), tmp_path, 0) is None
    assert said_of(RuntimeError("shapes do not match"), tmp_path, 0) is None


@pytest.mark.timeout(200)
def test_a_run_that_is_short_of_memory_ends_with_it(run: Run, tmp_path: Path) -> None:
    words = ("--placement", "0:0.0:1", "--ratio-of", "layers", "--batch", 3, "--steps", 2, "--device", "cpu")
    for fails in (False, True):
        (tmp_path / f"model{fails}.py").write_text(f"FAILS = {fails}\n{MODEL}", encoding="utf-8")
        out = tmp_path / f"run-{fails}"
        status, _, err = run("train", f"python:{tmp_path}/model{fails}.py:make", *words, "--out", out)
        told = json.loads((out / "memory.json").read_text(encoding="utf-8"))
        assert len(told) == 2
        if fails:
            assert status == 3
            assert "worker 1 (stage 1, device 0:1) ran out of memory: Tried to allocate 2.00 GiB" in err
            assert f"predicted were {sum(told[1].values()) / 2**30:.2f} GiB: framework" in err
            assert "use --recompute" in err
        else:
            assert status == 0, err
