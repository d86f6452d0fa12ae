"""`stagewright bench` as a person meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stagewright.cli import main
from stagewright.report.cases import read_results

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
SUITE = """
format: stagewright.suite
version: 1
name: four
cluster: titan-v-8
defaults: {device: cpu, steps: 6, warm_up: 1, epoch_images: 6400, options: {threads: 1}}
cases:
- {name: one, model: mlp, batch: 64, devices: 1}
- {name: two, model: mlp, batch: 64, devices: 2}
- {name: cut, model: mlp, batch: 64, placement: 0:0.0:1, microbatches: 2}
- {name: nan, model: mlp, batch: 64, devices: 1, options: {learning_rate: 1.0e+30}}
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process: its status, what it printed, and what it said on stderr."""

    def ran(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(("bench", *words))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return ran


@pytest.fixture
def suite(tmp_path: Path) -> str:
    path = tmp_path / "four.yaml"
    path.write_text(SUITE)
    return str(path)


def test_the_list_says_how_each_case_would_run(run: Run, suite: str) -> None:
    status, out, _ = run(suite, "--list")
    assert status == 0
    assert [line.split()[:3] for line in out.splitlines()[2:6]] == [
        [name, "●", "train"] for name in ("one", "two", "cut", "nan")
    ]
    status, out, _ = run(suite, "--list", "--json", "--simulate", "--only", "t*")
    (row,) = json.loads(out)
    assert (row["name"], row["source"]) == ("two", "simulated")
    assert row["command"] == (
        "stagewright simulate mlp --cluster titan-v-8 --batch 64 --placement 0:0-1 --precision fp32 --data synthetic "
        "--epoch-images 6400"
    )


def test_a_simulated_suite_becomes_a_report_with_every_row(run: Run, tmp_path: Path, suite: str) -> None:
    out = tmp_path / "out"
    status, text, told = run(suite, "--simulate", "-o", str(out), "--json")
    rows = json.loads(text)
    assert status == 0
    assert [row["name"] for row in rows] == ["one", "two", "cut", "nan"]
    assert {row["source"] for row in rows} == {"simulated"}
    assert "4/4  ◇ nan · run 1:" in told
    assert "left" in told.splitlines()[0]
    with pytest.raises(SystemExit):
        main(("report", str(out)))
    page = (out / "report.md").read_text()
    for name in ("one", "two", "cut", "nan"):
        assert re.search(rf"\| {name} \| [^|]+ \| ◇ simulated \|", page)
    assert "(6,400 samples)" in page
    status, _, told = run(suite, "--simulate", "-o", str(out))
    assert "nothing was left to run" in told


def test_a_simulation_is_the_one_that_its_command_makes(run: Run, tmp_path: Path, suite: str) -> None:
    _, text, _ = run(suite, "--simulate", "--only", "cut", "-o", str(tmp_path / "out"), "--json")
    (row,) = json.loads(text)
    record = read_results(tmp_path / "out").cases[0].record
    done = subprocess.run(
        [sys.executable, "-m", *record.command.split(), "--json"], capture_output=True, text=True, timeout=100
    )
    assert json.loads(done.stdout)["images_per_s"] == pytest.approx(row["images_per_s"])


MISTAKES: list[tuple[tuple[str, ...], str, str]] = [
    (("nothing", "--list"), "no suite is named 'nothing'", "give one of these names"),
    (("SUITE",), "the folder for the results is not given", "add -o DIR"),
    (("SUITE", "dp-vs-ssp", "--list"), "one suite at a time", "compare A B"),
    (("SUITE", "--only", "x*", "--list"), "--only 'x*' matches no case of four", "--list"),
    (("SUITE", "--device", "tpu", "--list"), "--device is 'tpu'", ""),
    (("SUITE", "--steps", "2", "--list"), "--steps is 2", ""),
    (("SUITE", "--repetitions", "0", "-o", "x"), "--repetitions is 0", ""),
    (("SUITE", "--cluster", "moon", "--simulate", "--list"), "no cluster is named 'moon'", "give one of these"),
    (("compare", "a"), "compare takes two folders, not 1", "compare A B"),
    (("compare", "a", "b"), "a: no such folder", "give the folder"),
]


@pytest.mark.parametrize(("words", "what", "todo"), MISTAKES, ids=[what for _, what, _ in MISTAKES])
def test_a_mistake_is_a_line_or_two_and_status_2(
    words: tuple[str, ...], what: str, todo: str, run: Run, suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*(suite if word == "SUITE" else word for word in words))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert what in err
    assert todo in err
    assert len(err.splitlines()) <= 2


def test_an_option_that_train_does_not_know_is_found_before_anything_runs(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SUITE.replace("learning_rate: 1.0e+30", "lerning_rate: 1"))
    status, _, err = run(str(path), "-o", str(tmp_path / "out"))
    assert status == 2
    assert "case nan: `stagewright train` would not take it: No such option: --lerning-rate" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(900)
def test_four_real_cases_killed_twice_complete_with_every_repetition_counted_once(tmp_path: Path, suite: str) -> None:
    out = tmp_path / "out"
    words = [sys.executable, "-m", "stagewright", "bench", suite, "--repetitions", "5", "-o", str(out), "--json"]

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)

    for runs in (2, 6):
        running = start()
        deadline = time.monotonic() + 300
        while len(list(out.rglob("*.log"))) <= runs:
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.1)
        time.sleep(1.0)
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate(timeout=30)
    text, _ = start().communicate(timeout=600)

    rows = {row["name"]: row for row in json.loads(text)}
    assert {name: row["repetitions"] for name, row in rows.items()} == {"one": 5, "two": 5, "cut": 5, "nan": 0}
    assert "not finite" in rows["nan"]["reason"]
    results = read_results(out)
    assert {case.name: len(case.records) for case in results.cases} == {"one": 5, "two": 5, "cut": 5}
    assert [failure.name for failure in results.failures] == ["nan"]
    for case in results.cases:
        assert all(use.driver_bytes for record in case.records for use in record.devices)
        assert all(record.epoch_samples == 6400 for record in case.records)
