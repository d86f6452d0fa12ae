"""A worker that is stopped cannot end itself: its guard does, and goes along with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.running import ROOT, parent_in

WORKER = """
import time
from stagewright.runtime.launch.guard import start_guard
start_guard(1.0)
print("guarded", flush=True)
time.sleep(60)
"""


def guards_of(pid: int) -> list[int]:
    stats = (entry / "stat" for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [int(path.parent.name) for path in stats if parent_in(path) == pid]


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, f"{pids} are left"
        time.sleep(0.05)


@pytest.mark.timeout(60)
def test_one_that_is_stopped_for_long_is_ended_and_one_that_goes_on_is_not() -> None:
    environment = {**os.environ, "RANK": "0"}
    worker = subprocess.Popen([sys.executable, "-c", WORKER], cwd=ROOT, stdout=subprocess.PIPE, env=environment)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"guarded\n"
        guards = guards_of(worker.pid)
        time.sleep(2.0)  # until it looks
        worker.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        worker.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        assert (worker.poll(), len(guards)) == (None, 1)
        assert b"RANK=" not in Path(f"/proc/{guards[0]}/environ").read_bytes()
        worker.send_signal(signal.SIGSTOP)
        assert worker.wait(15) == -signal.SIGKILL
    finally:
        worker.kill()
        worker.communicate(timeout=10)
    wait_until_gone(guards)


@pytest.mark.timeout(60)
def test_it_ends_with_a_worker_that_is_killed() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], cwd=ROOT, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.readline()
    guards = guards_of(worker.pid)
    worker.kill()
    worker.communicate(timeout=10)
    assert len(guards) == 1
    wait_until_gone(guards)


@pytest.mark.timeout(60)
def test_a_leash_does_not_wait_long_for_a_command_that_hears_nothing() -> None:
    """As torchrun, which waits half a minute for a worker that is stopped."""
    words = [
        "-m",
        "stagewright.runtime.launch.leash",
        "60",
        "sh",
        "-c",
        "trap '' TERM; echo up; while :; do sleep 1; done",
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    leash = subprocess.Popen([sys.executable, *words], cwd=ROOT, **pipes)  # type: ignore[call-overload]
    assert leash.stdout.readline() == b"up\n"
    let_go = time.monotonic()
    leash.stdin.close()
    leash.wait(20)
    assert time.monotonic() - let_go < 4.5
    leash.stdout.close()
