"""All replicas of a stage begin with the same weights, whatever each worker built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.running import run_workers


@pytest.mark.timeout(180)
def test_replicas_of_an_unseeded_model_stay_equal(tmp_path: Path) -> None:
    run_workers(4, "tests.runtime.unseeded", str(tmp_path))
    seen = [json.loads((tmp_path / f"worker-{worker}.json").read_text()) for worker in range(4)]
    assert all(each == seen[0] for each in seen)
