"""CPU workers keep the memory of one step for the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from stagewright.cluster import DeviceId
from stagewright.plan import Plan, Stage
from stagewright.profiling.heap import KEPT_LONGER
from stagewright.runtime.launch.local import _worker_environment
from stagewright.runtime.settings import Settings
from tests.runtime.running import ROOT


def run(*words: str) -> list[str]:
    command = [sys.executable, "-m", "tests.profiling.heap_steps", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.splitlines()


def test_workers_allocators_are_told_unless_the_user_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEPT_LONGER:
        monkeypatch.delenv(name, raising=False)
    plan = Plan(model="any", batch=4, stages=(Stage(layers=("a",), devices=(DeviceId(0, 0),)),))
    made = _worker_environment(plan, tmp_path, Settings(threads=1))
    assert [made[name] for name in KEPT_LONGER] == ["10000", "1"]
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "5")
    made = _worker_environment(plan, tmp_path, Settings(threads=1))
    assert [made[name] for name in KEPT_LONGER] == ["5", "1"]


def test_the_commands_allocator_is_told_before_torch_is_loaded() -> None:
    """The command is asked for a verb that fails, and looked at from outside when it is over."""
    told = (
        "import atexit, os, sys; from stagewright.cli import main; assert 'torch' not in sys.modules;"
        "atexit.register(lambda: print([os.environ[name] for name in sorted(os.environ) if 'MIMALLOC' in name]));"
        "main(['nothing'])"
    )
    without = {name: value for name, value in os.environ.items() if name not in KEPT_LONGER}
    for given, expected in (({}, "10000"), ({"MIMALLOC_PURGE_DELAY": "5"}, "5")):
        command, environment = [sys.executable, "-c", told], {**without, **given}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"['1', '{expected}']\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
@pytest.mark.timeout(120)
def test_later_steps_fault_no_pages_in() -> None:
    told, faults = run("keep")
    if told == "cannot keep":
        pytest.skip("this C library has no mallopt")
    step_pages = 24 * 4 * 2**20 // 4096
    # A system that takes pages back while others press for memory faults some steps in again, but not most.
    assert median(map(int, faults.split())) < step_pages / 20
