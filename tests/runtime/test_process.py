"""Workers that are forked are as if they were started on their own, and never outlive who started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import stagewright
from stagewright.bench.machine import _descendants
from stagewright.errors import RunError
from tests.runtime.running import ROOT, run_here

SCRIPT = """
import json, os, random, signal, sys, threading, time
import beside
loaded = "torch" in sys.modules
where = sys.modules["stagewright"].__file__ if loaded else ""
import numpy
about = dict(
    argv=sys.argv, name=__name__, folder=os.getcwd(), rank=os.environ["RANK"], own=os.environ["OWN"], loaded=loaded,
    where=where, path=sys.path[0],
    main=sys.modules["__main__"].about_name, beside=beside.NAME, numbers=[random.random(), float(numpy.random.rand())],
    threads=len(os.listdir("/proc/self/task")), leads=os.getpgid(0) == os.getpid(),
) if (about_name := "the script") else {}
print(json.dumps(about), flush=True)
print("to stderr", file=sys.stderr)
what = sys.argv[1] if about["rank"] == "1" else "end"
if what == "exit":
    sys.exit(7)
elif what == "raise":
    raise OSError("the disk is on fire")
elif what == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
elif what == "server":
    os.kill(os.getppid(), signal.SIGSTOP if sys.argv[2:] == ["stop"] else signal.SIGKILL)
time.sleep(60 if what in ("stop", "server") or sys.argv[1] in ("stop", "wait") else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("NAME = 'stands beside the script'")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def run(script: Path, *words: str, timeout_s: float = 60, **environment: str) -> dict[int, int]:
    """Runs two workers and returns the exit status of those that failed."""
    command = [sys.executable, str(script), *words]
    return run_here(command, 2, script.parent / "logs", {"OWN": "a value", **environment}, timeout_s)


def said(script: Path, worker: int) -> str:
    """What a worker wrote."""
    return (script.parent / "logs" / f"worker-{worker}.log").read_text()


def about(script: Path, worker: int) -> dict[str, object]:
    """What a worker wrote about itself."""
    return json.loads(said(script, worker).splitlines()[-2])


@pytest.mark.timeout(90)
def test_a_fork_is_as_if_it_had_been_started_on_its_own(script: Path) -> None:
    assert run(script, "end", "--x", "1") == {}
    first, second = (about(script, worker) for worker in (0, 1))
    assert first["argv"] == [str(script), "end", "--x", "1"]
    assert (first["name"], first["main"], first["beside"]) == ("__main__", "the script", "stands beside the script")
    assert (first["rank"], second["rank"], first["own"]) == ("0", "1", "a value")
    assert first["folder"] == os.getcwd()
    assert (first["loaded"], first["threads"], first["leads"]) == (True, 1, True)
    assert (first["where"], first["path"]) == (stagewright.__file__, str(script.parent))
    assert first["numbers"] != second["numbers"]
    assert said(script, 1).endswith("to stderr\n")


@pytest.mark.timeout(90)
def test_what_cannot_be_forked_is_started_anew(script: Path) -> None:
    assert run(script, "end", STAGEWRIGHT_FORK="no") == {}
    assert about(script, 0)["loaded"] is False


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("what", "status"), [("exit", 7), ("raise", 1), ("stop", -signal.SIGSTOP)])
def test_how_a_worker_failed_is_told_and_the_others_end(script: Path, what: str, status: int) -> None:
    """A worker that is stopped while it starts, when nobody waits for it yet, is noticed by its state."""
    assert run(script, what, timeout_s=1.0, STAGEWRIGHT_FORK="no")[1] == status
    if what == "raise":
        assert "OSError: the disk is on fire" in said(script, 1)
    assert left(script) == []


@pytest.mark.timeout(90)
def test_a_fork_server_that_is_killed_takes_its_workers_along_and_is_started_again(script: Path) -> None:
    for _ in range(2):
        with pytest.raises(RunError, match="the process that workers are forked of ended with signal 9"):
            run(script, "server", STAGEWRIGHT_FORK="no")
    assert wait_for(lambda: left(script) == [])


@pytest.mark.timeout(90)
def test_a_fork_server_that_is_stopped_is_ended(script: Path) -> None:
    with pytest.raises(RunError, match="the process that workers are forked of ended with signal 9"):
        run(script, "server", "stop", timeout_s=1.0, STAGEWRIGHT_FORK="no")
    assert wait_for(lambda: left(script) == [])


@pytest.mark.timeout(90)
def test_nothing_outlives_the_launcher(script: Path) -> None:
    """Neither its workers, though they hold the pipe by which Python's fork server knows that it is in use."""
    code = f"""if True:
        import sys
        from pathlib import Path
        from tests.runtime.running import run_here
        environment = {{"OWN": "", "STAGEWRIGHT_FORK": "no"}}
        run_here([sys.executable, {str(script)!r}, "wait"], 2, Path({str(script.parent / "logs")!r}), environment, 60)
    """
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        assert wait_for(lambda: len(left(script)) == 2)
        family = _descendants(launcher.pid)
        assert len(family) >= 3
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    assert wait_for(lambda: not any(is_there(each) for each in family))


def wait_for(is_so: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Whether something came true in time."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def left(script: Path) -> list[int]:
    """The processes of a script that are there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if str(script).encode() in words and is_there(int(entry.name)):
            found.append(int(entry.name))
    return found


def is_there(process: int) -> bool:
    """Whether a process has not ended."""
    return Path(f"/proc/{process}/exe").exists()
