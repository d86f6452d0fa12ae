"""Own rows come to the worker's device, wherever they were made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stagewright as sw
from stagewright.models import TensorSpec
from stagewright.runtime.feed import CheckedFeed, FunctionFeed, _moved
from stagewright.runtime.settings import Settings
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import open_world


class Seen(Tensor):
    """A tensor that notes how it is moved to a card, which need not be here."""

    steps: list[str]

    @classmethod
    def of(cls, *, pinned: bool = False) -> Seen:
        made = torch.zeros(2).as_subclass(cls)
        made.steps, made.pinned = [], pinned
        return made

    pinned: bool

    def is_pinned(self, *arguments: Any) -> bool:
        return self.pinned

    def pin_memory(self, *arguments: Any) -> Tensor:
        self.steps.append("pinned")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
        self.steps.append(f"to {device}" + (", not waiting" if non_blocking else ""))
        return self


def test_to_a_card_rows_go_by_a_pinned_copy_and_nobody_waits() -> None:
    rows, own = Seen.of(), Seen.of(pinned=True)
    for each in (rows, own):
        _moved(each, torch.device("cuda", 3))
    assert rows.steps == ["pinned", "to cuda:3, not waiting"]
    assert own.steps == ["to cuda:3"], "a pinned tensor of the user's may be filled again: its copy is waited for"


def test_rows_that_are_there_stay_as_they_are() -> None:
    rows = torch.zeros(3)
    assert _moved(rows, torch.device("cpu")) is rows


def spec_of(shape_per_row: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(name="x", shape_per_row=shape_per_row, dtype=dtype, needs_grad=False)


@pytest.mark.parametrize("kind", ["inputs", "targets"])
def test_a_feed_and_a_function_give_rows_on_the_device(kind: str) -> None:
    def rows(batch: int, start: int, stop: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
        return (torch.zeros(stop - start, 4),), (torch.zeros(stop - start, dtype=torch.int64),)

    specs = {"inputs": spec_of((4,), torch.float32), "targets": spec_of((), torch.int64)}
    feed = CheckedFeed(FunctionFeed(rows), torch.device("meta"), all_labels_count=False)
    (given,) = getattr(feed, kind)([specs[kind]], 0, 1, 4)
    assert (given.device.type, given.shape[0]) == ("meta", 3)


@contextmanager
def a_worker() -> Iterator[Worker]:
    """One of a linear layer, whose rows somebody makes on another device."""
    layered = sw.make_layered(
        nn.Sequential(nn.Linear(4, 2)), (torch.zeros(2, 4),), loss=sw.mean_loss(nn.functional.cross_entropy),
        targets=(torch.zeros(2, dtype=torch.long),),
    )  # fmt: skip
    plan = sw.Plan(model="own", stages=(sw.Stage(layers=layered.names, devices=sw.parse_devices("0:0")),), batch=4)
    elsewhere = torch.device("meta")
    feed = FunctionFeed(
        lambda batch, start, stop: (
            (torch.ones(stop - start, 4, device=elsewhere),), (torch.ones(stop - start, dtype=torch.long),)
        )
    )  # fmt: skip
    with open_world(Settings()) as world:
        yield Worker(
            sw.make_schedule(plan), layered, world, Settings(), feed=feed,
            make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )  # fmt: skip


def test_what_a_worker_is_given_is_asked_for_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be read back from a meta tensor, so the copy is what fails here, and on a card would not."""
    with a_worker() as worker, pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        worker.run(1)
    monkeypatch.setattr(
        "stagewright.runtime.feed._moved", lambda tensor, device: torch.ones_like(tensor, device=device)
    )
    with a_worker() as worker:
        worker.run(1)
