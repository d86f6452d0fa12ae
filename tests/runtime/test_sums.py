"""Sums over replicas: those that share a card exchange rows, and each adds up one."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
import torch

from stagewright.runtime.mps import SHARED
from stagewright.runtime.settings import Settings
from stagewright.runtime.transport import is_staged
from stagewright.runtime.world import World, open_world
from tests.runtime.running import run_workers


@pytest.mark.timeout(180)
@pytest.mark.parametrize("members", [[0, 1, 2], [0, 2]])
def test_every_member_has_the_sum_of_all_members_rows(tmp_path: Path, members: list[int]) -> None:
    run_workers(3, "tests.runtime.adding", str(tmp_path), ",".join(map(str, members)))
    seen = [json.loads((tmp_path / f"worker-{worker}.json").read_text()) for worker in range(3)]
    for number, size in enumerate((1, 5, 40_000)):
        rows = [torch.arange(size) * 0.1 * len(members) + 10 * sum(members) + row * len(members) for row in range(3)]
        expected = torch.cat(rows[: len(members)])
        for member in members:
            assert seen[member][number] == seen[members[0]][number], "all have the same bits"
            torch.testing.assert_close(torch.tensor(seen[member][number]), expected)
    assert all(seen[worker] == [] for worker in range(3) if worker not in members)


@pytest.mark.parametrize("transport", ["auto", "staged"])
def test_workers_on_cpus_never_stage(transport: Literal["auto", "staged"], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED, "8")
    with open_world(Settings()) as world:
        assert not is_staged(world, Settings(transport=transport))


@pytest.mark.parametrize(("transport", "is_shared", "expected"), [
    ("auto", False, False), ("auto", True, True), ("nccl", True, False), ("staged", False, True),
])  # fmt: skip
def test_workers_that_share_a_card_stage_unless_told(
    transport: Literal["auto", "nccl", "staged"], is_shared: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED, raising=False)
    if is_shared:
        monkeypatch.setenv(SHARED, "8")
    world = World(0, 1, torch.device("cuda"), timedelta(seconds=1))
    assert is_staged(world, Settings(transport=transport)) is expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(180)
def test_sums_of_a_shared_card_are_those_of_the_cpu(tmp_path: Path) -> None:
    done = run_workers(2, "tests.runtime.adding_on_a_card")
    assert "equal" in done.stdout
