"""`stagewright rehearse`: a run on emulated hosts, from the command line to the record."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.cli.rehearse import _NOT_HERE, rehearse
from stagewright.cli.train import train
from stagewright.errors import UsageError
from stagewright.record import Record
from stagewright.rehearsal.hosts import is_stale, keys
from stagewright.rehearsal.slices import read_rate
from stagewright.rehearsal.tools import missing
from tests.rehearsal.clusters import star

needs_root = pytest.mark.skipif(missing() is not None, reason=f"emulated hosts: {missing()}")


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, "-m", "stagewright", "rehearse", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)


def stale() -> list[str]:
    """The keys of rehearsals that ended and left something; others may be under way."""
    return [key for key in sorted(keys()) if is_stale(key)]


@needs_root
def test_two_hosts_train_and_leave_a_record_and_nothing_else(tmp_path: Path) -> None:
    star(12.5e6, 12.5e6, shares=(0.5, None)).save(tmp_path / "two.yaml")
    done = run(
        "tiny-cnn", "--cluster", str(tmp_path / "two.yaml"), "--placement", "0:0.1:0", "--cut", "fc1", "--batch", "16",
        "--steps", "4", "--json", "-o", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = Record.load(tmp_path / "run" / "record.json")
    assert (record.source, record.cluster, record.plan.placement) == ("rehearsed", "star", "0:0.1:0")
    assert json.loads(done.stdout)["source"] == "rehearsed"
    assert not stale(), "neither of this one nor of one that was killed before"


@needs_root
@pytest.mark.slow
def test_a_worker_that_fails_is_named_and_all_is_removed(tmp_path: Path) -> None:
    star(12.5e6, 12.5e6).save(tmp_path / "two.yaml")
    done = run(
        "tiny-cnn", "--cluster", str(tmp_path / "two.yaml"), "--batch", "16", "--steps", "4", "--optimizer", "sgd",
        "--learning-rate", "1e30", "-o", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 2
    assert "worker 0 (stage 0, device 0:0)" in done.stderr
    assert "--on-nan skip" in done.stderr
    assert "Traceback" not in done.stderr
    assert not stale(), "neither of this one nor of one that was killed before"


@needs_root
def test_a_wrong_option_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    star(12.5e6, 12.5e6).save(tmp_path / "two.yaml")
    done = run(
        "tiny-cnn", "--cluster", str(tmp_path / "two.yaml"), "--batch", "16", "--steps", "4", "--measure",
        "--on-nan", "wait", "-o", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 2
    assert "--on-nan is 'wait': expected 'stop' or 'skip'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_it_has_the_options_of_train_but_those_that_say_where_workers_run() -> None:
    own = set(inspect.signature(rehearse).parameters)
    assert set(inspect.signature(train).parameters) - own == {*_NOT_HERE, "dry_run"}
    assert own - set(inspect.signature(train).parameters) == {"cluster", "slices", "rate", "measure"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("tiny-cnn",), "give --cluster or --slices"),
        (("tiny-cnn", "--cluster", "hosts-4", "--slices", "8"), "give --cluster or --slices"),
        (("tiny-cnn", "--cluster", "nowhere"), "no cluster is named 'nowhere'"),
        (("tiny-cnn", "--cluster", "hosts-4", "--rate", "1gbit"), "--rate goes with --slices"),
        (("tiny-cnn", "--cluster", "hosts-4", "--device", "cuda"), "emulated hosts compute on the CPU"),
    ],
)
def test_mistakes_are_told_in_words(words: tuple[str, ...], told: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


def test_without_iproute2_it_is_one_clear_error(tmp_path: Path) -> None:
    done = run("tiny-cnn", "--cluster", "hosts-4", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "emulated hosts need root on Linux with iproute2" in done.stderr


@pytest.mark.skipif(__import__("torch").cuda.is_available(), reason="there is a card here")
def test_without_a_card_slices_say_so() -> None:
    done = run("tiny-cnn", "--slices", "8")
    assert done.returncode == 2
    assert "no CUDA card was found here" in done.stderr


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 1.25e8), ("300Mbit", 3.75e7), ("125e6", 1.25e8), ("8bit", 1.0)])
def test_rates_are_bits_with_a_unit_or_bytes_a_second(text: str, rate: float) -> None:
    assert read_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["fast", "0", "-3", "1tbit", "inf", ""])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--rate is"):
        read_rate(text)
