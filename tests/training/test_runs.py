"""Whole runs over real images: what a placement does not change, and what a person can ask for."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stagewright.cli import main
from stagewright.errors import StagewrightError
from stagewright.record import Record

IMAGES, BATCH = 50, 12
TRAIN = f"train tiny-cnn --device cpu --batch {BATCH} --log-every 1 --warm-up 0 --seed 1"
PLACEMENTS = {
    "3-1 1f1b": "--placement 0:0-2.0:3 --cut fc1 --schedule 1f1b --microbatches 3",
    "dp": "--devices 4",
    "3-1 dynamic": "--placement 0:0-2.0:3 --cut fc1 --schedule dynamic --microbatches 3",
    "3-1 rotate": "--placement 0:0-2.0:3 --cut fc1 --route rotate --microbatches 3",
    "shared": "--placement 0:0-1.0:0-1 --cut fc1 --microbatches 2",
    "2-1 compiled": "--placement 0:0-1.0:2 --cut fc1 --microbatches 2 --compile --channels-last",
}


def stagewright(line: str) -> None:
    """Runs the command in this process, which does for one worker."""
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(line), "--debug"])
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for name, number, seed in (("train", IMAGES, 0), ("validation", 26, 1)):
        stagewright(f"data make {folder / name} --images {number} --classes 5 --size 32 --seed {seed} --format tar")
    return folder


def curves(images: Path, out: Path, options: str) -> dict[str, list[float]]:
    """The points of a run of two epochs of four steps, by name."""
    data = f"--data {images / 'train'} --evaluation-data {images / 'validation'} --epochs 2"
    words = shlex.split(f"{TRAIN} {data} {options} -o {out}")
    if options:
        subprocess.run([sys.executable, "-m", "stagewright", *words], check=True, timeout=200)
    else:
        stagewright(shlex.join(words))
    points = Record.load(out / "record.json").points
    return {name: [point.value for point in points if point.name == name] for name in {point.name for point in points}}


@pytest.fixture(scope="module")
def alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The curves of one worker."""
    return curves(images, tmp_path_factory.mktemp("alone"), "")


def check_the_same(images: Path, out: Path, options: str, alone: dict[str, list[float]]) -> None:
    found = curves(images, out, options)
    assert found.keys() == alone.keys() == {
        "loss", "top_1", "top_k", "learning_rate", "validation_loss", "validation_top_1", "validation_top_k",
    }  # fmt: skip
    for name, values in alone.items():
        assert len(values) == (2 if name.startswith("validation") else 8)
        assert found[name] == pytest.approx(values, rel=1e-4), name


@pytest.mark.timeout(400)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are replayed on a card")
def test_replayed_graphs_learn_what_kernels_do_one_by_one(images: Path, tmp_path: Path) -> None:
    """One worker with the whole model, compiled: every loss, both evaluations, and a last batch of another size."""
    apart = curves(images, tmp_path / "apart", "--device cuda")
    replayed = curves(images, tmp_path / "replayed", "--device cuda --compile")
    assert replayed.keys() == apart.keys()
    for name, values in apart.items():
        assert replayed[name] == pytest.approx(values, rel=5e-3), name


@pytest.mark.timeout(240)
def test_a_pipeline_learns_from_images_what_one_worker_learns(
    images: Path, tmp_path: Path, alone: dict[str, list[float]]
) -> None:
    """Losses of every step, and both evaluations with a last batch of 2 rows for 3 replicas."""
    check_the_same(images, tmp_path, PLACEMENTS["3-1 1f1b"], alone)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", list(PLACEMENTS)[1:])
def test_every_placement_learns_what_one_worker_learns(
    name: str, images: Path, tmp_path: Path, alone: dict[str, list[float]]
) -> None:
    check_the_same(images, tmp_path, PLACEMENTS[name], alone)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_stale_weights_change_the_losses_from_the_second_batch_on(
    images: Path, tmp_path: Path, alone: dict[str, list[float]]
) -> None:
    found = curves(images, tmp_path, "--placement 0:0-2.0:3 --cut fc1 --staleness ssp")
    assert found["loss"][0] == pytest.approx(alone["loss"][0], rel=1e-4)
    assert found["loss"][2:] != pytest.approx(alone["loss"][2:], rel=1e-6)


def test_a_recipe_gives_precision_batch_and_loss(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    keys = ("version: 1", "batch_per_device: 6", "precision: bf16", "label_smoothing: 0.5", "epochs: 9")
    recipe.write_text("\n".join(("format: stagewright.recipe", *keys)))
    stagewright(f"train tiny-cnn --device cpu --recipe {recipe} --steps 2 -o {tmp_path / 'run'}")
    record = Record.load(tmp_path / "run" / "record.json")
    assert (record.plan.batch, record.precision, len(record.points)) == (6, "bf16", 5)
    assert "label_smoothing=0.5" in (tmp_path / "run" / "summary.csv").read_text()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--recipe moon", "no recipe is named 'moon'"),
        ("--decay step", "--decay step does not say when the rate falls"),
        ("--decay step --decay-epochs thirty", "--decay-epochs is 'thirty'"),
        ("--data DATA --evaluate-every 1", "--evaluate-every needs rows to evaluate on"),
        ("--data DATA --batch 64", "an epoch of DATA has 50 images, fewer than the batch of 64"),
        ("--epochs 0", "--epochs is 0: expected 1 or more"),
    ],
)
def test_a_mistake_is_named(options: str, what: str, images: Path) -> None:
    data = str(images / "train")
    with pytest.raises(StagewrightError, match=re.escape(what.replace("DATA", data))):
        main(shlex.split(f"train tiny-cnn --device cpu {options.replace('DATA', data)} --debug"))


def test_records_that_cannot_be_read_are_skipped_with_a_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "broken"
    stagewright(f"data make {folder} --images 30 --size 32 --format ofrecord")
    part = folder / "part-00000"
    part.write_bytes(part.read_bytes()[:-5])
    line = f"train tiny-cnn --device cpu --data {folder} --batch 8 --steps 1"
    with pytest.raises(StagewrightError, match="record 29"):
        main(shlex.split(f"{line} --debug"))
    capsys.readouterr()
    stagewright(f"{line} --on-corrupt skip --json")
    out, err = capsys.readouterr()
    assert "1 record skipped" in err
    assert json.loads(out)["model"] == "tiny-cnn"
