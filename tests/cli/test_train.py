"""`stagewright train` does what its options say, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.record import Record
from stagewright.rehearsal.tools import missing
from tests.rehearsal.clusters import star

from .conftest import Run

TRAIN = ("train", "tiny-cnn", "--device", "cpu", "--batch", "12")


def test_a_dry_run_tells_the_plan_and_the_command_and_trains_nothing(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    words = [*TRAIN, "--placement", "0:0-2.0:3", "--cut", "fc1", "--steps", "3", "--dry-run", "-o", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", ["stagewright", *map(str, words)])
    status, out, err = run(*words)
    assert (status, err) == (0, "")
    for told in (
        "tiny-cnn, 12 rows a step in 1 microbatch, split, 1f1b",
        "stage 0 on 0:0-2: conv1 … conv2",
        "stage 1 on 0:3: fc1 … loss",
        "4 workers",
        "3 steps, synthetic data, fp32, on cpu",
        f"not started:\nstagewright {' '.join(TRAIN)} --placement 0:0-2.0:3 --cut fc1 --steps 3 -o {tmp_path / 'run'}",
    ):
        assert told in out
    assert "iter" not in out
    assert not (tmp_path / "run").exists()
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("stagewright")]


def test_a_dry_run_finds_mistakes_too(run: Run) -> None:
    status, out, err = run(*TRAIN, "--cut", "fc9", "--placement", "0:0.0:1", "--dry-run")
    assert (status, out) == (2, "")
    assert "--cut fc9: the model has no such layer" in err


@pytest.mark.parametrize("option", ["--steps", "--devices", "--epoch-images", "--image-size", "--num-classes"])
def test_nothing_is_not_the_default(option: str, run: Run) -> None:
    status, out, err = run(*TRAIN, option, "0")
    assert (status, out) == (2, "")
    assert f"error: {option} is 0: expected 1 or more" in err


@pytest.mark.parametrize("is_file", [False, True])
def test_other_hosts_are_not_played_by_this_one(is_file: bool, tmp_path: Path, run: Run) -> None:
    words: list[object] = ["--placement", "0:0.1:0", "--cut", "fc1"]
    what = "--placement 0:0.1:0"
    if is_file:
        star(1e9, 1e9).save(tmp_path / "two.yaml")
        made = run(
            "plan", "tiny-cnn", "--cluster", tmp_path / "two.yaml", "--batch", 12, *words, "-o", tmp_path / "p.json"
        )
        assert made[0] == 0
        words, what = ["--plan", tmp_path / "p.json"], str(tmp_path / "p.json")
    status, out, err = run(*TRAIN, *words, "--steps", 2, "-o", tmp_path / "run")
    assert (status, out) == (2, "")
    assert f"error: {what} names host 1, and only host 0, this machine, is here" in err
    assert "--nodes host1,host2" in err
    assert not (tmp_path / "run").exists()


# Resuming


def test_past_the_last_step_nothing_is_trained_and_no_rate_is_told(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "run"
    words = [*TRAIN, "--checkpoint-every", 2, "--steps", 4, "-o", folder]
    assert run(*words)[0] == 0
    before = (folder / "record.json").read_bytes()
    for more in ((), ("--json",)):
        status, out, err = run(*words, "--resume", "auto", *more)
        assert status == 0
        assert "nothing is left to train: the checkpoint is of step 4, and --steps is 4" in out + err
        assert "images/s" not in out + err
        assert "images_per_s" not in out
    assert (folder / "record.json").read_bytes() == before
    status, out, _ = run(*words[:-3], 3, "--resume", folder, "-o", tmp_path / "other")
    assert status == 0
    assert "the checkpoint is of step 4, and --steps is 3" in out
    assert not (tmp_path / "other" / "record.json").exists()


def test_workers_that_find_nothing_left_say_so_and_measure_nothing(tmp_path: Path) -> None:
    """Those of a script, or under torchrun: they learn of the last step from the checkpoint."""
    script = tmp_path / "own.py"
    script.write_text(
        "import sys, stagewright as sw\n"
        "plan = sw.Plan(model='tiny-cnn', batch=12, stages=(sw.Stage(layers=sw.build_model('tiny-cnn').names,"
        " devices=sw.parse_devices('0:0-1')),))\n"
        "job = sw.Job(steps=3, checkpoint_every=1, resume=sys.argv[2] if len(sys.argv) > 2 else None)\n"
        "record = sw.train(sw.make_schedule(plan), sw.build_model('tiny-cnn'), job=job, folder=sys.argv[1])\n"
        "print('measured', len(record.step_s), record.summary()['images_per_s'])\n"
    )

    def ran(*words: object) -> str:
        command = [sys.executable, script, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "measured 1 " in ran(tmp_path / "run"), "two of three steps are warm-up"
    told = ran(tmp_path / "new", tmp_path / "run")
    assert "resume: nothing is left to train: the checkpoint is of step 3, and --steps is 3" in told
    assert told.endswith("measured 0 None\n")
    assert Record.load(tmp_path / "new" / "record.json").step_s == ()


# Cuts


@pytest.mark.parametrize("cuts", [("--cut", "conv2,fc1"), ("--cut", "conv2", "--cut", "fc1")])
def test_cuts_are_given_together_or_one_by_one(cuts: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    place = ("--placement", "0:0.0:1.0:2", *cuts)
    _, out, _ = run(*TRAIN, *place, "--dry-run")
    assert [line for line in out.splitlines() if line.startswith("stage ")] == [
        "stage 0 on 0:0: conv1", "stage 1 on 0:1: conv2", "stage 2 on 0:2: fc1 … loss",
    ]  # fmt: skip
    _, out, _ = run("plan", "tiny-cnn", "--cluster", "local-cpu", "--batch", 12, *place, "--no-simulate", "--json")
    assert json.loads(out)["best"]["cuts"] == ["conv2", "fc1"]
    record = tmp_path / "a.record.json"
    assert run("simulate", "tiny-cnn", "--cluster", "local-cpu", "--batch", 12, *place, "-o", record)[0] == 0
    assert [stage.layers[0] for stage in Record.load(record).plan.stages] == ["conv1", "conv2", "fc1"]


@pytest.mark.skipif(missing() is not None, reason=f"emulated hosts: {missing()}")
def test_and_in_a_rehearsal(tmp_path: Path) -> None:
    star(1e9, 1e9, 1e9).save(tmp_path / "three.yaml")
    words = ["--cluster", tmp_path / "three.yaml", "--placement", "0:0.1:0.2:0", "--cut", "conv2,fc1", "--steps", 2]
    command = [
        sys.executable,
        "-m",
        "stagewright",
        "rehearse",
        "tiny-cnn",
        "--batch",
        12,
        *words,
        "-o",
        tmp_path / "run",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    record = Record.load(tmp_path / "run" / "record.json")
    assert [stage.layers[0] for stage in record.plan.stages] == ["conv1", "conv2", "fc1"]


def test_with_json_the_last_line_says_how_it_ended(tmp_path: Path, run: Run) -> None:
    """Finished, refused, and failed where something is in the way of its last checkpoint."""
    folder = tmp_path / "run"
    words = [*TRAIN, "--json", "--checkpoint-every", 2, "-o", folder]
    status, out, _ = run(*words, "--steps", 4)
    end = json.loads(out.splitlines()[-1])
    assert (status, end["state"], end["status"], end["saved_step"]) == (0, "finished", 0, 4)
    assert end["images_per_s"] > 0
    status, out, err = run(*words, "--steps", 6)
    end = json.loads(out.splitlines()[-1])
    assert (status, end["state"], end["status"], end["resumable"]) == (2, "refused", 2, False)
    assert end["error"] in err
    (folder / "checkpoints" / ".step-00000007.part").write_text("in the way")
    status, out, _ = run(*words, "--steps", 7, "--resume", folder / "checkpoints" / "step-00000004")
    end = json.loads(out.splitlines()[-1])
    assert (status, end["state"], end["status"], end["resumable"], end["saved_step"]) == (3, "failed", 3, True, 6)
    assert end["folder"] == str(folder)
    assert "step 7 could not be saved" in end["error"]


# Errors name options


@pytest.mark.parametrize(
    ("option", "value"),
    [("--precision", "fp99"), ("--log-every", "0"), ("--timeout", "-1"), ("--optimizer", "sdg"), ("--keep", "0"),
     ("--start-timeout", "0"), ("--clip-norm", "-2"), ("--crop-area", "3"), ("--checkpoint-every", "0")],
)  # fmt: skip
def test_errors_name_the_option_and_no_class(option: str, value: str, run: Run) -> None:
    status, _, err = run(*TRAIN, "--steps", 2, option, value)
    assert status == 2
    assert err.startswith(f"error: {option} is ")
    assert value in err
    for internal in ("RecipeFile", "Recipe:", "Job", "Settings", "key "):
        assert internal not in err


def test_errors_in_a_file_name_the_file_and_the_key(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("format: stagewright.recipe\nversion: 1\nname: mine\nprecision: fp99\n")
    status, _, err = run(*TRAIN, "--recipe", file)
    assert status == 2
    assert err.startswith(f"error: {file}: key precision is 'fp99': expected ")
