"""The formats in which rows come into the first stage."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
from benchmarks.baselines import make_rows, mean_loss
from torch import Tensor, nn

from stagewright.cluster import DeviceId
from stagewright.models import build_model, make_layered
from stagewright.plan import Plan, Stage
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
