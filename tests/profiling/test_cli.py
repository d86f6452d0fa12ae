"""The verbs `profile` and `cluster`, as people type them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stagewright.cli.cluster import cluster
from stagewright.cli.profile import profile
from stagewright.cluster import Cluster
from stagewright.errors import StagewrightError
from stagewright.profile import Profile
from stagewright.profiling.kinds import DeviceKind
from tests.planning.cases import PIPEDREAM, needs_pipedream
from tests.profiling.test_topology import PAIRS


def run(verb: object, *words: object) -> str:
    app = typer.Typer()
    app.command()(verb)  # type: ignore[type-var]
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, StagewrightError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_model_is_measured_and_saved(tmp_path: Path) -> None:
    text = run(profile, "tiny-cnn", "--batch", 8, "--device", "cpu", "--repeats", 1, "-o", tmp_path / "p.json")
    assert "tiny-cnn on cpu, fp32, 8 rows, measured" in text
    assert "the whole model in one piece" in text
    assert Profile.load(tmp_path / "p.json").batch_sizes == (2, 4, 8)


def test_a_model_is_worked_out_for_hardware_that_is_not_here(tmp_path: Path) -> None:
    text = run(profile, "vgg16", "--batch", "16,32", "--device", "titan-v", "-o", tmp_path / "p.json")
    assert "vgg16 on titan-v, fp32, 32 rows, analytic" in text
    assert "conv5_3" in text
    assert f"next: stagewright plan {tmp_path / 'p.json'}" in text.replace("\n", " ").replace("  ", " ")


def test_calibrating_shows_and_saves_the_efficiencies(tmp_path: Path) -> None:
    words = ("alexnet-of", "--batch", 64, "--device", "titan-v", "--calibrate", "alexnet-of:256:6000")
    text = run(profile, *words, "--save-device", tmp_path / "fast.yaml")
    assert "conv" in text
    assert DeviceKind.load(tmp_path / "fast.yaml").efficiency["conv"] > 2.09


@needs_pipedream
def test_pipedreams_profiles_are_imported(tmp_path: Path) -> None:
    run(profile, "--import", PIPEDREAM / "gnmt.txt", "--batch", 128, "-o", tmp_path / "gnmt.json")
    assert Profile.load(tmp_path / "gnmt.json").source == "imported"


def test_a_profile_is_printed_as_json() -> None:
    plain = json.loads(run(profile, "tiny-cnn", "--batch", "4,8", "--device", "h200", "--json"))
    assert (plain["format"], plain["device"]) == ("stagewright.profile", "h200")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("tiny-cnn",), "the batch is not given"),
        (("tiny-cnn", "--batch", "0"), "--batch has 0: expected 1 or more"),
        (("tiny-cnn", "--batch", "x"), "--batch is 'x': expected whole numbers"),
        (("--batch", "8"), "no model is given"),
        (("tiny-cnn", "--batch", "8", "--device", "tpu"), "no device is named 'tpu'"),
        (("tiny-cnn", "--batch", "8", "--device", "v100", "--calibrate", "fast"), "expected MODEL:ROWS:IMAGES_PER_S"),
        (("tiny-cnn", "--batch", "8", "--device", "v100", "--save-device", "x.yaml"), "goes with --calibrate"),
        (("tiny-cnn", "--batch", "8", "--precision", "int8"), "--precision is 'int8'"),
    ],
)
def test_a_wrong_profile_command_says_what_is_wrong(words: tuple[str, ...], error: str) -> None:
    with pytest.raises(StagewrightError, match=error):
        run(profile, *words)


def test_a_cluster_is_read_drawn_and_saved(tmp_path: Path) -> None:
    (tmp_path / "topo.txt").write_text(PAIRS.strip("\n"))
    words = ("--topology", tmp_path / "topo.txt", "--device", "v100", "--rate", "SYS=3.5e9", "-o", tmp_path / "c.yaml")
    text = run(cluster, *words)
    assert "├─ 3.5 GB/s SYS ─ cpu1" in text
    assert Cluster.load(tmp_path / "c.yaml").name == "topo"
    assert run(cluster, tmp_path / "c.yaml") == text.replace(f"saved {tmp_path / 'c.yaml'}\n", "")


def test_ready_made_clusters_are_listed_and_drawn() -> None:
    assert "titan-v-8" in run(cluster, "--list")
    assert "8 × titan-v, 11.8 GiB" in run(cluster, "titan-v-8")
    assert json.loads(run(cluster, "local-cpu", "--json"))["format"] == "stagewright.cluster"


def test_this_machine_is_drawn_when_nothing_is_named() -> None:
    assert "local: 1 host" in run(cluster)
    assert "3 devices" in run(cluster, "--workers", 3)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("nowhere",), "no cluster is named 'nowhere'"),
        (("--topology", "none.txt", "--device", "v100"), "none.txt: No such file"),
        (("--topology", "none.txt"), "does not say what its GPUs are"),
        (("titan-v-8", "--device", "v100"), "go with --topology"),
        (("titan-v-8", "--topology", "x"), "describes a cluster by itself"),
        (("--workers", "0"), "--workers is 0"),
        (("v100-sxm2-8x4", "--measure"), "4 hosts and 32 devices: links are measured"),
    ],
)
def test_a_wrong_cluster_command_says_what_is_wrong(words: tuple[str, ...], error: str) -> None:
    with pytest.raises(StagewrightError, match=error):
        run(cluster, *words)
