"""The pulse of a machine: its beats, and what they make of what was measured meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stagewright.profiling.pulse import BEAT, FEWEST, Pulse, Timed, evened_median
from stagewright.rehearsal.beating import beating


def test_every_core_beats_until_the_end(tmp_path: Path) -> None:
    wanted = 5 * len(os.sched_getaffinity(0))
    started = time.perf_counter()
    with beating(tmp_path / "pulse.bin") as path:
        until = time.monotonic() + 60
        while path.stat().st_size < wanted * BEAT.size and time.monotonic() < until:
            time.sleep(0.05)
    stopped = time.perf_counter()  # on a busy machine beats come between the last look and the end
    pulse = Pulse.load(path)
    assert len(pulse.beats_s) >= wanted
    assert set(pulse.cores) == os.sched_getaffinity(0)
    assert all(started <= moment <= stopped for moment in pulse.moments_s), "one clock for all"
    assert 0 < pulse.between(started, stopped) < stopped - started
    size = path.stat().st_size
    time.sleep(0.2)
    assert path.stat().st_size == size, "none beats on"


def test_what_was_slow_with_the_pulse_was_not_slow_itself() -> None:
    """The machine is half as fast from second 10 on; a pass takes 3 s then, and 1.5 s before."""
    pulse = Pulse([n / 10 for n in range(200)], [1.0] * 100 + [2.0] * 100, [0] * 200)
    samples = [Timed(1.5, 0.0, 1.5), Timed(3.0, 12.0, 15.0), Timed(3.0, 15.0, 18.0)]
    assert pulse.evened(samples, 1.0) == pytest.approx([1.5, 1.5, 1.5])
    usual_s = pulse.between(0.0, 18.0)
    assert 1.0 < usual_s < 2.0
    assert evened_median(samples, pulse) == pytest.approx(1.5 * usual_s)
    assert evened_median(samples, None) == 3.0


def test_single_beats_that_were_disturbed_do_not_count() -> None:
    pulse = Pulse(range(20), [1.0] * 12 + [50.0] * 4 + [0.1] * 4, [0] * 20)
    assert pulse.between(0.0, 20.0) == pytest.approx(1.0)


def test_speeds_of_cores_add() -> None:
    """One core takes three times as long as the other: together they do what two of half the faster's time do."""
    pulse = Pulse(range(40), [1.0, 3.0] * 20, [0, 1] * 20)
    assert pulse.between(0.0, 40.0) == pytest.approx(1.5)


def test_a_short_time_has_the_beats_around_it() -> None:
    pulse = Pulse([3.0, 1.0, 2.0, *range(4, 40)], [5.0, 5.0, 5.0, *[1.0] * 36], [0] * 39)
    assert pulse.between(1.0, 1.5) == pytest.approx(pulse.between(0.0, FEWEST + 1.0))
    assert pulse.between(30.0, 30.1) == pytest.approx(1.0)


def test_a_torn_beat_at_the_end_is_none(tmp_path: Path) -> None:
    (tmp_path / "pulse.bin").write_bytes(BEAT.pack(1.0, 2.0, 1) + b"torn")
    pulse = Pulse.load(tmp_path / "pulse.bin")
    assert (pulse.beats_s.tolist(), pulse.cores.tolist()) == ([2.0], [1])
