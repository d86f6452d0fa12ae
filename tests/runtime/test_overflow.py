"""One stage's overflow is everyone's: all skip the step together, and the scale halves everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.overflow import BAD, STEPS
from tests.runtime.running import run_workers


@pytest.mark.timeout(180)
def test_an_overflow_in_one_stage_is_skipped_by_all(tmp_path: Path) -> None:
    run_workers(4, "tests.runtime.overflow", str(tmp_path), "3-1")
    seen = [json.loads((tmp_path / f"worker-{worker}.json").read_text()) for worker in range(4)]
    first = 2.0**15
    expected = [first if step < BAD else first / 2 for step in range(STEPS)]
    for each in seen:
        assert each["scales"] == expected
        assert each["moved"] == [step != BAD for step in range(STEPS)]
