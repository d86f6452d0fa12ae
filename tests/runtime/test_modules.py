"""Models that are easy to get wrong train as a plain loop trains them, with real processes, under several plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.cases import Case
from tests.runtime.modules import MODELS
from tests.runtime.test_exactness import check, run_cases

PLANS = (
    {"placement": "4", "microbatches": 1},
    {"placement": "3-1", "microbatches": 2, "batch": 23},
    {"placement": "2-2", "microbatches": 3, "policy": "zero-bubble"},
    {"placement": "loop", "staleness": "2bw", "optimizer": "adamw"},
)


@pytest.mark.timeout(300)
def test_every_model_trains_under_every_plan_as_in_a_plain_loop(tmp_path: Path) -> None:
    cases = [Case(model=model, **plan) for model in MODELS for plan in PLANS]
    check(run_cases(cases, tmp_path, 250), len(cases))
