"""What a run leaves for people and scripts: log lines, summary.csv, TensorBoard, Weights & Biases, MLflow.

Weights & Biases and MLflow are stand-ins here: modules that write down how they were called.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from stagewright.cli import main
from stagewright.errors import UsageError
from stagewright.training.display import log_lines
from stagewright.training.events import Teller, check_sinks, read_events, sinks_of

TRAIN = {
    "epoch": 0, "iter": 100, "loss": 6.907755, "top_1": 0.001, "top_k": 0.005, "images_per_s": 4929.5791, "scale": 1.0,
}  # fmt: skip
VALIDATION = {"epoch": 1, "iter": 200, "top_1": 0.5, "top_k": 0.75, "images_per_s": 100.0}
ABOUT = {"name": "vgg16", "batch": 224}


def tell(folder: Path, *names: str, is_resumed: bool = False) -> None:
    """A run of two events."""
    teller = Teller(folder, sinks_of(names, folder, ABOUT, rank=7, is_resumed=is_resumed))  # type: ignore[arg-type]
    teller.tell("train", **TRAIN)
    teller.tell("note", text="halfway")
    teller.tell("validation", **VALIDATION)
    teller.close()


def test_original_lines_are_those_of_the_benchmark_series() -> None:
    assert log_lines({"event": "train", "time": 1607420412.0, **TRAIN}, "original") == [
        "train: epoch 0, iter 100, loss: 6.907755, top_1: 0.001000, top_k: 0.005000, samples/s: 4929.579 1607420412.0"
    ]
    assert log_lines({"event": "validation", "time": 1607420412.04, **VALIDATION}, "original") == [
        "validation: epoch 1, iter 200, top_1: 0.500000, top_k: 0.750000, samples/s: 100.000 1607420412.0"
    ]


def test_every_number_of_a_log_line_has_a_name() -> None:
    more = {"learning_rate": 0.1, "norm": 2.5, "scale": 32768.0, "stage_memory_bytes": [3 << 30, 1 << 30]}
    [line] = log_lines({"event": "train", "time": 1607420412.0, "memory_bytes": 1 << 30, **TRAIN, **more})
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1607420412.0))
    assert line == (
        "train: epoch 0, iter 100, loss: 6.907755, top_1: 0.001000, top_k: 0.005000, lr: 0.1, norm: 2.5, "
        f"samples/s: 4929.579, scale: 32768, memory: 3.0 / 1.0 GiB, time: {clock}"
    )


def test_lines_for_machines_are_json_even_where_a_loss_is_no_number() -> None:
    event = {"event": "train", "time": 1607420412.0, **TRAIN, "loss": math.nan}
    [line] = log_lines(event, "json")
    assert json.loads(line, parse_constant=pytest.fail) == {**event, "loss": None}


def test_summary_has_a_line_for_what_was_run_and_one_a_figure(tmp_path: Path) -> None:
    tell(tmp_path)
    assert (tmp_path / "summary.csv").read_text().splitlines() == [
        "epoch,iter,legend,note,value,rank",
        '0,0,cfg,"name: vgg16, batch: 224",,7',
        "0,100,train_loss,,6.907755,7",
        "0,100,train_top_1,,0.001,7",
        "0,100,train_top_k,,0.005,7",
        "0,100,train_images_per_s,,4929.5791,7",
        "0,100,train_scale,,1.0,7",
        "1,200,validation_top_1,,0.5,7",
        "1,200,validation_top_k,,0.75,7",
        "1,200,validation_images_per_s,,100.0,7",
    ]


def test_a_resumed_run_adds_to_the_summary_and_a_new_one_begins_it_anew(tmp_path: Path) -> None:
    for is_resumed, lines in ((False, 10), (True, 18), (False, 10)):
        tell(tmp_path, is_resumed=is_resumed)
        assert len((tmp_path / "summary.csv").read_text().splitlines()) == lines
    assert [event["event"] for _, event in read_events(tmp_path)] == ["train", "note", "validation"] * 3


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_missing_is_an_error_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagewright.training.events.is_there", lambda module: False)
    with pytest.raises(UsageError, match=f"--{name} needs the package {name}, which is not installed") as caught:
        check_sinks((name,))  # type: ignore[arg-type]
    assert caught.value.todo == f"pip install {name}"


def test_tensorboard_has_the_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell(tmp_path, "tensorboard")
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"train/loss", "train/top_1", "validation/top_1"} <= set(found.Tags()["scalars"])
    [point] = found.Scalars("train/loss")
    assert (point.step, point.value) == (100, pytest.approx(6.907755))


def test_wandb_gets_a_call_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append(("log", step, values)), finish=lambda: calls.append(("finish",))
    )
    stand_in = SimpleNamespace(init=lambda **options: calls.append(("init", options)) or run)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    tell(tmp_path, "wandb")
    assert calls[0] == ("init", {"name": "vgg16", "dir": str(tmp_path), "config": ABOUT})
    assert [call[:2] for call in calls[1:]] == [("log", 100), ("log", 200), ("finish",)]
    assert calls[2][2] == {
        "validation_top_1": 0.5, "validation_top_k": 0.75, "validation_images_per_s": 100.0, "epoch": 1,
    }  # fmt: skip


def test_mlflow_gets_a_call_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    stand_in = SimpleNamespace(
        start_run=lambda run_name: calls.append(("start", run_name)),
        log_params=lambda values: calls.append(("params", values)),
        log_metrics=lambda values, step: calls.append(("metrics", step, values)),
        end_run=lambda: calls.append(("end",)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    tell(tmp_path, "mlflow")
    assert calls[:2] == [("start", "vgg16"), ("params", ABOUT)]
    assert [call[:2] for call in calls[2:]] == [("metrics", 100), ("metrics", 200), ("end",)]


def test_a_run_logs_and_evaluates_made_up_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two epochs of two steps, an evaluation after each; the events hold memory too."""
    with pytest.raises(SystemExit) as ended:
        main([
            "train", "tiny-cnn", "--device", "cpu", "--batch", "8", "--epoch-images", "17", "--epochs", "2",
            "--evaluate-every", "1", "--log-every", "1", "-o", str(tmp_path),
        ])  # fmt: skip
    assert ended.value.code == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("train:", "validation:"))]
    heads = [line.partition(", ")[0] + ", " + line.split(", ")[1] for line in lines]
    assert heads == [
        "train: epoch 0, iter 1", "train: epoch 0, iter 2", "validation: epoch 0, iter 2",
        "train: epoch 1, iter 3", "train: epoch 1, iter 4", "validation: epoch 1, iter 4",
    ]  # fmt: skip
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert all(event["memory_bytes"] > 1 << 20 for event in events if event["event"] in ("train", "validation"))
    assert [event["event"] for event in events][-2:] == ["checkpoint", "end"], "the last step is saved"
    with (tmp_path / "summary.csv").open() as file:
        legends = [row["legend"] for row in csv.DictReader(file)]
    assert legends.count("train_loss") == 4
    assert legends.count("validation_top_1") == 2
