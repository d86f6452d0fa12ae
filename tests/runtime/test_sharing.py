"""Optimizer states shared out among replicas: the same numbers, and each replica keeps its part of the states."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.cluster import parse_devices
from stagewright.errors import UsageError
from stagewright.models import build_model
from stagewright.plan import Plan, Stage
from stagewright.runtime.settings import Settings
from stagewright.scheduling import make_schedule
from stagewright.training.start import train
from tests.runtime.cases import Case
from tests.runtime.test_exactness import check, run_cases

CASES = [
    Case("3", microbatches=2, batch=23, optimizer="adamw"),
    Case("3", "zero-bubble", "rotate", 3, 23, "scheduled", "2bw", clip_norm=0.05),
    *(Case("3-1", optimizer=name, batch=23, microbatches=3) for name in ("sgd", "adagrad", "adafactor", "muon")),
    Case("3-1", route="rotate", optimizer="adamw", staleness="ssp", steps=12),
    Case("2-1-1", "dynamic", optimizer="scheduled", staleness="ssp", steps=12, microbatches=3),
    Case("2-1-1", optimizer="muon", staleness="2bw", clip_norm=0.05, recompute=True),
    Case("4", "gpipe", optimizer="sgd", precision="fp16", overflow_at=2, num_buckets=3),
    Case("shared", "interleaved", clip_norm=0.05, staleness="ssp", steps=8, optimizer="adamw"),
]


@pytest.mark.timeout(200)
def test_sharded_states_change_no_number(tmp_path: Path) -> None:
    """Against plain PyTorch: uneven plans and rows, stale versions, clipping, an overflow, whole-matrix optimizers."""
    cases = [Case(**{**vars(case), "shard_optimizer": True}) for case in CASES]
    check(run_cases(cases, tmp_path, 90), len(cases))


def test_corrections_that_keep_weights_are_refused_before_a_worker_starts() -> None:
    model = build_model("tiny-cnn")
    stage = Stage(layers=model.names, devices=parse_devices("0:0-1"), versions=2, shard_optimizer=True)
    schedule = make_schedule(Plan(model="tiny-cnn", stages=(stage,), batch=4))
    with pytest.raises(UsageError, match=r"--correct predict keeps weights .* stage 0 has its states sharded"):
        train(schedule, model, settings=Settings(correct=("predict",)))
