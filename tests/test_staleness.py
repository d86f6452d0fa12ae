"""The study of staleness computes what workers compute: its delays in one process equal the workers' reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks import staleness

from stagewright.models import count_of
from tests.runtime.cases import OPTIMIZERS, Case, plan_of, reference, rows_of
from tests.runtime.modules import MODELS
from tests.runtime.test_corrections import the_cases

IN_BOTH = [case for case in the_cases() if case.overflow_at is None and case.saved_after is None]
"""Real workers are held to the same reference in tests/runtime/test_corrections.py."""


def difference(case: Case) -> float:
    """How far the study's weights and losses are from the reference's, as a share."""
    layered = MODELS[case.model].layered()
    plan = plan_of(case, layered.names, layered.cuts())
    run = staleness.Delayed(
        layered, plan.edges, plan.versions, case.correct.split(","), OPTIMIZERS[case.optimizer],
        clip_norm=case.clip_norm, rescale_steps=4,
    )  # fmt: skip
    count, found = count_of(layered.loss), []
    for batch in range(case.steps):
        inputs, targets = rows_of(case, batch)
        found.append(float(run.step(batch, inputs, targets, int(count(*targets)) if count else case.batch)))
    run.settle()
    losses, weights = reference(case, MODELS[case.model].layered(), plan)
    apart = [abs(one - other) / abs(other) for one, other in zip(found, losses)]
    own = {name: each.detach() for name, each in layered.model.named_parameters()}
    return max(*apart, *(float((own[name] - weights[name]).norm() / weights[name].norm()) for name in own))


@pytest.mark.parametrize("case", IN_BOTH, ids=str)
def test_delays_in_one_process_equal_those_of_workers(case: Case) -> None:
    assert difference(case) < 1e-9


def test_a_study_chooses_rates_goes_on_where_it_stopped_and_tells_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = np.random.default_rng(0)
    np.savez(
        tmp_path / "data.npz", images=draws.integers(0, 255, (80, 28, 28), dtype=np.uint8),
        labels=draws.integers(0, 10, 80, dtype=np.uint8), text=draws.integers(0, 255, 40_000, dtype=np.uint8),
    )  # fmt: skip
    small = staleness.Workload("gpt", 2, 2, {"adamw": (1e-3, 1e3), "muon": (1e-3,)}, context=8, width=8, blocks=2)
    monkeypatch.setattr(staleness, "WORKLOADS", {"text": small})
    todo = [
        each for each in staleness.trials(["text"], 1) if each.staleness in ("0", "2bw") and each.optimizer == "adamw"
    ]
    out = tmp_path / "runs"
    out.mkdir()
    staleness.work(tmp_path, out, todo, "cpu", float("inf"))
    told = staleness.read(tmp_path)
    assert {each["rate"] for each in told if each["staleness"] == "2bw"} == {1e-3}, "the rate of the better exact run"
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    staleness.work(tmp_path, out, todo, "cpu", float("inf"))
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("*.json")}, "nothing is done twice"
    text = staleness.table(told)
    assert "| text, adamw |" in text
    assert "2bw" in text
