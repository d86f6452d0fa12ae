"""The adversary in small: some of its models and plans, and those that once were wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.adversary import run_all

ONCE_WRONG = (209, 338, 435, 1242, 2589)
"""Weights decayed that had no gradient; verdicts dropped too soon (two of them); old versions of tied weights lost in a
checkpoint; halves of a backward over a weight that is used twice."""


@pytest.mark.timeout(300)
def test_odd_models_are_trained_exactly_or_refused(tmp_path: Path) -> None:
    seeds = [*ONCE_WRONG, *range(20)]
    found = run_all(seeds, tmp_path)
    assert sorted(each["seed"] for each in found) == sorted(seeds)
    wrong = [each for each in found if each["kind"] not in ("equal", "refused", "told")]
    assert not wrong, wrong[0]
    assert sum(each["kind"] == "equal" for each in found) > len(seeds) / 2
