"""The verb `plan`, as people type it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.cli.plan import plan
from stagewright.cli.simulate import simulate
from stagewright.cluster import Device, make_cluster
from stagewright.errors import StagewrightError
from stagewright.models import build_model
from stagewright.plan import Plan
from stagewright.record import Record
from tests.planning.cases import GIB, MIB, chain
from tests.profiling.test_cli import run


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A profile whose last layer is heavy, and a cluster of four devices on a slow hub."""
    chain((0.1, 0.1, 0.1, 0.02), weights=(MIB, MIB, MIB, 900 * MIB)).save(tmp_path / "profile.json")
    make_cluster(4, name="hub", device=Device(kind="cpu", memory_bytes=16 * GIB), bytes_per_s=1e9).save(
        tmp_path / "hub.yaml"
    )
    return tmp_path / "profile.json", tmp_path / "hub.yaml"


def test_the_plan_its_rivals_and_the_reason_are_shown(files: tuple[Path, Path], tmp_path: Path) -> None:
    text = run(plan, files[0], "--cluster", files[1], "--batch", 24, "-o", tmp_path / "plan.json")
    assert "chain, 24 samples a step, 4 × cpu, 16.0 GiB (one host)" in text
    assert "▸ 3-1 cut at d" in text
    assert "data parallel" in text
    assert "all-reduce of d (900 MiB" in text
    assert "keeps the 900 MiB of weights from d on 0:3 alone, so only 3 MiB are reduced" in text.replace("\n", " ")
    assert f"next: stagewright simulate {tmp_path / 'plan.json'}" in text.replace("\n", " ")
    assert Plan.load(tmp_path / "plan.json").replicas == (3, 1)


def test_the_figures_are_printed_as_json(files: tuple[Path, Path]) -> None:
    found = json.loads(run(plan, files[0], "--cluster", files[1], "--batch", 24, "--json"))
    assert found["best"]["cuts"] == ["d"]
    assert found["best"]["images_per_s"] == pytest.approx(24 / found["best"]["step_s"])
    assert found["data_parallel"]["step_s"] > found["best"]["step_s"]
    assert Plan.from_dict(found["plan"]).replicas == (3, 1)


def test_parts_are_fixed_from_the_command_line(files: tuple[Path, Path]) -> None:
    words = (
        "--placement",
        "0:0-1.0:2-3",
        "--cut",
        "c",
        "--microbatches",
        4,
        "--staleness",
        "ssp",
        "--schedule",
        "1f1b",
    )
    found = json.loads(run(plan, files[0], "--cluster", files[1], "--batch-per-device", 12, *words, "--json"))
    assert found["best"]["placement"] == "0:0-1.0:2-3"
    assert found["plan"]["batch"] == 24
    assert found["plan"]["num_microbatches"] == 4
    assert [stage["versions"] for stage in found["plan"]["stages"]] == [2, 1]


def test_a_model_is_planned_by_name() -> None:
    text = run(plan, "vgg16", "--cluster", "titan-v-8", "--batch", 224, "--no-simulate")
    assert "vgg16, 224 images a step, 8 × titan-v" in text
    assert "▸ 7-1 cut at" in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "the batch is not given"),
        (("--batch", "0"), "--batch is 0"),
        (("--batch", "24", "--ratio", "1:2", "--cut", "b"), "both say where to cut"),
        (("--batch", "24", "--batch-per-device", "3"), "both given"),
        (("--batch", "24", "--staleness", "soon"), "--staleness is 'soon'"),
        (("--batch", "24", "--placement", "0:9"), "names device 9"),
        (("--batch", "24", "--schedule", "fast"), "--schedule is 'fast'"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(files: tuple[Path, Path], words: tuple[str, ...], error: str) -> None:
    with pytest.raises(StagewrightError, match=error):
        run(plan, files[0], "--cluster", files[1], *words)


def test_the_optimizer_and_the_precision_count(files: tuple[Path, Path], tmp_path: Path) -> None:
    fixed = ("--cluster", files[1], "--batch", 24, "--placement", "0:0-2.0:3", "--cut", "d")
    peaks = {}
    for name in ("sgd", "adamw"):
        found = json.loads(run(plan, files[0], *fixed, "--optimizer", name, "--json"))
        peaks[name] = found["best"]["peak_bytes"]
    assert peaks["adamw"][1] - peaks["sgd"][1] == 900 * MIB
    text = run(plan, files[0], *fixed, "--optimizer", "adamw", "-o", tmp_path / "plan.json").replace("\n", " ")
    assert text.count("--optimizer adamw") == 2
    with pytest.raises(StagewrightError, match="expected one of sgd, adam"):
        run(plan, files[0], *fixed, "--optimizer", "sdg")


CARDS = ("--cluster", "titan-v-8", "--placement", "0:0.0:1", "--batch", 8, "--microbatches", 1, "--json")


def test_adapters_leave_gradients_and_states_to_themselves(tmp_path: Path) -> None:
    """The same options as of `train`: what is frozen has weights, and neither gradients nor states."""
    pytest.importorskip("peft")
    sizes, peaks = {}, []
    for lora in ((), ("--lora", 4, "--lora-targets", "all-linear")):
        out = tmp_path / f"{len(lora)}.json"
        words = ("gpt-tiny", *CARDS, "--cut", "block2", "--optimizer", "adamw", *lora, "-o", out)
        run(simulate, *words)
        parts = [use.peak_parts for use in Record.load(out).devices]
        sizes[bool(lora)] = {kind: sum(part[kind] for part in parts) for kind in ("weights", "gradients", "optimizer")}
        peaks.append(sum(json.loads(run(plan, *words[:-2]))["best"]["peak_bytes"]))
    plain, adapted = sizes[False], sizes[True]
    assert peaks[1] < peaks[0]
    assert plain["optimizer"] == 2 * sum(each.nbytes for each in build_model("gpt-tiny").model.parameters())
    assert 0 < adapted["gradients"] <= adapted["weights"] - plain["weights"]
    assert adapted["weights"] > plain["weights"]
    assert adapted["optimizer"] == pytest.approx(2 * (adapted["weights"] - plain["weights"]), rel=0.01)


def test_adapters_do_not_go_with_a_profile_of_a_model_without_them(files: tuple[Path, Path]) -> None:
    for verb, words in ((plan, (files[0],)), (simulate, ("chain", "--profile", files[0]))):
        with pytest.raises(StagewrightError, match="goes with a model's name"):
            run(verb, *words, "--cluster", files[1], "--batch", 8, "--lora", 4)
    with pytest.raises(StagewrightError, match="--lora-alpha is given, but no --lora"):
        run(plan, "gpt-tiny", "--cluster", files[1], "--batch", 8, "--lora-alpha", 4)


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_the_step_is_that_of_the_optimizer(verb: str, tmp_path: Path) -> None:
    """AdamW goes seven times over memory where SGD with momentum does five times, both for trained parameters alone."""
    profile = replace(chain((0.1, 0.1), weights=(MIB, 3 * MIB)), optimizer_s=1.0)
    profile.save(tmp_path / "profile.json")
    cluster = make_cluster(1, name="one", device=Device(kind="cpu", memory_bytes=GIB))
    cluster.save(tmp_path / "one.yaml")
    steps = {}
    for name in ("sgd", "adamw", "rmsprop", "adafactor"):
        words = ("--cluster", tmp_path / "one.yaml", "--batch", 8, "--optimizer", name, "--json")
        if verb == "plan":
            steps[name] = json.loads(run(plan, tmp_path / "profile.json", *words))["best"]["step_s"]
        else:
            told = json.loads(run(simulate, "chain", "--profile", tmp_path / "profile.json", *words))
            steps[name] = told["step_s"]
    passes = {name: round(5 * (step - 0.2), 6) for name, step in steps.items()}
    assert passes == {"sgd": 5, "adamw": 7, "rmsprop": 7, "adafactor": 5}
