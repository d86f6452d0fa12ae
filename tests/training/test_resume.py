"""Killed in the middle of an epoch and resumed, every image of the epoch is seen exactly once: real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import pytest

from stagewright.cli import main
from stagewright.training.events import read_events
from tests.training.images import write_numbered
from tests.training.recorded import BATCH
from tests.training.recorded import main as train_recorded

ROOT = Path(__file__).parents[2]
PER_EPOCH = 20
Seen = dict[int, list[int]]


def start(folder: Path, data: Path, first: int, steps: int) -> subprocess.Popen[bytes]:
    """Starts the run with three workers."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.training.recorded", str(folder), str(data), str(first), str(steps)]
    environment = {**os.environ, "SEEN": str(folder), "HOLD": "10"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)


def kill_after(run: subprocess.Popen[bytes], folder: Path, step: int) -> int:
    """Waits for a step to be over, kills every process without warning, and gives the last step that was over."""
    deadline_s = time.monotonic() + 100
    while not any(event.get("iter", 0) >= step for _, event in read_events(folder)):
        assert run.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline_s, "the run does not get on"
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait(timeout=10)
    return max(int(event.get("iter", 0)) for _, event in read_events(folder))


def seen(folder: Path, kind: str) -> Seen:
    """For each batch what all workers were given of it."""
    found: Seen = {}
    for path in folder.glob(f"{kind}-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):  # the last one may be cut off
                batch, rows = json.loads(line)
                found.setdefault(batch, []).extend(rows)
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["images", "labels"])
def test_killed_and_resumed_every_image_of_the_epoch_is_seen_exactly_once(
    kind: str, killed_and_resumed: tuple[Path, Path, int]
) -> None:
    killed, resumed, step = killed_and_resumed
    before, after = seen(killed, kind), seen(resumed, kind)
    assert sorted(after) == list(range(step, PER_EPOCH))
    together = {batch: before[batch] if batch < step else after[batch] for batch in range(PER_EPOCH)}
    assert all(len(rows) == BATCH for rows in together.values())
    assert sorted(row for rows in together.values() for row in rows) == list(range(PER_EPOCH * BATCH))


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """Folders of a run that was killed in its first epoch, and of one that went on after its last step."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_numbered(folder / "data", PER_EPOCH * BATCH)
    step = kill_after(start(folder / "killed", data, 0, PER_EPOCH), folder / "killed", 6)
    assert 6 <= step < PER_EPOCH
    with pytest.MonkeyPatch.context() as patch, chdir(ROOT):
        patch.setenv("SEEN", str(folder / "resumed"))
        (folder / "resumed").mkdir()
        train_recorded(str(folder / "resumed"), str(data), str(step), str(PER_EPOCH))
    return folder / "killed", folder / "resumed", step


def test_a_named_checkpoint_that_is_not_good_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "step-00000004"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    options = ["tiny-cnn", "--batch", "8", "--devices", "1", "--steps", "2", "--device", "cpu", "--resume", str(folder)]
    with pytest.raises(SystemExit) as ended:
        main(["train", *options])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"--resume {folder}: no good checkpoint is there (" in said
    assert "Traceback" not in said
