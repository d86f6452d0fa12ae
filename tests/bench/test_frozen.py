"""Pipelines that are stopped between their turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from stagewright.bench.frozen import MOMENT, Frozen
from stagewright.bench.rehearsal_cases import RehearsalCase, Wanted
from stagewright.bench.rehearsed import one_go
from stagewright.cluster import DeviceId
from stagewright.models import build_model
from stagewright.plan import Plan, Stage
from stagewright.rehearsal import emulated_hosts
from stagewright.rehearsal.tools import missing
from stagewright.runtime.world import World
from tests.rehearsal.clusters import star

PIPELINE = """
import os, sys, time
from stagewright.bench.frozen import tell
pipe = os.open(sys.argv[1], os.O_RDWR)
gaps = [0.0, 0.01, 0.01]  # ready, and while it fills updates come faster
while True:
    until = time.process_time() + (gaps.pop(0) if gaps else 0.05)
    while time.process_time() < until:
        pass
    tell(pipe)
"""
OTHERS_S = 1.0
"""How long others have their turns meanwhile."""
ALONE = World(0, 1, torch.device("cpu"), timedelta(seconds=10))


@contextmanager
def pipeline(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Frozen]]:
    """A process that tells of updates, and the contender that it is."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", PIPELINE, os.fspath(pipe)], env=environment)
    told = {"name": "stale", "pipe": os.fspath(pipe), "processes": [process.pid], "versions": 2, "logs": "logs"}
    try:
        yield process, Frozen(told, ALONE)
    finally:
        process.kill()
        process.wait()


def state_of(process: subprocess.Popen[bytes]) -> str:
    """What a process does, in the letters of Linux."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
@pytest.mark.timeout(60)
def test_a_pipeline_goes_on_in_its_turns_alone(tmp_path: Path) -> None:
    with pipeline(tmp_path) as (process, frozen):
        states, began, turns = [], [], []
        for _ in range(3):
            time.sleep(OTHERS_S)
            states.append(state_of(process))
            began.append(time.perf_counter())
            turns.append(frozen.turn(1, ALONE))
        assert states == ["T", "T", "T"], "stopped between turns"
    assert all(turn.seconds >= 0.049 for turn in turns), "the filling does not count"
    assert all(start_s <= turn.start_s for start_s, turn in zip(began, turns)), "nor does the time of others"
    ahead_s = [2 * turn.seconds - (turn.stop_s - turn.start_s) for turn in turns]
    assert all(-1e-6 < before_s < OTHERS_S for before_s in ahead_s), "two gaps, the first from before it was stopped"


@pytest.mark.timeout(60)
def test_what_a_pipeline_tells_before_it_stops_is_not_of_its_next_turn(tmp_path: Path) -> None:
    """A fast one goes on for a few updates while it is being stopped: here they are put into its pipe."""
    with pipeline(tmp_path) as (_, frozen):
        frozen.turn(1, ALONE)
        for _ in range(3):
            os.write(frozen.pipe, MOMENT.pack(time.perf_counter()))
        frozen.stopped_s = time.perf_counter()
        time.sleep(0.5)
        began = time.perf_counter()
        turn = frozen.turn(1, ALONE)
    assert began < turn.start_s < turn.stop_s
    assert turn.seconds > 0.04


@pytest.mark.timeout(60)
def test_a_pipeline_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    with pipeline(tmp_path) as (process, frozen):
        process.kill()
        process.wait()
        with pytest.raises(RuntimeError, match="a worker of stale ended: see logs"):
            frozen.turn(1, ALONE)


@pytest.mark.skipif(missing() is not None, reason=f"emulated hosts: {missing()}")
@pytest.mark.timeout(120)
def test_a_stale_plan_and_an_exact_one_take_turns_in_hosts(tmp_path: Path) -> None:
    names = build_model("tiny-cnn", device="meta").names
    cut = names.index("fc1")
    first = Stage(layers=names[:cut], devices=(DeviceId(0, 0),))
    last = Stage(layers=names[cut:], devices=(DeviceId(1, 0),))
    exact = Plan(model="tiny-cnn", stages=(first, last), batch=8, num_microbatches=2)
    stale = replace(exact, stages=(replace(first, versions=2), last))
    told = [
        {"kind": "plan", "name": name, "plan": plan.to_dict(), "expected_s": 0.05, "is_exact": plan.is_synchronous}
        for name, plan in (("exact", exact), ("stale", stale))
    ]
    spec = {"model": "tiny-cnn", "options": {}, "batch": 8, "rounds": 3, "turn_s": 0.1, "cores": 2, "groups": [told]}
    case = RehearsalCase(
        name="small", model="tiny-cnn", batch=8, cluster="hosts-4", bits_per_s=(1e9,), batch_sizes=(4, 8),
        plans=(Wanted(),),
    )  # fmt: skip
    with emulated_hosts(star(125e6, 125e6)) as hosts:
        times = one_go(case, hosts, spec, tmp_path)
    assert {name: len(seconds) for name, seconds in times["step_s"].items()} == {"exact": 3, "stale": 3}
    assert min(min(seconds) for seconds in times["step_s"].values()) > 0
    turns = sorted(turn for own in times["when"].values() for turn in own)
    assert all(before[1] <= after[0] for before, after in pairwise(turns)), "one after the other"
    frozen = json.loads((tmp_path / "contest.json").read_text())["groups"][0][0]
    assert (frozen["name"], frozen["kind"], frozen["versions"]) == ("stale", "frozen", 2)
    assert not [process for process in frozen["processes"] if Path(f"/proc/{process}").exists()], "all have ended"
