"""Devices seen from outside: real processes' memory and processor time, and what drivers answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from stagewright.bench import machine
from stagewright.bench.machine import Watch, look_at_cards, look_at_workers

MIB = 1 << 20
WORKER = """
import sys, time
held = bytearray(int(sys.argv[1]) << 20)
for place in range(0, len(held), 4096): held[place] = 1
print("ready", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until:
    if sys.argv[2] == "idle": time.sleep(0.05)
"""
PARENT = """
import os, subprocess, sys
for rank, (size, how) in enumerate((("64", "idle"), ("128", "busy"))):
    own = subprocess.Popen([sys.executable, "-c", sys.argv[1], size, how], env={**os.environ, "RANK": str(rank)})
print("started", flush=True)
own.wait()
"""


@pytest.fixture
def family() -> Iterator[int]:
    """A process with two workers, one idle and one busy; its id."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, WORKER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    assert sorted(parent.stdout.readline().strip() for _ in range(3)) == ["ready", "ready", "started"]
    yield parent.pid
    os.killpg(parent.pid, 9)
    parent.communicate(timeout=10)


def test_workers_are_known_by_rank_with_their_memory_and_processor_time(family: int) -> None:
    with Watch(look_at_workers(family, alone=False), interval_s=0.05) as seen:
        time.sleep(1.0)

    found = seen.seen()
    assert sorted(found) == [0, 1]
    assert 64 * MIB < found[0][0] < 128 * MIB < found[1][0]
    busy, idle = found[1][1], found[0][1]
    assert busy is not None
    assert busy > (idle or 0.0)
    lines = seen.table().splitlines()
    assert lines[0] == "time_s,device,memory_bytes,busy_share"
    assert len(lines) == len(seen.samples) + 1


def test_a_run_of_one_worker_is_that_worker() -> None:
    own = {device: memory for device, memory, _ in look_at_workers(os.getpid(), alone=True)()}
    assert list(own) == [0]
    assert own[0] > 10 * MIB


def test_a_process_that_is_gone_is_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=30)
    assert list(look_at_workers(gone.pid, alone=True)()) == []
    assert list(look_at_workers(gone.pid, alone=False)()) == []


def test_the_drivers_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(card: int) -> SimpleNamespace:
        if card == 1:
            raise OSError
        return SimpleNamespace(used=7 * MIB)

    library = SimpleNamespace(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number, nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=60),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", library)

    assert list(look_at_cards()()) == [(0, 7 * MIB, 0.6), (1, 0, None)]


def test_without_the_library_nvidia_smi_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(machine, "ask", lambda words: "721, 33\n4839, [N/A]\n[N/A], [N/A]\n")

    assert list(look_at_cards()()) == [(0, 721 * MIB, 0.33), (1, 4839 * MIB, None)]


def test_moments_without_use_do_not_lower_the_mean() -> None:
    seen = Watch(lambda: iter(()))
    seen.samples = [machine._Sample(0.0, 0, 5, 0.0), machine._Sample(0.2, 0, 9, 0.5), machine._Sample(0.4, 0, 7, 0.7)]
    assert seen.seen() == {0: (9, pytest.approx(0.6))}
