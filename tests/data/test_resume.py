"""A run killed in the middle of an epoch and resumed sees every image of the epoch exactly once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

NUM_IMAGES = 120

# Every batch's labels and the loader's state are saved together, as a checkpoint saves weights and state.
RUN = """
import json, os, sys, time
from stagewright.data.pixels import TrainTransform
from stagewright.data.loader import Loader
from stagewright.data.opening import open_dataset

directory, checkpoint, batch, hold = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
saved = json.load(open(checkpoint)) if os.path.exists(checkpoint) else {"position": 0, "seen": [], "sums": []}
loader = Loader(
    dataset=open_dataset(directory), batch=batch, row_ranges=lambda rows: ((0, rows),), keep_last=True,
    transform=TrainTransform(size=8), seed=4, epoch=3, start=saved["position"], num_workers=2,
)
for rows in loader:
    saved["seen"] += rows.labels[0].tolist()
    saved["sums"] += rows.images[0].sum(dim=(1, 2, 3)).tolist()
    saved["position"] = loader.position
    with open(checkpoint + ".new", "w") as stream:
        json.dump(saved, stream)
    os.replace(checkpoint + ".new", checkpoint)
    if saved["position"] >= hold:
        time.sleep(600)  # to be killed
"""


def start(directory: Path, checkpoint: Path, batch: int, hold: int = sys.maxsize) -> subprocess.Popen[bytes]:
    """Reads on from a checkpoint; from the position `hold` on it waits."""
    return subprocess.Popen([sys.executable, "-c", RUN, str(directory), str(checkpoint), str(batch), str(hold)])


def kill_after(directory: Path, checkpoint: Path, batch: int, position: int) -> None:
    """Runs until a checkpoint at or after this position is there, then kills without warning."""
    run = start(directory, checkpoint, batch, hold=position + 20)
    deadline_s = time.monotonic() + 60
    while not checkpoint.exists() or json.loads(checkpoint.read_text())["position"] < position:
        assert run.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline_s, "the run does not get on"
        time.sleep(0.005)
    run.kill()
    run.wait(timeout=10)


def test_killed_and_resumed_every_image_is_seen_exactly_once(numbered: Callable[..., Path], tmp_path: Path) -> None:
    directory = numbered(NUM_IMAGES)
    kill_after(directory, tmp_path / "killed.json", batch=4, position=40)
    killed_at = json.loads((tmp_path / "killed.json").read_text())["position"]
    assert 40 <= killed_at < NUM_IMAGES
    assert start(directory, tmp_path / "killed.json", batch=7).wait(timeout=60) == 0
    assert start(directory, tmp_path / "whole.json", batch=12).wait(timeout=60) == 0
    resumed, whole = (json.loads((tmp_path / name).read_text()) for name in ("killed.json", "whole.json"))
    assert sorted(resumed["seen"]) == list(range(NUM_IMAGES))
    assert resumed["seen"] == whole["seen"]
    assert resumed["sums"] == whole["sums"]
