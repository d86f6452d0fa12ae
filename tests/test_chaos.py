"""What `benchmarks/chaos.py` does at length, in short: real runs that are killed, warned, annoyed and filled up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import chaos, chaos_hosts
from benchmarks.mutations import try_inputs

from stagewright.runtime.safety.diagnosis import Scene
from stagewright.schedule import Schedule
from tests.runtime.running import ROOT


@pytest.mark.timeout(240)
def test_a_killed_run_comes_back_and_a_warned_one_saves_and_ends_well(tmp_path: Path) -> None:
    run = chaos.start("1-1", tmp_path / "run", 1_000_000, 20, restarts=1)
    chaos.wait_for_step(run, 40)
    ports = chaos.listening(run)
    before = run.step()
    chaos.hurt(run.workers[0], signal.SIGKILL)
    chaos.wait_for_step(run, before + 40)
    chaos.hurt(run.process.pid, signal.SIGTERM)
    out = chaos.finish(run, 60)
    assert len(ports) >= 3
    assert all(address == "127.0.0.1" for address, _ in ports)
    assert "stopped with signal 9 at" in out
    assert "starting again (1 of 1)" in out
    assert "resume: going on after step" in out
    assert "stopped: by SIGTERM after step" in out
    assert chaos.weights(tmp_path / "run")[1] > before
    assert chaos.left_behind(tmp_path / "run") == []


@pytest.mark.timeout(120)
def test_a_replica_that_is_stopped_in_the_middle_of_a_reduction_is_named(tmp_path: Path) -> None:
    """By its launcher, who sees its state, and from the flight recorders alone, as on other hosts."""
    run = chaos.start("dp", tmp_path / "run", 1_000_000, 20)
    chaos.wait_for_step(run, 40)
    victim = run.workers[2]
    name = Path(f"/proc/{victim}/comm").read_text().strip()
    chaos.hurt(victim, signal.SIGSTOP)
    run.process.wait(60)
    with run.output:
        said = run.said()
    number = int(name.removeprefix("worker-"))
    assert f"worker {number} (stage 0, device 0:{number}) was stopped (SIGSTOP) at" in said
    found = Scene.read(Schedule.load(tmp_path / "run" / "schedule.json"), tmp_path / "run").blame()
    assert (found.worker, found.is_own) == (number, True)


@pytest.mark.timeout(200)
def test_damaged_inputs_are_refused_in_words() -> None:
    faults = [f"{kind}: {fault}" for kind, outcome in try_inputs(1100, seed=1) for fault in outcome.faults]
    assert faults == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_change_nothing() -> None:
    assert chaos.kill_workers(6, random.Random(1), per_run=2).faults == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_while_a_checkpoint_is_written() -> None:
    assert chaos.kill_writers(3, random.Random(1)).faults == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_full_disk_and_a_flipped_bit() -> None:
    assert chaos.fill_disk().faults == []
    assert chaos.flip_bytes(random.Random(1)).faults == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stranger_at_every_port() -> None:
    assert chaos.annoy(100, random.Random(1)).faults == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user needs root")
@pytest.mark.timeout(400)
def test_another_user_of_the_machine_changes_nothing() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "stranger.py"), "--tries", "2", "--connections", "200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_and_open_files_stay_flat() -> None:
    assert chaos.run_long(3000).faults == []


@pytest.mark.slow
@pytest.mark.skipif(not (chaos.IS_ROOT and os.access("/dev/net/tun", os.W_OK)), reason="hosts need root and taps")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", chaos_hosts.LAUNCHERS)
def test_four_hosts_of_which_one_is_cut_off_and_comes_back(launcher: str, tmp_path: Path) -> None:
    words = ["--folder", str(tmp_path), "--only", f"{launcher}/dp", "--minutes", "12"]
    assert chaos_hosts.run_all([*words, "--faults", "loss of 30 %,cut for good,host added"]) == 0
    assert [case.weights for case in chaos_hosts.finished(tmp_path)] == ["same bits", "to rounding", "to rounding"]
