"""`sw.Run` and a loop of one's own are the plain loop to the last digits, alone and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

import stagewright as sw
from stagewright.models.loss import MeanLoss, as_sum
from stagewright.training.config import make_config
from stagewright.training.dataset import divided, items_of
from stagewright.training.rows import data_and_model, feed_for
from tests.training.own_run import BATCH, ROWS, WEIGHTS, confidence, make_data, make_model, optimizer, scheduler

ROOT = Path(__file__).parents[2]
STEPS = 6
"""Two epochs of three whole batches, after which a callback ends the run."""


def rows_of(batch: int) -> tuple[Tensor, Tensor]:
    """The rows of a batch, drawn by the sampler's weights."""
    epoch, place = divmod(batch, ROWS // BATCH)
    generator = np.random.Generator(np.random.PCG64([0, epoch]))
    drawn = generator.choice(ROWS, ROWS, p=np.array(WEIGHTS) / sum(WEIGHTS))
    inputs, labels = make_data(ROWS, 1).tensors
    own = torch.from_numpy(drawn[place * BATCH : (place + 1) * BATCH])
    return inputs[own], labels[own]


def plainly(
    batches: list[int], change: Callable[[int, nn.Module, Any], None], *, decays: bool
) -> tuple[Any, list[float]]:
    """The model and the losses of a plain loop."""
    model, losses = make_model(), []
    made = optimizer(model.parameters())
    decay = scheduler(made) if decays else None
    for batch in batches:
        inputs, labels = rows_of(batch)
        made.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        change(batch, model, made)
        made.step()
        if decay is not None:
            decay.step()
        losses.append(loss.item())
    return model, losses


def clamped(batch: int, model: nn.Module, made: Any) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad.clamp_(-0.01, 0.01)
    made.param_groups[0]["lr"] = 0.05 / (1 + batch)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")])
def test_a_run_and_a_loop_are_the_plain_ones(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Uneven rows, a mean that leaves labels out, AdamW, a scheduler, drawn items: losses and weights to 1e-12."""
    command = [sys.executable, *launcher, "-m", "tests.training.own_run", str(tmp_path), "0:0-2.0:3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    told, weights = json.loads((tmp_path / "told.json").read_text()), torch.load(tmp_path / "weights.pt")

    trained, losses = plainly(list(range(STEPS)), lambda *_: None, decays=True)
    own, own_losses = plainly([0, 1, 2, 0], clamped, decays=False)
    assert told["losses"] == pytest.approx(losses, abs=1e-12)
    assert told["own"] == pytest.approx(own_losses, abs=1e-12)
    for found, expected in zip(weights, (trained, own)):
        for name, tensor in expected.state_dict().items():
            assert torch.allclose(found[name], tensor, rtol=0, atol=1e-12), name
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights[0].items())

    inputs, labels = make_data(20, 2).tensors
    outputs = trained(inputs)
    assert told["figures"]["loss"] == pytest.approx(F.cross_entropy(outputs, labels).item(), abs=1e-12)
    assert told["figures"]["confidence"] == pytest.approx(confidence(outputs, labels).mean().item(), abs=1e-12)

    called = {kind: [step for name, step in told["seen"] if name == kind] for kind, _ in told["seen"]}
    assert called == {"step": [*range(1, 7)], "evaluation": [3, 6], "epoch": [3, 6], "checkpoint": [4, 6]}
    assert "two epochs are enough" in done.stdout
    assert (told["rank"], told["stages"]) == (("0", [0]) if launcher else (None, []))


# ── what cannot work is said before anything starts ─────────────────────────────────────────────────────


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Odd(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Drawn(Dataset[Any]):
    """Items whose labels are drawn anew each time."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(6), torch.randint(1000, ())


DATA = TensorDataset(torch.randn(40, 6), torch.arange(40) % 3)
SMALL = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "iterable": ({"data": Endless()}, "Endless gives no item by its index"),
    "sampler": ({"data": DataLoader(DATA, sampler=Odd())}, "DataLoader's Odd draws items"),
    "empty": ({"data": []}, "list has no items"),
    "few": ({"batch": 64}, "40 items of TensorDataset are fewer than the batch of 64"),
    "shape": (
        {"data": TensorDataset(torch.randn(40, 5), torch.arange(40) % 3)},
        r"fails on rows of the data \(\(8, 5\)",
    ),
    "no loss": ({"loss": None}, "loss is missing"),
    "unreduced": ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"returns a tensor of shape \(8,\), not one number"),
    "neither": ({"loss": lambda out, _: out.std()}, "neither the mean nor the sum"),
    "weighted": (
        {"loss": lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 5.0, 9.0]))},
        "neither the mean",
    ),
    "optimizer": ({"optimizer": torch.optim.SGD(SMALL.parameters())}, "of the whole model's parameters"),
    "closure": ({"optimizer": lambda _: torch.optim.SGD(SMALL.parameters())}, "holds other parameters than"),
    "kept": ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "made LBFGS"),
    "scheduler": ({"scheduler": scheduler}, "scheduler goes with a function"),
    "metric": ({"metrics": {"spread": lambda out, _: out.std()}}, "the metric 'spread' of some rows together is not"),
    "name": ({"metrics": {"loss": confidence}}, "a metric is called 'loss'"),
    "option": ({"microbatch": 4}, r"no option 'microbatch'\ndid you mean microbatches"),
    "value": ({"microbatches": 0}, "--microbatches is 0"),
    "cut": ({"cut": "5", "placement": "0:0.0:1"}, "--cut 5: the model has no such layer"),
    "stages": ({"placement": "0:0.0:1.0:2.0:3.0:4"}, "4 layers cannot be cut into 5 stages"),
    "drawn": (
        {"data": Drawn(), "placement": "0:0.0:1", "loss": lambda o, t: o.mean()},
        "others each time that they are read",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_said_in_the_script(mistake: str, tmp_path: Path) -> None:
    options, said = MISTAKES[mistake]
    given = {"model": SMALL, "data": DATA, "loss": nn.CrossEntropyLoss(), "batch": 8, "device": "cpu", **options}
    with pytest.raises(sw.StagewrightError, match=said):
        sw.Run(given.pop("model"), folder=tmp_path / "run", **given).fit()
    assert not (tmp_path / "run" / "logs").exists(), "a worker was started"


# ── losses, items and orders ────────────────────────────────────────────────────────────────────────────


def test_torchs_losses_and_functions_are_known_for_what_they_are() -> None:
    outputs, labels = torch.randn(8, 3), torch.arange(8) % 3
    weights = torch.tensor([1.0, 2.0, 3.0])
    for loss in (nn.CrossEntropyLoss(weight=weights), nn.CrossEntropyLoss(ignore_index=1), F.cross_entropy):
        found = as_sum(loss, [outputs], [labels])
        counted = found.count(labels)  # type: ignore[attr-defined]
        assert found(outputs, labels) / counted == pytest.approx(float(loss(outputs, labels)))
    for mean in (lambda o, t: F.cross_entropy(o, t), nn.MSELoss(), nn.SmoothL1Loss()):
        targets = labels if not isinstance(mean, nn.Module) else torch.randn(8, 3)
        assert isinstance(as_sum(mean, [outputs], [targets]), MeanLoss)
    summed = nn.MSELoss(reduction="sum")
    assert as_sum(summed, [outputs], [outputs + 1]) is summed


def test_a_loaders_order_is_kept() -> None:
    for sampler, expected in ((SequentialSampler(DATA), False), (RandomSampler(DATA), True)):
        found = items_of(DataLoader(DATA, batch_size=4, sampler=sampler))
        assert (found.shuffle, found.batch, found.weights, len(found)) == (expected, 4, None, 40)
    again = items_of(DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True, num_samples=7)))
    assert (len(again), again.weights) == (7, (1.0,) * 40)


def test_parts_of_an_item_go_where_the_model_wants_them() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            return a

    x, y, z = torch.zeros(2, 1), torch.ones(2, 1), torch.full((2, 1), 2.0)
    assert divided(Two(), (x, y, z)) == ((x, y), {}, (z,))
    assert divided(Two(), ((x,), (y, z))) == ((x,), {}, (y, z))
    assert divided(Two(), x) == ((x,), {}, ())
    assert divided(Two(), {"b": y, "labels": z, "a": x}) == ((), {"a": x, "b": y}, (z,))
    with pytest.raises(sw.DataError, match="items have the columns c, d, and Two takes a, b, labels"):
        divided(Two(), {"c": x, "d": y})


def test_own_data_by_the_name_of_a_function(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def images(): return torch.utils.data.TensorDataset(torch.randn(8, 3, 32, 32), torch.arange(8))\n"
        "def flat(): return torch.utils.data.TensorDataset(torch.randn(8, 5), torch.arange(8))\n"
        "def wrong(): return 5\n"
    )

    def opened(function: str) -> Any:
        config = make_config({"model": {"name": "tiny-cnn"}, "data": {"data": f"python:{file}:{function}"}})
        dataset, _, model = data_and_model(config)
        return feed_for(dataset, model, config)

    one, other = opened("images"), opened("images")
    assert one.fingerprint() == other.fingerprint()
    assert torch.equal(one.look(8)[0][0], other.look(8)[0][0]), "the seed is the same in every worker"
    for function, said in (
        ("flat", r"give 'images' as torch.float32 of shape \(5,\) a row\ngive torch.float32 of shape \(3, 32, 32\)"),
        ("wrong", "--data python:.*:wrong: int gives no item by its index"),
        ("lost", "--data python:.*:lost: .* has no function lost"),
    ):
        with pytest.raises(sw.DataError, match=said):
            opened(function)


def test_early_stopping_waits_for_what_gets_no_better(tmp_path: Path) -> None:
    stopping = sw.EarlyStopping("hit", patience=2, mode="max", min_delta=0.1)
    reasons = []
    for step, hit in enumerate((0.1, 0.3, 0.35, 0.5, 0.5, 0.55)):
        now = sw.Moment(step=step, epoch=0, figures={"hit": hit}, folder=tmp_path)
        stopping.on_evaluation(now)
        reasons.append(bool(now.reason))
    assert reasons == [False, False, False, False, False, True]
    with pytest.raises(sw.UsageError, match=r"monitors 'loss', which evaluations do not have\nthey have hit"):
        sw.EarlyStopping().on_evaluation(now)
