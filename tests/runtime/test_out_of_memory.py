"""A worker that the kernel ends for lack of memory, for real: in a control group with little of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.running import ROOT

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 2 << 30


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 2 GiB."""
    group = GROUPS / f"stagewright-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as fault:
        pytest.skip(f"needs control groups of version 1 and root: {fault}")
    yield group
    group.rmdir()


@pytest.mark.timeout(180)
def test_the_kernels_killer_is_told_with_figures_and_the_doctor_knows_it(tmp_path: Path, small_group: Path) -> None:
    into = f'echo $$ > {small_group / "cgroup.procs"}; exec "$@"'
    run, stagewright = tmp_path / "run", [sys.executable, "-m", "stagewright"]
    done = subprocess.run(
        ["sh", "-c", into, "sh", sys.executable, "-m", "tests.runtime.greedy", str(run)], cwd=ROOT,
        capture_output=True, text=True, timeout=150, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert "worker 1 (stage 0, device 0:1) stopped with signal 9" in said
    assert re.search(r"the kernel ended it, since memory was full: workers held up to \d\.\d of 2\.0 GiB", said), said
    doctor = subprocess.run([*stagewright, "doctor", str(run)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    found = " ".join(doctor.stdout.split())
    assert "culprit: worker 1 (stage 0, device 0:1) stopped with signal 9" in found
    assert "the kernel ended it, since memory was full" in found
