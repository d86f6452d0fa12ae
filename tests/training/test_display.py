"""What a person sees of a run: each event once, however often its workers are started."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from stagewright.cluster import parse_placement
from stagewright.errors import RunError
from stagewright.plan import Plan, Stage
from stagewright.runtime.run_folder import RunFolder
from stagewright.scheduling import make_schedule
from stagewright.training.config import Job
from stagewright.training.display import Display
from stagewright.training.events import Teller, read_events
from stagewright.training.start import _start_workers, _tell


def test_events_are_shown_once_over_restarts_and_not_those_of_runs_before(tmp_path: Path) -> None:
    starts = []

    def failing(plan: Plan, **named: object) -> None:
        starts.append(plan)
        _tell(tmp_path, "numbers", f"start {len(starts)}")
        raise RunError("worker 1 is gone")

    _tell(tmp_path, "numbers", "of yesterday")
    stage = Stage(layers=("all",), devices=parse_placement("0:0-1")[0])
    schedule = make_schedule(Plan(model="any", stages=(stage,), batch=2))
    job, said = Job(steps=5, checkpoint_every=1, max_restarts=2, resume="auto"), io.StringIO()
    run, console = RunFolder(tmp_path, "one"), Console(file=said, width=200)
    with pytest.raises(RunError, match="worker 1 is gone"):
        _start_workers(schedule, job, run, console, failing, None, None, {"STAGEWRIGHT_COMMAND": "any"})
    assert said.getvalue().splitlines() == [
        "numbers: start 1",
        "restart: worker 1 is gone; starting again (1 of 2)",
        "numbers: start 2",
        "restart: worker 1 is gone; starting again (2 of 2)",
        "numbers: start 3",
    ]


PLAN = {
    "model": "vgg16", "batch": 224, "unit": "images", "steps": 5720, "steps_per_epoch": 1430, "microbatches": 4,
    "policy": "1f1b", "precision": "fp16", "versions": [2, 1],
    "stages": [
        {"devices": "0:0-6", "layers": ["conv1_1", "conv5_3"]}, {"devices": "0:7", "layers": ["fc1", "loss"]},
    ],
}  # fmt: skip
STEP = {
    "epoch": 2, "iter": 3490, "loss": 5.84321, "top_1": 0.031, "top_k": 0.097, "images_per_s": 1488.4, "scale": 32768.0,
    "memory_bytes": 3 << 30, "stage_memory_bytes": [int(6.9 * 2**30), int(3.1 * 2**30)],
}  # fmt: skip
END = {
    "loss": [6.9, 5.8], "after": 5720, "unit": "images", "tokens": None, "samples_per_s": 1488.0, "step_s": 0.1505,
    "num_steps": 5718, "epoch_s": 860.0, "predicted": 1501.0, "predicted_on": "titan-v-8", "folder": "results/vgg16",
    "next": ["stagewright report results/vgg16", "stagewright export results/vgg16 -o model.safetensors"],
}  # fmt: skip


def drawn(folder: Path, columns: int, **changes: object) -> tuple[list[str], list[str]]:
    """What lives on a terminal after a step, and what stays on it after the end."""
    said = io.StringIO()
    console = Console(file=said, width=columns, force_terminal=True, force_interactive=True, color_system=None)
    with Display(folder, console, "starting 8 workers of vgg16") as display:
        teller = Teller(folder)
        for kind, values in (("plan", PLAN), ("train", {**STEP, **changes}), ("end", END)):
            display._show(teller.tell(kind, **values))
        live = display._draw().plain.splitlines()
        display._position = max(position for position, _ in read_events(folder))
    teller.close()
    return live, [line.rstrip() for line in Text.from_ansi(said.getvalue()).plain.splitlines()]


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_a_run_is_two_lines_with_step_rate_loss_memory_by_stage_and_what_is_left(tmp_path: Path, columns: int) -> None:
    (first, second), told = drawn(tmp_path, columns)
    assert max(map(len, (first, second, *told))) <= columns
    assert first.startswith("  epoch 3/4  ━")
    assert first.endswith("━  61%  3,490/5,720 steps  1,488 images/s  5 min 36 s left")
    assert second == "  loss 5.843  top-1 3.1%  top-5 9.7%  memory 6.9 / 3.1 GiB  scale 32768"
    words = " ".join(" ".join(told).split())
    assert "vgg16: conv1_1 … conv5_3 on 0:0-6, fc1 … loss on 0:7; cut at fc1; 224 images a step, 1f1b, 4" in words
    assert "loss 6.9000 → 5.8000 after step 5,720" in words
    assert "1,488.0 images/s · step 150.5 ms (median of 5,718) · epoch 14 min 20 s" in words
    assert "predicted 1,501 images/s for titan-v-8: −0.9 % came of it" in words
    assert "  next: stagewright report results/vgg16" in told


def test_more_than_fits_goes_on_on_another_line(tmp_path: Path) -> None:
    many = [int(6.9 * 2**30)] * 12
    (first, *others), _ = drawn(tmp_path, 60, stage_memory_bytes=many)
    assert "━" not in first
    assert " ".join(" ".join(others).split()).count("6.9") == 12
    assert "scale 32768" in others[-1]
