"""A worker that takes much longer than its plan's prediction is named, with what it does for so long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster import parse_placement
from stagewright.plan import Plan, Stage
from stagewright.runtime.safety.pace import _slow_workers
from stagewright.training.events import read_events
from tests.runtime.running import ROOT

FRONT, BACK = parse_placement("0:0,1:0.2:0")
PLAN = Plan(
    model="m", stages=(Stage(layers=("a",), devices=FRONT), Stage(layers=("b",), devices=BACK)), batch=4,
    predicted_step_s=0.1, predicted_compute_s=(0.06, 0.03), predicted_send_s=(0.01, 0.02), predicted_on="rack",
)  # fmt: skip


def seen(compute_s: float, step_s: float = 0.1, **send_s: float) -> dict[str, Any]:
    return {"compute_s": compute_s, "step_s": step_s, "send_s": send_s}


def test_within_the_bound_nobody_is_named() -> None:
    assert _slow_workers(PLAN, {0: seen(0.085), 1: seen(0.01), 2: seen(0.04)}) == []


def test_computing_is_the_reason_even_where_the_others_send_late_because_of_it() -> None:
    found = _slow_workers(PLAN, {0: seen(0.06, 0.4, c=0.3), 1: seen(0.2, 0.4), 2: seen(0.03, 0.4)})
    assert found == ["worker 1 (stage 0, device 1:0) is slow at computing: 200 ms a step, predicted 60"]


def test_sending_is_the_reason_where_all_compute_as_long_as_they_should() -> None:
    """Not where it is hidden behind steps as long as predicted, nor where it is a small part of one."""
    slow = {0: seen(0.06, 0.4, c=0.02), 1: seen(0.06, 0.4, c=0.3), 2: seen(0.03, 0.4, b=0.25)}
    assert _slow_workers(PLAN, slow) == [
        "worker 1 (stage 0, device 1:0) is slow at sending to c: 300 ms a step, predicted 10",
        "worker 2 (stage 1, device 2:0) is slow at sending to b: 250 ms a step, predicted 20",
    ]
    assert _slow_workers(PLAN, {who: {**own, "step_s": 0.12} for who, own in slow.items()}) == []


def test_where_all_are_slow_the_prediction_is_doubted() -> None:
    (found,) = _slow_workers(PLAN, {0: seen(0.2), 1: seen(0.2), 2: seen(0.2)})
    assert found.startswith("all workers are slow at computing, or rack is faster: worker 0 (stage 0, device 0:0)")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("who", "says"),
    [
        ("1", "worker 1 (stage 0, device 0:1) is slow at computing: "),
        ("all", "all workers are slow at computing, or this-host is faster: "),
        ("none", ""),
    ],
)
def test_a_run_names_it_once(who: str, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tests.runtime.lagging", str(folder), who, "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [event["text"] for _, event in read_events(folder) if event["event"] == "slow"]
    assert len(told) == bool(says)
    assert all(text.startswith(says) for text in told)
    assert all(f"slow: {says}"[:40] in " ".join(done.stdout.split()) for _ in told)
