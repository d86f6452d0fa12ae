"""CPU workers keep the memory of one step for the next."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stagewright.profiling.heap import KEPT_10_S
from tests.runtime.running import ROOT


def run(*words: str) -> list[str]:
    command = [sys.executable, "-m", "tests.profiling.heap_steps", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.splitlines()


def test_allocators_are_told_before_torch_is_loaded_unless_the_user_has() -> None:
    told = "import os, stagewright; print([os.environ[name] for name in stagewright.profiling.heap.KEPT_10_S])"
    without = {name: value for name, value in os.environ.items() if name not in KEPT_10_S}
    for given, expected in (({}, "10000"), ({"MIMALLOC_PURGE_DELAY": "5"}, "5")):
        command, environment = [sys.executable, "-c", told], {**without, **given}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"['{expected}', '1']\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
@pytest.mark.timeout(120)
def test_later_steps_fault_no_pages_in() -> None:
    told, faults = run("keep")
    if told == "cannot keep":
        pytest.skip("this C library has no mallopt")
    step_pages = 24 * 4 * 2**20 // 4096
    assert max(map(int, faults.split())) < step_pages / 20
