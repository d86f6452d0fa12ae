"""Runs under torchrun, with one agent a host: all agree on the folder and on what to resume, whatever their history."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.cli import main
from stagewright.runtime.checkpoint.resuming import whole_model
from stagewright.runtime.checkpoint.storage import checkpoints_in
from stagewright.training.events import read_events
from tests.training.test_run_folder import wait_until

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "torch.distributed.run")
TRAIN = ("-m", "stagewright", "train", "tiny-cnn", "--device", "cpu", "--batch", "8", "--threads", "1")
NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it torchrun of torch 2.13 takes no host in the place of another: it never learns where the others meet."""
TIMEOUT_S = 15
pytestmark = pytest.mark.timeout(240)


def start(words: tuple[str, ...], *, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Starts one agent, its workers' output with its own."""
    return subprocess.Popen(
        [*before, *RUN, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", NO_SHARING: "1"},
    )  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def two_agents(folder: Path, *options: str, nnodes: str = "2") -> list[tuple[str, ...]]:
    """For each of two hosts the words of its agent, meeting at the first by torch's own elastic rendezvous."""
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--rdzv-id={folder.name}")
    agent = (f"--nnodes={nnodes}", "--nproc-per-node=1", "--max-restarts=2", *where)
    train = (*TRAIN, "--devices", "2", "--timeout", str(TIMEOUT_S), "-o", str(folder), *options)
    return [(*agent, f"--rdzv-conf=last_call_timeout=1,is_host={number}", *train) for number in (1, 0)]


def end(*runs: subprocess.Popen[str]) -> list[str]:
    """Ends what still runs, and returns what each has said."""
    for run in runs:
        if run.poll() is None:
            run.kill()
    return [run.communicate(timeout=30)[0] for run in runs]


def test_a_host_that_is_replaced_goes_on_with_the_others(tmp_path: Path) -> None:
    """Without --resume auto: the new agent counts its restarts from 0, the one that stayed knows better."""
    folder = tmp_path / "replaced"
    one, other = two_agents(folder, "--steps", "100000", "--checkpoint-every", "5")
    first, lost = start(one), start(other)
    again = None
    try:
        wait_until(lambda: bool(checkpoints_in(folder)) or first.poll() is not None, 120)
        lost.kill()
        lost.communicate(timeout=10)
        again = start(other)
        wait_until(lambda: went_on(folder) > 0 or first.poll() is not None, 150)
        before = went_on(folder)
        wait_until(lambda: newest(folder) > before + 5 or first.poll() is not None, 60)
    finally:
        said = end(first, *([again] if again else []))
    assert went_on(folder) >= 5, said
    assert newest(folder) > went_on(folder), said


def test_hosts_that_leave_and_come_change_the_plan_and_nothing_else(tmp_path: Path) -> None:
    """Two hosts, one, two again: every step's weights are those of one process, in double precision to rounding."""
    folder = tmp_path / "elastic"
    one, other = two_agents(
        folder, "--steps", "100000", "--checkpoint-every", "5", "--nnodes", "1:2", "--precision", "fp64", nnodes="1:2"
    )
    runs = [start(one), start(other)]
    placements = list[str]()

    def wait_for_steps() -> None:
        before = newest(folder)
        wait_until(lambda: newest(folder) > before + 5 or runs[0].poll() is not None, 150)
        placements.append(json.loads((checkpoints_in(folder)[0] / "manifest.json").read_text())["placement"])

    try:
        wait_for_steps()
        runs[1].kill()
        runs[1].communicate(timeout=10)
        wait_until(lambda: went_on(folder) > 0 or runs[0].poll() is not None, 150)
        wait_for_steps()
        before = went_on(folder)
        runs.append(start(other))
        wait_until(lambda: went_on(folder) > before or runs[0].poll() is not None, 150)
        wait_for_steps()
        for run in (runs[0], runs[2]):
            run.send_signal(signal.SIGTERM)
        wait_until(lambda: all(run.poll() is not None for run in runs), 60)
    finally:
        said = end(*runs)
    assert placements == ["0:0-1", "0:0", "0:0-1"], said
    words = [event["text"] for _, event in read_events(folder) if event["event"] == "resume"]
    assert "placement was 0:0-1, and is now 0:0" in words
    assert "placement was 0:0, and is now 0:0-1" in words
    assert apart_from_one_process(folder, tmp_path / "alone") < 1e-10


def apart_from_one_process(folder: Path, alone: Path) -> float:
    """How far the newest weights of a run are from those of one process after as many steps."""
    words = ["--precision", "fp64", "--devices", "1", "--steps", str(newest(folder)), "-o", str(alone)]
    subprocess.run([sys.executable, *TRAIN, *words], cwd=ROOT, check=True, capture_output=True, timeout=200)
    found, expected = (whole_model(checkpoints_in(each)[0]) for each in (folder, alone))
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def went_on(folder: Path) -> int:
    """The last step after which workers that were started again went on; 0 where they have not."""
    words = [event["text"] for _, event in read_events(folder) if event["event"] == "resume"]
    return max((int(word.split()[4].rstrip(",")) for word in words if word.startswith("going on")), default=0)


def newest(folder: Path) -> int:
    """The last step that was saved."""
    return max((int(path.name.removeprefix("step-")) for path in checkpoints_in(folder)), default=0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: one host gets a disk of its own")
def test_a_folder_that_hosts_do_not_share_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """The second agent sees an empty disk where the run's folder is."""
    folder = tmp_path / "disk" / "run"
    folder.parent.mkdir()
    one, other = two_agents(folder, "--steps", "20", "--checkpoint-every", "5")
    elsewhere = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {folder.parent} && exec "$@"', "sh")
    runs = [start(one), start(other, before=elsewhere)]
    try:
        for run in runs:
            run.wait(120)
    finally:
        said = end(*runs)
    assert [run.returncode for run in runs] == [1, 1]
    for text in said:
        assert f"does not see the run's folder {folder} as worker 0 on" in text
        assert "name one with --out that all hosts share" in text
    assert checkpoints_in(folder) == []
    assert list(read_events(folder)) == []


def test_one_host_shows_its_progress_saves_on_a_signal_and_can_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ("--standalone", "--nproc-per-node=2", *TRAIN, "--devices", "2", "-o", str(folder))
    run = start((*words, "--steps", "100000", "--checkpoint-every", "50"))
    try:
        wait_until(lambda: newest(folder) >= 50 or run.poll() is not None, 120)
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    finally:
        said = end(run)[0]
    lines = said.splitlines()
    assert len([line for line in lines if line.startswith("train: epoch 0, iter 10,")]) == 1
    assert len([line for line in lines if line.startswith("stopped: by SIGTERM after step ")]) == 1
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(folder)])
    assert ended.value.code == 0
    assert "it was stopped" in capsys.readouterr().out
