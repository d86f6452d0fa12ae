"""The example for a model of one's own: at most 25 lines, alone or under torchrun, with the same result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "own_model.py"


def last_line(*launcher: str) -> str:
    """What the script ends with."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.timeout(320)
def test_alone_and_under_torchrun_it_trains_the_same() -> None:
    alone = last_line()
    assert alone == last_line("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    first, last = (float(part) for part in alone.removeprefix("loss ").split(" → "))
    assert last < 0.5 * first


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 25
