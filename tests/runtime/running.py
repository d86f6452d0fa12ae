"""Starting real workers for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_workers(size: int, module: str, *arguments: str, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
    """Runs a module under torch's launcher with so many workers; fails with what they said."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "-m", module,
        *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    said = [line for line in done.stderr.splitlines() if "terminate" in line or "what()" in line or "free()" in line]
    assert done.returncode == 0, "\n".join([*said, done.stderr[-3000:]])
    return done
