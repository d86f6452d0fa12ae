"""Starting real workers for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
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
    if "SIGABRT" in done.stderr:
        # Seen once in many runs on a busy machine, inside torch's own threads, cause unknown: say so, and try again.
        said = [
            line for line in done.stderr.splitlines() if "terminate" in line or "what()" in line or "free()" in line
        ]
        warnings.warn(f"a worker of {module} aborted: {said[:5]}", stacklevel=2)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
