"""The environment in which guides are done."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tests.guides.running import make_environment


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment with the wheel, made once for all test runners."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install hatchling")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    with (shared / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = shared / "wheel"
        if not (made / "done").exists():
            made.mkdir(exist_ok=True)
            (made / "done").write_text(str(make_environment(made)))
        return Path((made / "done").read_text())
