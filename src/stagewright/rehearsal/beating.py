"""A pulse beside what hosts do: a process on each core that beats, for as long as it is wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagewright.profiling import pulse
from stagewright.runtime.stem import follow_parent

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@contextmanager
def beating(path: Path) -> Iterator[Path]:
    """A file to which the beats of all cores that this process may use are added meanwhile."""
    path.write_bytes(b"")
    beaters = [
        subprocess.Popen(
            [sys.executable, "-P", pulse.__file__, os.fspath(path), str(core)], env={**os.environ, **ONE_THREAD},
            preexec_fn=follow_parent,
        )
        for core in sorted(os.sched_getaffinity(0))
    ]  # fmt: skip
    try:
        yield path
    finally:
        for beater in beaters:
            beater.kill()
            beater.wait()
