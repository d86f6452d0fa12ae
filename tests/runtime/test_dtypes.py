"""The formats in which rows come into the first stage."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
from benchmarks.baselines import make_rows, mean_loss
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.cluster import DeviceId
from stagewright.models import build_model, make_layered
from stagewright.plan import Plan, Stage
from stagewright.runtime.evaluate import evaluate
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.replica import fed_inputs
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World
from stagewright.scheduling import make_schedule


class Skips(nn.Module):
    """Its input is multiplied, and added as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) + x)


def test_only_what_products_alone_read_is_rounded() -> None:
    bf16, fp32 = Settings(precision="bf16"), Settings()
    images, tokens = build_model("tiny-cnn"), build_model("gpt-tiny", vocabulary=16, width=16, context=8)
    assert [spec.dtype for spec in fed_inputs(images, bf16)] == [torch.bfloat16]
    assert fed_inputs(images, fp32) == images.inputs
    assert fed_inputs(tokens, bf16) == tokens.inputs
    skips = make_layered(Skips(), (torch.randn(2, 4),))
    assert fed_inputs(skips, bf16) == skips.inputs
    norm = make_layered(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), (torch.randn(2, 4),))
    assert fed_inputs(norm, bf16) == norm.inputs, "autocast norms in full precision"


@pytest.mark.parametrize("rounded", [False, True])
def test_training_is_that_of_the_plain_loop(rounded: bool) -> None:
    """Whether the feed rounds its rows or the worker does."""
    layered = build_model("tiny-cnn")
    plain, rows = copy.deepcopy(layered.model), make_rows(layered, 8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mean_loss(plain(*rows.inputs), rows.labels)
        loss.backward()
        optimizer.step()
    images = rows.inputs[0].bfloat16() if rounded else rows.inputs[0]
    feed = FunctionFeed(lambda _, start, stop: ((images[start:stop],), (rows.labels[start:stop],)))
    schedule = make_schedule(
        Plan(model="tiny-cnn", stages=(Stage(layers=layered.names, devices=(DeviceId(0, 0),)),), batch=8)
    )
    worker = Worker(
        schedule, layered, World(0, 1, torch.device("cpu"), timedelta(seconds=10)), Settings(precision="bf16"),
        make_optimizer=lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9), feed=feed,
    )  # fmt: skip
    worker.run(3, 0)
    assert worker.replicas[0].runner.inputs[0].dtype == torch.bfloat16
    made = dict(worker.replicas[0].weights.newest().named_parameters())
    worker.close()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(made[name], parameter, rtol=1e-6, atol=1e-7)


class _Casts(TorchDispatchMode):
    """Counts how often tensors of some shapes are rounded."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes, self.number = shapes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rounds = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16
        self.number += rounds and args[0].shape in self.shapes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("versions", "recompute"), [(1, False), (2, False), (1, True)])
def test_rounded_weights_serve_every_microbatch_and_no_batch_after_an_update(versions: int, recompute: bool) -> None:
    layered, parts = build_model("tiny-cnn"), ((0, 4), (4, 8))
    plain, rows = copy.deepcopy(layered.model), make_rows(layered, 8)
    named, images = dict(plain.named_parameters()), rows.inputs[0].bfloat16()
    history = [{name: each.detach().clone() for name, each in named.items()}]
    for batch in range(4):
        used = history[max(0, batch - versions + 1)]
        gradients = {name: torch.zeros_like(each) for name, each in named.items()}
        for start, stop in parts:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                made = torch.func.functional_call(
                    plain,
                    leaves := {name: each.clone().requires_grad_() for name, each in used.items()},
                    images[start:stop],
                )
            loss = nn.functional.cross_entropy(made.float(), rows.labels[start:stop], reduction="sum")
            loss.backward(loss.new_tensor(1 / 8))
            for name, leaf in leaves.items():
                gradients[name] += leaf.grad
        history.append({name: each - 0.1 * gradients[name] for name, each in history[-1].items()})
    plan = Plan(
        model="tiny-cnn", batch=8, num_microbatches=2, policy="gpipe" if versions == 1 else "1f1b",
        stages=(Stage(layers=layered.names, devices=(DeviceId(0, 0),), versions=versions, recompute=recompute),),
    )  # fmt: skip
    feed = FunctionFeed(lambda _, start, stop: ((images[start:stop],), (rows.labels[start:stop],)))
    worker = Worker(
        make_schedule(plan), layered, World(0, 1, torch.device("cpu"), timedelta(seconds=10)),
        Settings(precision="bf16", self_check=False), make_optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
        feed=feed,
    )  # fmt: skip
    with _Casts({each.shape for each in named.values()}) as casts:
        worker.run(4, 0)
    evaluate(worker, feed, 8, 8)
    worker.close()
    assert casts.number == 4 * len(named), "once a batch, not once a microbatch"
    made = dict(worker.replicas[0].weights.newest().named_parameters())
    for name, wanted in history[-1].items():
        torch.testing.assert_close(made[name].detach(), wanted, rtol=1e-5, atol=1e-6)
