"""Trained weights come back to the caller's model, wherever they were trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stagewright.runtime.checkpoint.resuming import whole_model
from stagewright.runtime.checkpoint.storage import checkpoints_in
from tests.training.bringing import plainly
from tests.training.test_torchrun import ROOT, RUN

pytestmark = pytest.mark.timeout(120)


def run(*words: str) -> None:
    done = subprocess.run(
        [*words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


def is_plain(found: dict[str, torch.Tensor]) -> bool:
    """Whether weights are those of the plain loop, in fp64 to the last digits."""
    expected = plainly().state_dict()
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name], expected[name], rtol=0, atol=1e-13) for name in expected
    )


@pytest.mark.parametrize(("placement", "saves"), [("0:0", "saved"), ("0:0", "unsaved"), ("0:0-2.0:3", "saved")])
def test_the_callers_model_has_the_trained_weights(placement: str, saves: str, tmp_path: Path) -> None:
    run(sys.executable, "-m", "tests.training.bringing", str(tmp_path), placement, saves)
    assert is_plain(torch.load(tmp_path / "weights-main.pt"))


def test_a_run_leaves_its_last_weights_by_itself(tmp_path: Path) -> None:
    run(sys.executable, "-m", "tests.training.bringing", str(tmp_path), "0:0.0:1")
    (last,) = checkpoints_in(tmp_path / "run")
    assert last.name == "step-00000004"
    assert is_plain(whole_model(last))


def test_under_torchrun_every_worker_has_the_whole_model(tmp_path: Path) -> None:
    run(*RUN, "--standalone", "--nproc-per-node=2", "-m", "tests.training.bringing", str(tmp_path), "0:0.0:1")
    for rank in range(2):
        assert is_plain(torch.load(tmp_path / f"weights-{rank}.pt")), rank
