"""What runs once before the first step leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch

from stagewright.cluster import parse_devices
from stagewright.models import build_model
from stagewright.plan import Plan, Stage
from stagewright.runtime.settings import Settings
from stagewright.runtime.warm_up import _run_everything_once, warm_up
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import open_world
from stagewright.scheduling import make_schedule
from stagewright.training.loop import synthetic_feed


def scheduled(parameters: object) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("versions", [1, 2])
def test_weights_buffers_optimizer_and_scheduler_are_as_before(precision: str, versions: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, settings = build_model("tiny-cnn"), Settings(precision=precision, device=device)
    stage = Stage(layers=model.names, devices=parse_devices("0:0"), versions=versions)
    schedule = make_schedule(Plan(model="tiny-cnn", stages=(stage,), batch=64), agree=settings.agrees)
    with open_world(settings) as world:
        feed = synthetic_feed(model, settings, world.device)
        worker = Worker(schedule, model, world, settings, make_optimizer=scheduled, feed=feed)
        weights = worker.replicas[0].weights
        before = (
            [copy.deepcopy(slot.state_dict()) for slot in weights.modules],
            copy.deepcopy(weights.scheduler.state_dict()),
        )
        warm_up(worker) if device == "cuda" else _run_everything_once(worker)
        for kept, slot in zip(before[0], weights.modules):
            assert all(torch.equal(tensor, kept[name]) for name, tensor in slot.state_dict().items())
        assert weights.scheduler.state_dict() == before[1]
        assert not weights.optimizer.state
        assert weights.optimizer.param_groups[0]["lr"] == 0.1
        assert all(parameter.grad is None for slot in weights.parameters for parameter in slot)
