"""Ending a run by hand: Ctrl-C is what SIGTERM is but for its status, and the second one ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagewright.runtime.checkpoint.storage import find_checkpoint
from stagewright.runtime.run_folder import read_identity
from tests.training.test_run_folder import wait_until, workers_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


def start(folder: Path, workers: int, seconds: float) -> subprocess.Popen[str]:
    """Starts a run whose batches take so long from the fifth on, as a group of processes of its own."""
    command = [sys.executable, "-m", "tests.training.slow", str(folder), str(workers), "5", str(seconds)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_the_first_signal_saves_and_says_where(how: signal.Signals, status: int, workers: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder, workers, 0.05)
    try:
        wait_until((folder / "slow").exists)
        os.killpg(run.pid, how)
        said = run.communicate(timeout=60)[0]
    finally:
        run.kill()
    assert run.returncode == status, said
    assert "Traceback" not in said
    assert f"stopped: by {how.name} after step " in said
    assert f"go on with --resume auto --out {folder}" in said
    found = find_checkpoint(folder, print)
    assert found is not None
    assert found[1]["step"] >= 5
    assert read_identity(folder)["state"] == "stopped"


@pytest.mark.parametrize("workers", [1, 2])
def test_the_second_signal_ends_at_once(workers: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder, workers, 50)
    try:
        wait_until((folder / "slow").exists)
        os.killpg(run.pid, signal.SIGINT)
        time.sleep(1)
        assert run.poll() is None, "the step takes longer"
        started = time.monotonic()
        os.killpg(run.pid, signal.SIGINT)
        said = run.communicate(timeout=30)[0]
    finally:
        run.kill()
    assert run.returncode == 130, said
    assert time.monotonic() - started < 15
    assert "Traceback" not in said
    assert "once more ends at once" in said
    assert workers_of(folder) == []
