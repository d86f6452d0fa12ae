"""Batch norm over all replicas equals batch norm over the whole batch in one process."""

from __future__ import annotations

import re

import pytest

from stagewright.cluster import parse_placement
from stagewright.errors import UsageError
from stagewright.plan import Plan, Stage
from stagewright.runtime.batch_norm import check_batch_norm
from tests.runtime.running import run_workers


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("size", "placement", "policy"), [(3, "0:0-2", "1f1b"), (4, "0:0-2.0:3", "gpipe"), (4, "0:0-2.0:3", "zero-bubble")]
)
def test_uneven_replicas_normalise_as_one(size: int, placement: str, policy: str) -> None:
    done = run_workers(size, "tests.runtime.norms", placement, policy)
    worst = float(re.findall(r"worst (\S+)", done.stdout)[0])
    assert worst < 1e-9
    # Means of 100 and 1,000 with deviations of 0.1 lose no more digits than in torch's own norm in single precision.
    assert float(re.findall(r"far from zero (\S+)", done.stdout)[0]) < 1.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"route": "rotate"}, "rotate"),
        ({"policy": "dynamic"}, "dynamic"),
        ({"batch": 5, "num_microbatches": 2}, "microbatch 0"),
    ],
)
def test_replicas_that_cannot_meet_are_refused(change: dict[str, object], said: str) -> None:
    stage = Stage(layers=("a",), devices=parse_placement("0:0-2")[0])
    plan = Plan(**{"model": "net", "stages": (stage,), "batch": 12, "num_microbatches": 2, **change})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=said):
        check_batch_norm(plan)


def test_one_replica_needs_nobody() -> None:
    stage = Stage(layers=("a",), devices=parse_placement("0:0")[0])
    check_batch_norm(Plan(model="net", stages=(stage,), batch=4, num_microbatches=2, policy="dynamic"))
