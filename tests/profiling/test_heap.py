"""CPU workers keep the memory of one step for the next."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.runtime.running import ROOT


def run(*words: str) -> list[str]:
    command = [sys.executable, "-m", "tests.profiling.heap_steps", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
@pytest.mark.timeout(120)
def test_later_steps_fault_no_pages_in() -> None:
    told, faults = run("keep")
    if told == "cannot keep":
        pytest.skip("this C library has no mallopt")
    step_pages = 24 * 4 * 2**20 // 4096
    assert max(map(int, faults.split())) < step_pages / 20
