"""Stages that torch compiles, here without the part that needs a compiler of C++."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from stagewright.cluster import parse_devices
from stagewright.models import build_model
from stagewright.plan import Plan, Stage
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import open_world
from stagewright.scheduling import make_schedule
from stagewright.training.loop import synthetic_feed


@pytest.mark.parametrize("name", ["alexnet-of", "tiny-cnn"])
def test_a_model_that_drops_or_not_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = build_model(name, **({"image_size": 64, "num_classes": 10} if name != "tiny-cnn" else {}))
    settings = Settings(compile=True, self_check=True, threads=1)
    stage = Stage(layers=model.names, devices=parse_devices("0:0"))
    schedule = make_schedule(Plan(model=name, stages=(stage,), batch=4, num_microbatches=2), agree=settings.agrees)
    with open_world(settings) as world:
        feed = synthetic_feed(model, settings, world.device)
        worker = Worker(schedule, model, world, settings, make_optimizer=partial(torch.optim.SGD, lr=0.01), feed=feed)
        worker.run(2)
        loss, count = worker.figures(1)[:2]
    assert (loss / count).isfinite()
