"""Adapters train as in a plain loop with peft's layers; what is frozen costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stagewright.runtime.weights import Weights
from tests.runtime.cases import Case
from tests.runtime.modules import MODELS
from tests.runtime.test_exactness import check, run_cases

pytest.importorskip("peft")
ADAPTED = "adapted"


@pytest.mark.timeout(300)
def test_every_plan_equals_a_plain_loop(tmp_path: Path) -> None:
    """Exact, stale, clipped with a loss scale, in halves; stages without anything to train are among them."""
    cases = [
        Case("1-1", optimizer="adamw", model=ADAPTED),
        Case("2-1", "1f1b", "rotate", 3, 23, "adamw", model=ADAPTED),
        Case("2-1", "zero-bubble", optimizer="adamw", model=ADAPTED),
        Case("loop", "dynamic", microbatches=3, batch=21, staleness="ssp", steps=12, model=ADAPTED),
        Case("1-1", clip_norm=0.05, precision="fp16", staleness="2bw", steps=8, model=ADAPTED),
    ]
    check(run_cases(cases, tmp_path, 250), len(cases))


def test_what_is_frozen_has_one_copy_and_no_optimizer() -> None:
    layered = MODELS[ADAPTED].layered()
    stage = layered.stage(0, layered.names.index("c"))
    weights = Weights(stage, 3, lambda parameters: torch.optim.AdamW(parameters))
    assert weights.names == ["b.lora_A.default.weight", "b.lora_B.default.weight"]
    assert weights.optimizer is not None
    assert sum(len(group["params"]) for group in weights.optimizer.param_groups) == 2
    first, *others = ({name: id(each) for name, each in module.named_parameters()} for module in weights.modules)
    for other in others:
        assert {name for name in first if first[name] != other[name]} == set(weights.names)
    nothing = Weights(
        layered.stage(layered.names.index("norm"), layered.num_layers),
        2,
        lambda parameters: torch.optim.AdamW(parameters),
    )
    assert nothing.optimizer is None
    assert not nothing.names


def test_adapters_are_drawn_alike_whatever_came_before() -> None:
    torch.manual_seed(1)
    one = MODELS[ADAPTED].make().state_dict()
    torch.rand(7)
    two = MODELS[ADAPTED].make().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert one["b.lora_A.default.weight"].abs().sum() > 0
    assert not torch.equal(one["b.lora_A.default.weight"], one["d.lora_A.default.weight"])
