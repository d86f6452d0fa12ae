"""Sums over replicas: those that share a card have them made by their hosts, those of one host in common memory."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import pytest
import torch

from stagewright.runtime.launch.mps import SHARED
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import World, open_world
from tests.runtime.running import run_workers


@pytest.mark.parametrize("transport", ["auto", "staged"])
def test_workers_on_cpus_never_stage(transport: Literal["auto", "staged"], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED, "8")
    with open_world(Settings()) as world:
        assert not world.is_staged(Settings(transport=transport))


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
    assert world.is_staged(Settings(transport=transport)) is expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(180)
def test_sums_of_a_shared_card_are_those_of_the_cpu() -> None:
    done = run_workers(2, "tests.runtime.adding_on_a_card")
    assert "equal" in done.stdout


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory without a name (memfd)")
@pytest.mark.timeout(120)
def test_replicas_of_one_host_add_up_in_common_memory() -> None:
    done = run_workers(3, "tests.runtime.adding_in_common")
    assert "equal" in done.stdout
