"""When a worker comes to harm, all end at once, nobody is left behind, and the first cause is shown."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagewright.errors import RunError
from tests.runtime.failing import harm, main
from tests.runtime.running import ROOT, forked

SAYS = {
    "kill": "worker 3 (stage 1, device 0:3) stopped with signal 9 at F1.0 of batch 5, microbatch 0",
    "raise": "worker 3 (stage 1, device 0:3) failed with exit status 1 at F1.0 of batch 5, microbatch 0",
    "nan": "the data of batch 5, microbatch 0, are not finite",
    "hang": "worker 3 (stage 1, device 0:3) kept the others waiting at F1.0 of batch 5, microbatch 0",
    "stop": "worker 3 (stage 1, device 0:3) was stopped (SIGSTOP) at F1.0 of batch 5, microbatch 0",
}


def processes_of(folder: Path) -> list[int]:
    """The processes that still have the run's folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(folder).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.timeout(150)
def test_harm_to_one_worker_ends_all_with_the_first_cause(tmp_path: Path) -> None:
    """The whole command, with the status and the words that a person gets."""
    command = [sys.executable, "-m", "tests.runtime.failing", "raise", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr[-2000:]
    assert SAYS["raise"] in done.stderr
    assert "the disk is on fire" in done.stderr
    assert "Traceback" not in done.stderr.partition("error: ")[2]
    deadline = time.monotonic() + 30
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", ["kill", "nan", "hang", "stop"])
def test_every_harm_names_who_came_to_it_and_where(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(RunError) as ended:
        main(how, str(tmp_path))
    assert SAYS[how] in str(ended.value)
    assert "Traceback" not in str(ended.value)
    assert forked() == []


TELLS = {
    "raise": "RuntimeError: the disk is on fire",
    "timed out": "TimeoutError: the server timed out",
    "socket": "ConnectionResetError: socket: connection reset by peer",
    "exit": "SystemExit: 3",
    "memory": "MemoryError: no room for the images",
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", TELLS)
def test_what_the_users_own_code_raises_is_told_with_its_line(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever words are in it, and however the other workers end."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(RunError) as ended:
        main(how, str(tmp_path))
    said = str(ended.value).splitlines()
    assert said[0].startswith("worker 3 (stage 1, device 0:3) failed")
    file, number = inspect.getsourcefile(harm), line_of("raise RAISED[how]")
    assert said[1] == f"{TELLS[how]} ({file}, line {number}, in harm)"


@pytest.mark.timeout(150)
def test_a_worker_that_ends_without_a_word_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(RunError) as ended:
        main("silent", str(tmp_path))
    assert "worker 3 (stage 1, device 0:3) failed with exit status 3 at F1.0 of batch 5" in str(ended.value)


@pytest.mark.timeout(150)
def test_the_same_fault_three_times_in_a_row_is_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(RunError) as ended:
        main("again", str(tmp_path))
    restarts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("restart: ")]
    assert len(restarts) == 2, "nine were allowed"
    cause = "worker 3 (stage 1, device 0:3) failed at F1.0 of batch 5, microbatch 0: ValueError: row 7 has no label ("
    plain = [line.replace(" with exit status 1", "") for line in restarts]  # which may be seen too late
    assert all(line.startswith(f"restart: {cause}") for line in plain), restarts
    assert "3 times in a row" in ended.value.what
    assert "this is a fault of the program or its data, not of a device" in str(ended.value)


def line_of(text: str) -> int:
    """The number of a line of the failing run's source."""
    lines = Path(inspect.getsourcefile(harm)).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


GOES_ON = {
    "device": (
        "replan: worker 1 (stage 0, device 0:1) stopped with signal 9 at F0.0 of batch 5, microbatch 0; going on as "
        "2-1 instead of 3-1: 0:0,0:2.0:3 instead of 0:0-2.0:3"
    ),
    "skip": "numbers: the data of batch 5, microbatch 0, are not finite; the step is skipped",
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", GOES_ON)
def test_a_run_goes_on_and_says_how(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    main(how, str(tmp_path))
    said = capsys.readouterr().out
    assert GOES_ON[how] in said
    assert "done" in said
    assert forked() == []
