"""The task: a callback that stops early."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guides.own import do


@pytest.mark.timeout(320)
def test_early_stop(tmp_path: Path) -> None:
    lines = do("Stopping early", tmp_path).splitlines()
    steps = int(next(line.split()[1] for line in lines if line.startswith("steps ")))
    assert steps % 10 == 0, "it ends with an epoch"
    assert 20 < steps < 500
    assert f"saved step-{steps:08}" in lines
    assert any(line.startswith("stopped: ") and "is no better than" in line for line in lines)
