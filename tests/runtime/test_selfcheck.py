"""The first step notices gradients that are not those of plain autograd, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stagewright.errors import RunError
from stagewright.runtime.deferred import _KeptRows
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.safety import selfcheck
from stagewright.runtime.settings import Settings
from stagewright.runtime.stage import StageRunner
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, open_world
from stagewright.scheduling import make_schedule
from tests.runtime.cases import OPTIMIZERS, Case, plan_of, rows_of
from tests.runtime.modules import MODELS

CASE = Case("1", microbatches=3, batch=12)


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Settings()) as alone:
        yield alone


def run(case: Case, world: World, **settings: Any) -> Worker:
    """Two steps of a case in this process."""
    layered = MODELS[case.model].layered()
    plan = plan_of(case, layered.names, layered.cuts())

    def rows(batch: int, start: int, stop: int):
        return tuple([each[start:stop] for each in part] for part in rows_of(case, batch))

    worker = Worker(
        make_schedule(plan), layered, world, Settings(precision="fp64", **settings),
        make_optimizer=OPTIMIZERS["sgd"], feed=FunctionFeed(rows),
    )  # fmt: skip
    worker.run(2)
    worker.close()
    return worker


@pytest.mark.parametrize("model", ["tower", "siamese", "dropped", "own functions", "words", "hooked"])
@pytest.mark.parametrize("change", [{}, {"policy": "zero-bubble"}, {"recompute": True}])
def test_right_gradients_pass(
    model: str, change: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []
    judge = selfcheck.SelfCheck._judge
    monkeypatch.setattr(selfcheck.SelfCheck, "_judge", lambda *given: (judged.append(given[2]), judge(*given))[1])
    worker = run(replace(CASE, model=model, **change), world)
    assert sorted(judged) == sorted(name for here in worker.replicas.values() for name in here.weights.names)


def test_a_lost_product_ends_the_run_by_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    product = _KeptRows.product

    def forgetful(self: _KeptRows) -> Tensor:
        return product(self).mul_(0.9)

    monkeypatch.setattr(_KeptRows, "product", forgetful)
    with pytest.raises(RunError, match=r"gradient of '\d\.0\.weight' in stage 0 is not that of plain autograd"):
        run(CASE, world)
    run(CASE, world, self_check=False)


def test_nothing_is_left_behind(world: World) -> None:
    """Weights, statistics and generators are as if nobody had looked."""
    for model in ("normed", "dropped"):
        case = replace(CASE, model=model, microbatches=1)
        looked, not_looked = (run(case, world, self_check=each) for each in (True, False))
        for one, other in zip(looked.current_modules(), not_looked.current_modules()):
            assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values()))


def test_no_graph_of_its_own_is_held_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it computes once more comes after the microbatch's own backward: the first step fits where others do."""
    held: list[bool] = []
    plainly = StageRunner.backward_plainly

    def looked(runner: StageRunner, call: Any, key: Any, again: Any, *given: Any) -> None:
        held.append(key in runner.held or bool(again.outputs))
        plainly(runner, call, key, again, *given)

    monkeypatch.setattr(StageRunner, "backward_plainly", looked)
    run(CASE, world)
    assert held == [False] * len(held) != []
