"""Scripts that train several times: workers make the same calls in the same order, or are told so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import stagewright as sw
from stagewright.training.config import Job
from stagewright.training.overhead import next_to_nothing

def train(name):
    model = next_to_nothing()
    profile = sw.make_profile(model, batch_sizes=[2], repeats=1)
    plan = sw.make_plan(profile, CLUSTER, sw.PlanOptions(batch=4, placement="0:0-1")).best.plan
    record = sw.train(sw.make_schedule(plan), model, job=Job(steps=2, warm_up=0), folder=name)
    print(name, len(record.step_s))

from stagewright.profiling.detect import cpu_cluster
CLUSTER = cpu_cluster(2, "here")
is_worker = "STAGEWRIGHT_RUN_FOLDER" in os.environ or "RANK" in os.environ
if sys.argv[1] == "straight" and is_worker:
    train("second")
else:
    train("first")
    train("second")
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("way", "told"), [("in-order", "second 2"), ("straight", "the same calls in the same order")])
def test_a_second_run_needs_the_calls_before_it(tmp_path: Path, way: str, told: str) -> None:
    (tmp_path / "both.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "both.py", way], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode == 0) == (way == "in-order"), done.stderr
    assert told in done.stdout + done.stderr
