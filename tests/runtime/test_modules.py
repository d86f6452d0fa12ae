"""Models that are easy to get wrong train as a plain loop trains them, with real processes, under several plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.cases import Case
from tests.runtime.modules import MODELS
from tests.runtime.test_exactness import check, run_cases

PLANS = (
    {"placement": "4", "microbatches": 1},
    {"placement": "3-1", "microbatches": 2, "batch": 23, "optimizer": "adamw"},
    {"placement": "2-2", "microbatches": 3, "policy": "zero-bubble"},
    {"placement": "loop", "staleness": "2bw", "optimizer": "adamw"},
    {"placement": "4", "microbatches": 1, "batch": 3, "optimizer": "adamw"},
)
WHOLE = (
    {"placement": "loop", "microbatches": 1, "recompute": True},
    {"placement": "loop", "microbatches": 1, "staleness": "ssp"},
)
"""Plans under which a stage sees all rows of a batch at once."""


def cases_of(name: str, stride: int) -> list[Case]:
    """The cases of a model: all of its plans, or one in so many, beginning with another one for each model."""
    plans = WHOLE if MODELS[name].mixes_rows else (*PLANS, *WHOLE)
    first = list(MODELS).index(name) % min(stride, len(plans))
    return [Case(model=name, **plan) for plan in plans[first::stride]]


@pytest.mark.timeout(400)
def test_every_model_trains_under_some_plans_as_in_a_plain_loop(tmp_path: Path) -> None:
    cases = [case for name in MODELS for case in cases_of(name, 3)]
    check(run_cases(cases, tmp_path, 350), len(cases))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_model_trains_under_every_plan_as_in_a_plain_loop(tmp_path: Path) -> None:
    cases = [case for name in MODELS for case in cases_of(name, 1)]
    check(run_cases(cases, tmp_path, 1700), len(cases))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("staleness", ["0", "ssp", "2bw", "3,3"])
def test_a_scaled_loss_and_skipped_steps_leave_the_numbers_of_a_plain_loop(tmp_path: Path, staleness: str) -> None:
    """The scale doubles after every other step and halves at the bad one; no update may notice."""
    scaled = {"placement": "3-1", "staleness": staleness, "steps": 12, "precision": "fp16"}
    cases = [Case(**scaled), Case(**scaled, overflow_at=5), Case(**scaled, overflow_at=4, clip_norm=0.1)]
    check(run_cases(cases, tmp_path, 250), len(cases))
