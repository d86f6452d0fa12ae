"""All workers come together within a bound, and all replicas of a stage begin with the same weights."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagewright.errors import RunError
from stagewright.runtime.launch.environment import STORE
from stagewright.runtime.launch.meeting import meet
from tests.runtime.running import run_workers


@pytest.mark.timeout(180)
def test_replicas_of_an_unseeded_model_stay_equal(tmp_path: Path) -> None:
    run_workers(4, "tests.runtime.unseeded", str(tmp_path))
    seen = [json.loads((tmp_path / f"worker-{worker}.json").read_text()) for worker in range(4)]
    assert all(each == seen[0] for each in seen)


def test_a_worker_that_does_not_start_is_named_after_the_start_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE, str(tmp_path / "store"))
    with pytest.raises(RunError, match=r"worker 1, 2 did not start within 0\.3 s"):
        meet(0, 3, 0.3)


def test_workers_that_start_again_do_not_go_by_what_those_before_them_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one store that stays, as torchrun's does: the first time one of them does not come, the second time all do."""
    monkeypatch.setenv(STORE, str(tmp_path / "store"))
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(meet, rank, 3, 0.5) for rank in (0, 2)]
        assert all(isinstance(each.exception(), RunError) for each in early)
        met = []
        for _ in range(2):
            coming = [pool.submit(meet, rank, 3, 20) for rank in (2, 1, 0)]
            stores = [each.result()[0] for each in coming]
            stores[0].set("said", str(len(met)))
            met.append([store.get("said") for store in stores])
    assert met == [[b"0"] * 3, [b"1"] * 3]
