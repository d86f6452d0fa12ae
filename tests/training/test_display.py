"""What a person sees of a run: each event once, however often its workers are started."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from stagewright.cluster import parse_placement
from stagewright.errors import RunError
from stagewright.plan import Plan, Stage
from stagewright.runtime.settings import Settings
from stagewright.scheduling import make_schedule
from stagewright.training.config import Job
from stagewright.training.start import _start_workers, _tell


def test_events_are_shown_once_over_restarts_and_not_those_of_runs_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def failing(command: object, plan: Plan, folder: Path, *given: object, **named: object) -> None:
        starts.append(plan)
        _tell(folder, "numbers", f"start {len(starts)}")
        raise RunError("worker 1 is gone")

    monkeypatch.setattr("stagewright.training.start.launch", failing)
    monkeypatch.setattr("stagewright.training.start.this_command", lambda: ["any"])
    _tell(tmp_path, "numbers", "of yesterday")
    stage = Stage(layers=("all",), devices=parse_placement("0:0-1")[0])
    schedule = make_schedule(Plan(model="any", stages=(stage,), batch=2))
    job, said = Job(steps=5, checkpoint_every=1, max_restarts=2, resume="auto"), io.StringIO()
    with pytest.raises(RunError, match="worker 1 is gone"):
        _start_workers(schedule, job, Settings(), tmp_path, Console(file=said, width=200))
    assert said.getvalue().splitlines() == [
        "numbers: start 1",
        "restart: worker 1 is gone; starting again (1 of 2)",
        "numbers: start 2",
        "restart: worker 1 is gone; starting again (2 of 2)",
        "numbers: start 3",
    ]
