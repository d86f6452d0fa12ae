"""Models of one's own that are no classifiers of images train too: two stages in one process, a few steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stagewright as sw
from stagewright.record import Record
from stagewright.runtime.settings import Settings

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"
CROSS_ENTROPY = sw.mean_loss(F.cross_entropy)
Rows = Callable[[int, int, int], tuple[Any, Any]]


def train(model: nn.Module, rows: Rows, folder: Path, loss: Any = CROSS_ENTROPY, **settings: Any) -> Record:
    """Three steps in two stages that share a device."""
    inputs, targets = rows(0, 0, 2)
    layered = sw.make_layered(model, inputs, loss=loss, targets=targets)
    cut, here = layered.cuts()[0], sw.parse_devices("0:0")
    stages = (sw.Stage(layers=layered.names[:cut], devices=here), sw.Stage(layers=layered.names[cut:], devices=here))
    plan = sw.Plan(model="own", stages=stages, batch=8, num_microbatches=2)
    return sw.train(
        sw.make_schedule(plan), layered, data=rows, job=sw.Job(name="own", steps=3), folder=folder,
        settings=Settings(**settings), recipe=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )  # fmt: skip


def names(record: Record) -> set[str]:
    return {point.name for point in record.points}


def classified(_: int, start: int, stop: int) -> tuple[Any, Any]:
    return (torch.randn(stop - start, 6),), (torch.randint(4, (stop - start,)),)


def test_a_label_for_every_pixel(tmp_path: Path) -> None:
    """Classes come after the rows, as cross entropy wants them, and accuracy is that over pixels."""

    def rows(_: int, start: int, stop: int) -> tuple[Any, Any]:
        return (torch.randn(stop - start, 3, 8, 8),), (torch.randint(5, (stop - start, 8, 8)),)

    record = train(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 1)), rows, tmp_path)
    assert names(record) == {"loss", "top_1", "top_k", "learning_rate"}


def test_a_loss_without_targets_has_no_accuracy(tmp_path: Path) -> None:
    def rows(_: int, start: int, stop: int) -> tuple[Any, Any]:
        return (torch.randn(stop - start, 6),), ()

    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6))
    assert names(train(model, rows, tmp_path, loss=lambda made: made.square().sum())) == {"loss", "learning_rate"}


def test_a_mask_of_minus_infinity_may_cross_a_cut(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

        def attended(self, h: Tensor, mask: Tensor) -> Tensor:
            weights = torch.softmax(h[:, :, None] * h[:, None, :] + mask, -1)
            return (weights @ h[:, :, None])[:, :, 0]

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros_like(x).masked_fill(x > 0, float("-inf"))[:, None, :].repeat(1, 6, 1)
            mask[:, :, 0] = 0
            return self.c(self.attended(self.b(self.attended(self.a(x), mask)), mask))

    assert "loss" in names(train(Masked(), classified, tmp_path))


def test_a_branch_on_training_goes_with_bf16(tmp_path: Path) -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h * 1.5 if self.training else h)

    assert "loss" in names(train(Scaling(), classified, tmp_path, precision="bf16"))


def test_rows_that_were_not_asked_for_are_refused(tmp_path: Path) -> None:
    def rows(few: int, extra: bool, dtype: torch.dtype = torch.float32) -> Rows:
        def give(batch: int, start: int, stop: int) -> tuple[Any, Any]:
            number = stop - start - (few if batch else 0)
            inputs = (torch.randn(number, 6).to(dtype if batch else torch.float32),)
            return inputs * (2 if extra and batch else 1), (torch.randint(4, (stop - start,)),)

        return give

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    for number, (data, said) in enumerate((
        (rows(1, False), r"'input\w*' with shape \(3, 6\) for the inputs of batch 1, rows 0 to 3\ngive \(4, 6\)"),
        (rows(0, True), r"gave 2 inputs of batch 1, rows 0 to 3\nthe model takes 1: input\w*"),
        (rows(0, False, torch.float64), r"'input\w*' as torch\.float64"),
    )):  # fmt: skip
        with pytest.raises(sw.DataError, match=said):
            train(model, data, tmp_path / str(number))


def test_labels_that_do_not_count_need_a_count(tmp_path: Path) -> None:
    def rows(batch: int, start: int, stop: int) -> tuple[Any, Any]:
        labels = torch.randint(4, (stop - start,))
        labels[0] = -100 if batch else 0
        return (torch.randn(stop - start, 6),), (labels,)

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    opaque = sw.mean_loss(lambda logits, labels: F.cross_entropy(logits, labels))
    with pytest.raises(sw.DataError, match=r"labels of batch 1 are -100[\s\S]*count=lambda labels"):
        train(model, rows, tmp_path / "opaque", loss=opaque)
    train(model, rows, tmp_path / "known", loss=sw.mean_loss(F.cross_entropy))


def test_a_script_on_standard_input_is_told_to_be_a_file() -> None:
    done = subprocess.run([sys.executable, "-"], input=EXAMPLE.read_text(), capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "it came on standard input" in done.stderr
    assert "put the training into a file" in done.stderr
