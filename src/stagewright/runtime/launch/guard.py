"""The guard: a process beside a worker that ends it when it has been stopped (SIGSTOP) for long.

Our own launcher looks for itself; the guard is for workers that others start, and ends with them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from stagewright.runtime.launch.process import follow_parent, is_stopped


def start_guard(limit_s: float) -> None:
    """Has this process ended once it has been stopped for so long."""
    code, own = f"from {__name__} import _watch; _watch({limit_s}, {os.getpid()})", {**os.environ}
    own.pop("RANK", None)  # whoever looks for workers by it must not take this for one
    command = [sys.executable, "-c", code]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=own, preexec_fn=follow_parent)


def _watch(limit_s: float, worker: int) -> None:
    since = None
    while os.getppid() == worker:
        since = (since or time.monotonic()) if is_stopped(worker) else None
        if since is not None and time.monotonic() - since > limit_s:
            print(f"worker process {worker} was stopped for {limit_s:g} s, and is ended by its guard", file=sys.stderr)
            os.kill(worker, signal.SIGKILL)
            return
        time.sleep(min(1.0, limit_s / 20))
