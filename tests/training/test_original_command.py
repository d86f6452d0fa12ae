"""scripts/train_fp32_ssp.sh: the command of the benchmark series, word by word and on the CPU."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_fp32_ssp.sh"
TWO_HOSTS = "0:0-7,1:0-7.0:0-7,1:0-7"
LINE = re.compile(
    r"train: epoch 0, iter (\d+), loss: \d+\.\d{6}, top_1: \d\.\d{6}, top_k: \d\.\d{6}, samples/s: \d+\.\d{3} \d+\.\d"
)


def options_of(arguments: str, **environment: str) -> dict[str, str]:
    """The options that the script would give to `stagewright train`."""
    done = script(arguments, STAGEWRIGHT="echo", **environment)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[0] == "train"
    return {"model": words[1], **dict(zip(words[2::2], words[3::2]))}


def script(arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with these arguments and variables."""
    known = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "PYTHONPATH")}
    words = [str(SCRIPT), *shlex.split(arguments)]
    return subprocess.run(words, env={**known, **environment}, capture_output=True, text=True, timeout=220)


# What it asks for


def test_the_batch_is_per_device_and_several_stages_are_stale() -> None:
    asked = options_of("4 252 0:0-6.0:7 alexnet")
    assert (asked["model"], asked["--epochs"], asked["--batch-per-device"]) == ("alexnet", "4", "252")
    assert (asked["--placement"], asked["--staleness"], asked["--schedule"]) == ("0:0-6.0:7", "ssp", "1f1b")
    assert (asked["--precision"], asked["--device"], asked["--log-every"]) == ("fp32", "cuda", "100")


@pytest.mark.parametrize(
    ("environment", "placement"),
    [({}, "0:0-7"), ({"DEVICES": "4"}, "0:0-3"), ({"HOSTS": "2", "DEVICES": "4"}, "0:0-3,1:0-3")],
)
def test_an_empty_placement_is_every_device_of_every_host(environment: dict[str, str], placement: str) -> None:
    asked = options_of("4 256 '' alexnet", **environment)
    assert asked["--placement"] == placement
    assert "--staleness" not in asked


def test_hosts_are_started_by_their_addresses() -> None:
    asked = options_of(f"4 64 {TWO_HOSTS} resnet50 /data 10.0.0.1,10.0.0.2")
    assert (asked["--placement"], asked["--nodes"], asked["--data"]) == (TWO_HOSTS, "10.0.0.1,10.0.0.2", "/data")


def test_the_environment_has_what_was_edited_by_hand() -> None:
    asked = options_of("4 64 0:0-3.0:4-7 vgg16", RATIO="11:7", STATIC="0", STEPS="50", STALENESS="2bw", IMAGE_SIZE="96")
    assert (asked["--ratio"], asked["--schedule"], asked["--steps"]) == ("11:7", "dynamic", "50")
    assert (asked["--staleness"], asked["--image-size"]) == ("2bw", "96")


@pytest.mark.parametrize(
    ("devices", "placement"),
    [(None, "0:0-3,0:4-7.0:0-3,0:4-7"), ("8", "0:0-7,0:8-15.0:0-7,0:8-15"), ("2", "0:0-1,0:2-3.0:0-1,0:2-3")],
)
def test_on_the_cpu_hosts_share_eight_workers_here(devices: str | None, placement: str) -> None:
    asked = options_of(
        f"4 64 {TWO_HOSTS} resnet50 /data 10.0.0.1,10.0.0.2", DEVICE="cpu", **({"DEVICES": devices} if devices else {})
    )
    assert asked["--placement"] == placement
    assert asked["--image-size"] == "64"
    assert "--nodes" not in asked


def test_too_few_words_are_answered_with_the_usage() -> None:
    done = script("4 252")
    assert done.returncode == 2
    assert "EPOCHS BATCH PLACEMENT MODEL [DATA_DIR] [NODE_IPS]" in done.stderr


def test_the_hosts_commands_are_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = "train tiny-cnn --device cpu --batch 8 --placement 0:0,1:0 --nodes one,two --steps 3"
    monkeypatch.setattr(sys, "argv", ["stagewright", *line.split(), "--dry-run"])
    with pytest.raises(SystemExit):
        main([*line.split(), "--dry-run"])
    *_, first, second = capsys.readouterr().out.splitlines()
    assert f"-m stagewright {line}" in first
    assert "--dry-run" not in first
    assert first.startswith("ssh -o BatchMode=yes ")
    assert " -- one " in first
    assert "--node-rank=1" in second


# That it runs


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records") / "made"
    with pytest.raises(SystemExit):
        main(["data", "make", str(folder), "--images", "200", "--format", "ofrecord"])
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("with_records", [False, True], ids=["made-up", "records"])
@pytest.mark.parametrize(
    "arguments",
    ["4 6 0:0-6.0:7 alexnet", "4 6 '' alexnet", f"4 4 {TWO_HOSTS} resnet50"],
)
def test_it_runs_on_the_cpu_with_eight_workers(arguments: str, with_records: bool, records: Path) -> None:
    """The three commands of the series with fewer rows: three steps, and their log lines."""
    more = f" {records} 10.0.0.1,10.0.0.2" if with_records else ""
    command = f"{sys.executable} -m stagewright"
    wrapper = records.parent / "stagewright"
    wrapper.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    wrapper.chmod(0o755)
    done = script(arguments + more, DEVICE="cpu", STEPS="3", STAGEWRIGHT=str(wrapper))
    assert done.returncode == 0, done.stderr
    assert [match[1] for match in map(LINE.fullmatch, done.stdout.splitlines()) if match] == ["1", "2", "3"]
