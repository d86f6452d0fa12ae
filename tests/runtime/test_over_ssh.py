"""Runs that are started on other hosts over ssh, a real one where there is one: they end with their launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from benchmarks.ssh import SSHD, ssh_servers

import stagewright
from stagewright.runtime.checkpoint.storage import checkpoints_in, find_checkpoint
from tests.runtime.running import ROOT
from tests.training.test_torchrun import apart_from_one_process

HOSTS = "127.0.0.2,127.0.0.3"
pytestmark = pytest.mark.timeout(240)
LIMIT_S = 20.0
STAND_IN = f"""#!{sys.executable}
import os, select, subprocess, sys
own = dict(os.environ, SSH_CONNECTION="here")
there = subprocess.Popen(["sh", "-c", sys.argv[-1]], stdin=subprocess.PIPE, env=own, start_new_session=True)
while there.poll() is None:
    if select.select([0], [], [], 0.1)[0] and not there.stdin.closed:
        said = os.read(0, 4096)
        try:
            os.write(there.stdin.fileno(), said) if said else there.stdin.close()
        except BrokenPipeError:
            pass
sys.exit(there.returncode)
"""
"""An ssh that runs what it is given right here: in a session of its own, which hears of the end of ssh by its input."""


@pytest.fixture(scope="module")
def path_with_ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PATH whose ssh reaches every address of loopback, where a server of its own listens."""
    folder = tmp_path_factory.mktemp("ssh")
    if SSHD is None or os.geteuid() != 0:
        (folder / "ssh").write_text(STAND_IN)
        (folder / "ssh").chmod(0o755)
        yield f"{folder}:{os.environ['PATH']}"
        return
    source = str(Path(stagewright.__file__).parents[1])  # hosts run the package that is tested here
    with ssh_servers(folder, ["127.0.0.1", "127.0.0.2", "127.0.0.3"], PYTHONPATH=source) as path:
        yield path


def start(folder: Path, path: str, *options: str) -> subprocess.Popen[str]:
    """Starts a run of two hosts with one worker each, in a session of its own as a terminal would."""
    words = ["train", "tiny-cnn", "--device", "cpu", "--batch", "8", "--placement", "0:0.1:0", "--cut", "fc1"]
    words += ["--steps", "1000000", "--checkpoint-every", "5", "--timeout", str(LIMIT_S), "--threads", "1"]
    words += ["--nodes", HOSTS, "-o", str(folder), *options]
    return subprocess.Popen(
        [sys.executable, "-m", "stagewright", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
    )  # fmt: skip


def left_of(folder: Path) -> list[int]:
    """The torchruns and workers of a run, on any host: their command names its configuration, and ssh started them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            is_ours = any(word.startswith(bytes(folder)) for word in words)
            if is_ours and b"SSH_CONNECTION=" in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(is_so: Callable[[], bool], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.1)


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_saves_and_ends_every_host(
    how: signal.Signals, status: int, tmp_path: Path, path_with_ssh: str
) -> None:
    """The whole process group gets it, as from Ctrl-C in a terminal. Progress is shown meanwhile."""
    run = start(tmp_path / "run", path_with_ssh)
    try:
        wait_until(lambda: bool(checkpoints_in(tmp_path / "run")) or run.poll() is not None, 120)
        assert len(left_of(tmp_path / "run")) >= 4, "two torchruns, two workers"
        before = find_checkpoint(tmp_path / "run", print)
        os.killpg(run.pid, how)
        said = run.communicate(timeout=60)[0]
    finally:
        run.kill()
    assert run.returncode == status, said
    assert "train: epoch 0, iter 10, loss: " in said
    assert f"stopped: by {how.name} after step " in said
    assert "Traceback" not in said
    found = find_checkpoint(tmp_path / "run", print)
    assert before is not None
    assert found is not None
    assert found[1]["step"] > before[1]["step"]
    wait_until(lambda: left_of(tmp_path / "run") == [], 5)


def test_a_launcher_that_is_killed_takes_every_host_along(tmp_path: Path, path_with_ssh: str) -> None:
    run = start(tmp_path / "run", path_with_ssh)
    try:
        wait_until(lambda: bool(checkpoints_in(tmp_path / "run")) or run.poll() is not None, 120)
        assert len(left_of(tmp_path / "run")) >= 4
    finally:
        run.kill()
        run.communicate(timeout=10)
    wait_until(lambda: left_of(tmp_path / "run") == [], LIMIT_S)


def test_the_cause_comes_from_the_host_where_it_is(tmp_path: Path, path_with_ssh: str) -> None:
    """A worker on another host that is killed: named with its device, and gone on without it being asked twice."""
    run = start(tmp_path / "run", path_with_ssh, "--max-restarts", "1", "--steps", "400")
    try:
        wait_until(lambda: bool(checkpoints_in(tmp_path / "run")) or run.poll() is not None, 120)
        victim = next(pid for pid in left_of(tmp_path / "run") if rank_of(pid) == 1)
        os.kill(victim, signal.SIGKILL)
        said = run.communicate(timeout=150)[0]
    finally:
        run.kill()
    assert run.returncode == 0, said
    assert "restart: worker 1 (stage 1, device 1:0) " in said
    assert "resume: going on after step " in said


def test_hosts_that_leave_and_come_change_the_plan_and_nothing_else(tmp_path: Path, path_with_ssh: str) -> None:
    """Two hosts, one, two again; the second one is away while a file says so."""
    folder, away, own = tmp_path / "run", tmp_path / "away", tmp_path / "bin"
    own.mkdir()
    real = shutil.which("ssh", path=path_with_ssh)
    (own / "ssh").write_text(
        f'#!/bin/sh\ncase "$*" in *"-- 127.0.0.3 "*) [ -e {away} ] && exit 255;; esac\nexec {real} "$@"\n'
    )
    (own / "ssh").chmod(0o755)
    options = ("--nnodes", "1:2", "--wait-for-hosts", "1", "--precision", "fp64")
    run, placements = start(folder, f"{own}:{path_with_ssh}", *options), list[str]()

    def wait_for_placement(wanted: str) -> None:
        def is_there() -> bool:
            newest = checkpoints_in(folder)[:1]
            with suppress(OSError):
                return bool(newest) and f'"placement": "{wanted}"' in (newest[0] / "manifest.json").read_text()
            return False

        wait_until(lambda: is_there() or run.poll() is not None, 150)
        placements.append(wanted if is_there() else "")

    try:
        wait_for_placement("0:0.1:0")
        away.touch()
        for pid in left_of(folder):
            with suppress(OSError):  # others end with the first one
                if rank_of(pid) == 1 or "--node-rank=1" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        wait_for_placement("0:0")
        away.unlink()
        wait_for_placement("0:0.1:0")
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=60)[0]
    finally:
        run.kill()
    assert placements == ["0:0.1:0", "0:0", "0:0.1:0"], said
    assert run.returncode == 0, said
    assert "hosts: host 1 (127.0.0.3) does not answer any more" in said
    assert "1 host of 1:2 are there; going on as 1 instead of 1-1: 0:0 instead of 0:0.1:0" in said
    assert "stopped: by hosts that are there again after step " in said
    assert apart_from_one_process(folder, tmp_path / "alone") < 1e-10


def rank_of(pid: int) -> int | None:
    """The rank in a process's environment."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
