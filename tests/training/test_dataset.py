"""A map-style dataset is data: with and without a collate function, by names and by places, over real workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import stagewright as sw
from stagewright.runtime.settings import Settings
from stagewright.training.dataset import DatasetFeed
from tests.training.dataset import NUM, Numbered, collate, plainly

ROOT = Path(__file__).parents[2]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(2, 3)

    def forward(self, features: Tensor, others: Tensor) -> Tensor:
        return self.first(features) + self.second(others)


def layered(model: nn.Module, *widths: int) -> sw.Layered:
    sample = tuple(torch.zeros(2, width) for width in widths)
    loss = sw.mean_loss(nn.functional.cross_entropy)
    return sw.make_layered(model, sample, loss=loss, targets=(torch.zeros(2, dtype=torch.long),))


def plan_of(model: sw.Layered, batch: int = 4) -> sw.Plan:
    return sw.Plan(model="own", stages=(sw.Stage(layers=model.names, devices=sw.parse_devices("0:0")),), batch=batch)


def settled(dataset: Any, model: sw.Layered, **options: Any) -> DatasetFeed:
    feed = DatasetFeed(dataset, model, **options)
    feed.settle(plan_of(model), Settings())
    return feed


@pytest.mark.timeout(200)
def test_a_dataset_over_three_workers_is_a_plain_loop_and_each_reads_its_own_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.training.dataset", str(tmp_path), "0:0-1.0:2"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=180)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses == pytest.approx(plainly(), rel=1e-9)
    asked = [set((tmp_path / "noted" / f"items-{rank}").read_text().split()) for rank in (0, 1)]
    assert all(len(each) < NUM for each in asked), "a replica of the first stage has no need of the other one's rows"


def test_columns_by_name_and_parts_by_place() -> None:
    model = layered(TwoInputs(), 6, 2)
    names = [spec.name for spec in model.inputs]
    rows = [(torch.full((6,), float(n)), torch.full((2,), float(-n)), torch.tensor(n % 3)) for n in range(9)]
    by_name = [dict(zip((names[1], "labels", names[0]), (b, label, a))) for a, b, label in rows]
    for dataset in (rows, [((a, b), label) for a, b, label in rows], by_name):
        feed = settled(dataset, model, shuffle=False)
        first, second = feed.inputs(1, 1, 3)
        assert (first[:, 0].tolist(), second[:, 0].tolist()) == ([5, 6], [-5, -6])
        assert feed.targets(1, 1, 3)[0].tolist() == [2, 0]
        assert feed.inputs(2, 0, 1)[0][0, 0] == 0, "an epoch of 9 rows is two batches of 4"


def test_every_item_once_an_epoch_in_another_order() -> None:
    model = layered(nn.Linear(6, 3), 6)
    feed = settled(TensorDataset(torch.arange(8.0)[:, None].expand(8, 6), torch.zeros(8, dtype=torch.long)), model)
    epochs = [[feed.inputs(batch, 0, 4)[0][:, 0].tolist() for batch in (number, number + 1)] for number in (0, 2)]
    assert [sorted(first + second) for first, second in epochs] == [list(range(8))] * 2
    assert epochs[0] != epochs[1]


class Endless(IterableDataset[Any]):
    """Items without an index."""

    def __iter__(self) -> Any:
        return iter(())


def test_what_is_no_dataset_of_this_model_is_refused(tmp_path: Path) -> None:
    model = layered(nn.Linear(6, 3), 6)
    with pytest.raises(sw.UsageError, match="Endless gives no item by its index"):
        DatasetFeed(Endless(), model)  # type: ignore[arg-type]
    with pytest.raises(sw.DataError, match="3 items of list are fewer than the batch of 4"):
        settled([1, 2, 3], model)
    with pytest.raises(sw.DataError, match="items have the columns features, labels, and none is 'input"):
        settled(Numbered(), model).inputs(0, 0, 2)
    with pytest.raises(sw.DataError, match="an item of list has 1 parts"):
        settled([torch.zeros(6)] * 4, model).inputs(0, 0, 2)
    rows = [(torch.zeros(5), torch.tensor(0))] * 8
    with pytest.raises(sw.DataError, match=r"with shape \(2, 5\)"):
        sw.train(
            sw.make_schedule(plan_of(model, 2)), model, data=rows, job=sw.Job(steps=1), folder=tmp_path / "run",
            settings=Settings(device="cpu"),
        )  # fmt: skip
    with pytest.raises(sw.UsageError, match="collate_fn makes batches of a dataset's items, and data is none"):
        sw.train(sw.make_schedule(plan_of(model, 2)), model, collate_fn=collate, folder=tmp_path / "other")
