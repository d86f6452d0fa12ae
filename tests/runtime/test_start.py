"""All workers come together within a bound, and all replicas of a stage begin with the same weights."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from stagewright.errors import RunError
from stagewright.runtime.meeting import Loopback
from stagewright.runtime.world import meet
from tests.runtime.running import run_workers


@pytest.mark.timeout(180)
def test_replicas_of_an_unseeded_model_stay_equal(tmp_path: Path) -> None:
    run_workers(4, "tests.runtime.unseeded", str(tmp_path))
    seen = [json.loads((tmp_path / f"worker-{worker}.json").read_text()) for worker in range(4)]
    assert all(each == seen[0] for each in seen)


def test_a_worker_that_does_not_start_is_named_after_the_start_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Loopback("a run").next_rendezvous()
    where = found.bootstrap_store_info
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
    for name, value in zip(names, (where.master_addr, str(where.master_port), "True", "0"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=r"worker 1, 2 did not start within 0\.3 s"):
        meet(0, 3, timedelta(seconds=0.3))
