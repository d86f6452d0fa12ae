"""Every correction of stale weights equals its reference, in fp64 with real processes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from stagewright.runtime.corrections import CORRECTIONS
from tests.runtime.cases import Case
from tests.runtime.test_exactness import check, run_cases

WAYS = [name for name in CORRECTIONS if name != "none"]


def the_cases() -> list[Case]:
    """Each correction on each placement with up to four versions, and what it must get on with."""
    delays = (("1-1", "4,1"), ("1-1", "2bw"), ("3-1", "ssp"), ("2-1-1", "4,2,1"), ("2-1-1", "ssp"))
    found = [
        Case(place, correct=way, staleness=stale, optimizer=optimizer, steps=10)
        for (place, stale), way, optimizer in product(delays, WAYS, ("sgd", "adamw"))
    ]
    for way in WAYS:
        how = {"correct": way, "steps": 10, "staleness": "3,2"}
        found += [
            Case("1-1", clip_norm=0.05, saved_after=5, **how), Case("1-1", precision="fp16", overflow_at=4, **how),
            Case("1-1", model="tied words", saved_after=4, optimizer="adamw", **how), Case("3-1", "dynamic", **how),
        ]  # fmt: skip
    by_stage = [Case("2-1-1", staleness="3,2,1", correct="predict,error-feedback,none", steps=10)]
    muon = [Case("1-1", staleness="2bw", optimizer="muon", correct=way, steps=8) for way in ("predict", "rescale")]
    return [*found, *by_stage, *muon]


@pytest.mark.timeout(300)
def test_corrections_equal_their_references(tmp_path: Path) -> None:
    """Clipped, with steps that overflow, resumed, with tied parameters, by arrival, and another one in each stage."""
    cases = the_cases()
    check(run_cases(cases, tmp_path, 140), len(cases))
