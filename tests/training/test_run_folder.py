"""A run's folder belongs to one run: another is refused, never mixed in, and nothing of it is lost or left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stagewright.cli import main
from stagewright.runtime.checkpoint.resuming import whole_model
from stagewright.runtime.checkpoint.storage import SUMS, checkpoints_in, find_checkpoint, path_of, prune
from stagewright.training.events import read_events

ROOT = Path(__file__).parents[2]
TRAIN = ("train", "tiny-cnn", "--device", "cpu", "--batch", "8", "--checkpoint-every", "5")


def train(folder: Path | None, *options: str) -> int:
    """The status of a run of one worker in this process."""
    where = () if folder is None else ("-o", str(folder))
    with pytest.raises(SystemExit) as ended:
        main([*TRAIN, *where, *options])
    return int(ended.value.code or 0)


def steps_in(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints_in(folder)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = find_checkpoint(folder, print)
    assert found is not None
    return whole_model(found[0])


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 20 steps."""
    folder = tmp_path_factory.mktemp("runs") / "older"
    assert train(folder, "--steps", "20", "--learning-rate", "0.3") == 0
    return folder


@pytest.fixture
def holding(older: Path, tmp_path: Path) -> Path:
    """A copy of it, to do harm to."""
    return shutil.copytree(older, tmp_path / "holding")


def test_a_second_run_is_refused_and_changes_nothing(holding: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in holding.rglob("*") if path.name != "run.lock"}
    assert train(holding, "--steps", "10") == 2
    said = capsys.readouterr().err
    assert f"{holding} holds a run of tiny-cnn" in said
    assert "--resume auto" in said
    assert "--overwrite" in said
    assert {path: path.stat().st_mtime_ns for path in holding.rglob("*") if path.name != "run.lock"} == before


def test_overwriting_removes_the_old_run_and_nothing_else(holding: Path) -> None:
    (holding / "notes.txt").write_text("mine")
    old = json.loads((holding / "run.json").read_text())["id"]
    assert train(holding, "--steps", "10", "--overwrite") == 0
    assert steps_in(holding) == [10, 5]
    assert json.loads((holding / "run.json").read_text())["id"] != old
    assert (holding / "notes.txt").read_text() == "mine"
    assert max(event.get("iter", 0) for _, event in read_events(holding)) == 10


def test_a_resumed_run_keeps_its_id_and_tells_what_changed(holding: Path) -> None:
    old = json.loads((holding / "run.json").read_text())["id"]
    assert train(holding, "--steps", "25", "--learning-rate", "0.1", "--resume", "auto") == 0
    assert json.loads((holding / "run.json").read_text())["id"] == old
    words = [event["text"] for _, event in read_events(holding) if event["event"] == "resume"]
    assert "recipe was sgd, learning_rate 0.3, and is now sgd, learning_rate 0.1" in words
    assert any(word.startswith("going on after step 20") for word in words)


def test_another_model_cannot_go_on_with_the_run(holding: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(holding, "--steps", "25", "--resume", "auto", "--num-classes", "7") == 2
    assert "holds a run of a model with other parameters" in capsys.readouterr().err


def test_an_older_checkpoint_is_not_gone_on_from_beside_later_ones(
    holding: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restart would take the later ones; in a folder of its own the run may go on from it."""
    older = str(path_of(holding, 15))
    assert train(holding, "--steps", "25", "--resume", older) == 2
    assert "has later checkpoints than step-00000015: step-00000020" in capsys.readouterr().err
    assert train(tmp_path / "new", "--steps", "25", "--resume", older) == 0
    assert steps_in(tmp_path / "new") == [25, 20]


def test_two_runs_cannot_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    words = [*TRAIN, "-o", str(folder), "--steps", "1000000", "--threads", "1"]
    first = subprocess.Popen([sys.executable, "-m", "stagewright", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: bool(steps_in(folder)))
        for how in ((), ("--resume", "auto"), ("--overwrite",)):
            assert train(folder, "--steps", "5", *how) == 2
            assert f"belongs to a run that is under way (process {first.pid} on " in capsys.readouterr().err
        assert first.poll() is None
    finally:
        first.terminate()
        status = first.wait(60)
    assert status == 0
    assert find_checkpoint(folder, print) is not None


@pytest.mark.timeout(180)
def test_a_restart_takes_no_checkpoint_of_another_run(older: Path, tmp_path: Path) -> None:
    """Even one that lies among its own, is whole and has a later step."""
    folder = tmp_path / "run"
    more = ("--devices", "2", "--steps", "1000000", "--max-restarts", "1", "--threads", "1", "--learning-rate", "0.01")
    run = subprocess.Popen(
        [sys.executable, "-m", "stagewright", *TRAIN, "-o", str(folder), *more], cwd=ROOT, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        wait_until(lambda: bool(steps_in(folder)))
        foreign = path_of(folder, 900_000_000)
        shutil.copytree(path_of(older, 20), foreign)
        last = max(step for step in steps_in(folder) if step < 900_000_000)
        os.kill(next(pid for pid in workers_of(folder) if pid != run.pid), signal.SIGKILL)
        wait_until(lambda: any(last < step < 900_000_000 for step in steps_in(folder)) and went_on(folder) is not None)
    finally:
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=60)[0]
    assert run.returncode == 0
    assert foreign.exists()
    assert f"checkpoint {foreign} is of another run; it is passed over" in said
    assert last <= went_on(folder) < 900_000_000


def went_on(folder: Path) -> int | None:
    """The step after which a restarted run went on."""
    words = [event["text"] for _, event in read_events(folder) if event["event"] == "resume"]
    found = [int(match[1]) for word in words if (match := re.match(r"going on after step (\d+)", word))]
    return found[0] if found else None


def workers_of(folder: Path) -> list[int]:
    """The workers of a run, by their names and the logs that they write to."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            name = (entry / "comm").read_text() if entry.name.isdigit() else ""
            if name.startswith("worker-") and str(folder) in os.readlink(entry / "fd" / "1"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_what_is_kept_are_good_checkpoints_of_this_run(holding: Path, older: Path) -> None:
    """Neither damaged nor foreign ones count, and the newest good one stays."""
    run = json.loads((holding / "run.json").read_text())["id"]
    for step in (20, 15):
        (path_of(holding, step) / SUMS).write_text("nonsense")
    shutil.copytree(path_of(older, 20), path_of(holding, 99))
    manifest = path_of(holding, 99) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(run, "another"))
    prune(holding, 1, set())
    assert steps_in(holding) == [99, 20, 15, 10]
    assert find_checkpoint(holding, lambda text: None)[1]["step"] == 10


def test_no_step_that_was_told_to_be_saved_is_lost_to_older_numbers(holding: Path, tmp_path: Path) -> None:
    """After the newest ones were damaged, a run goes on from an earlier one and keeps what it saves."""
    for step in (20, 15):
        (path_of(holding, step) / SUMS).write_text("nonsense")
    assert train(holding, "--steps", "13", "--resume", "auto", "--keep", "1", "--checkpoint-every", "3") == 0
    assert find_checkpoint(holding, lambda text: None)[1]["step"] == 13


def test_the_last_step_is_saved_whether_or_not_it_is_due(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--steps", "7") == 0
    assert steps_in(tmp_path / "run") == [7, 5]


def test_a_last_step_that_cannot_be_saved_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something is in the way of the last checkpoint alone."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / ".step-00000010.part").write_text("in the way")
    assert train(folder, "--steps", "10") == 3
    assert steps_in(folder) == [5]


def test_another_optimizer_cannot_go_on(holding: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(holding, "--steps", "25", "--resume", "auto", "--optimizer", "adamw") == 2
    said = capsys.readouterr().err
    assert "the checkpoint is of a run with optimizer sgd, this one has adamw" in said
    assert "--optimizer sgd" in said


def test_export_takes_the_run_of_the_folder(holding: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A later checkpoint of another run that lies there is not its model."""
    other = tmp_path / "other"
    assert train(other, "--steps", "30") == 0
    shutil.copytree(path_of(other, 30), path_of(holding, 30))
    with pytest.raises(SystemExit) as ended:
        main(["export", str(holding), "-o", str(tmp_path / "model.pt")])
    assert ended.value.code == 0
    assert "after step 20" in capsys.readouterr().out
    found, expected = torch.load(tmp_path / "model.pt"), weights(path_of(holding, 20))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_without_a_folder_that_saves_nothing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tempfile.TemporaryDirectory()  # its name is short: a socket's may have 107 characters
    environment = {**os.environ, "TMPDIR": own.name}
    words = ["train", "tiny-cnn", "--device", "cpu", "--batch", "8", "--devices", "2", "--steps", "3"]
    words += ["--no-save-final"]
    subprocess.run([sys.executable, "-m", "stagewright", *words], cwd=tmp_path, env=environment, check=True, timeout=90)
    with own:
        assert [path for path in Path(own.name).rglob("*") if not path.name.startswith("torchinductor_")] == []
    assert not (tmp_path / "runs").exists()


def test_a_run_without_a_folder_that_saves_or_fails_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(None, "--steps", "5") == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny-cnn-")
    assert f"this run is in {folder}" in capsys.readouterr().err
    assert steps_in(folder) == [5]


def test_the_folder_is_this_users_alone(older: Path) -> None:
    assert stat.S_IMODE(older.stat().st_mode) == 0o700


def test_a_folder_that_all_may_write_to_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o777)
    assert train(tmp_path, "--steps", "5") == 2
    assert f"every user can write to {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["checkpoints", ""])
def test_a_file_in_the_place_of_a_folder_is_refused_before_the_first_step(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    (folder if name else tmp_path).mkdir(exist_ok=True)
    (folder / name if name else folder).write_text("in the way")
    assert train(folder, "--steps", "5") == 2
    out, err = capsys.readouterr()
    assert "is a file" in err
    assert "train:" not in out


def test_each_workers_output_is_kept_once(tmp_path: Path) -> None:
    words = [*TRAIN, "-o", str(tmp_path / "run"), "--steps", "5", "--devices", "2"]
    subprocess.run([sys.executable, "-m", "stagewright", *words], cwd=ROOT, check=True, timeout=90)
    logs = [path.relative_to(tmp_path / "run") for path in (tmp_path / "run" / "logs").rglob("*")]
    assert sorted(map(str, logs)) == ["logs/worker-0.log", "logs/worker-1.log"]


def wait_until(is_so: Callable[[], bool], limit_s: float = 150.0) -> None:
    """Returns when something is so; fails when it takes too long."""
    until = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)
