"""The example for a model of one's own: at most 25 lines, alone or under torchrun, with the same result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "own_model.py"


def run(*launcher: str) -> list[str]:
    """The lines that the script prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()


@pytest.mark.timeout(320)
def test_alone_and_under_torchrun_it_trains_shows_and_says_the_same_once() -> None:
    alone = run()
    under = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    for lines in (alone, under):
        assert [line.split(",")[1] for line in lines if line.startswith("train: ")] == [
            f" iter {step}" for step in range(10, 61, 10)
        ]
        assert sum(line.startswith("loss ") for line in lines) == 1
    assert alone[-1] == under[-1]
    first, last = (float(part) for part in alone[-1].removeprefix("loss ").split(" → "))
    assert last < 0.5 * first


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 25
