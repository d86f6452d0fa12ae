"""Killed in the middle of an epoch and resumed under another plan: every sequence once, and the losses of one run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagewright.data.text import find_tokenizer
from stagewright.data.tokens import make_tokens
from stagewright.training.events import read_events
from tests.texts import make_tokenizer, write_lines
from tests.training.recorded_text import BATCH, LENGTH, PER_EPOCH

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
LIMIT_S = 200


def start(seen: Path, run: Path, tokens: Path, placement: str, **variables: str) -> subprocess.Popen[bytes]:
    seen.mkdir()
    command = [sys.executable, "-m", "tests.training.recorded_text", str(run), str(tokens), placement]
    environment = {**os.environ, "SEEN": str(seen), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)


def steps_in(run: Path) -> list[int]:
    return [int(event["iter"]) for _, event in read_events(run) if "iter" in event]


def kill_after(process: subprocess.Popen[bytes], run: Path, step: int) -> None:
    """Waits until the checkpoint of a step is there, and kills every process without warning."""
    deadline_s = time.monotonic() + LIMIT_S
    while not list(run.glob(f"**/step-{step:08d}/manifest.json")):
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline_s, "the run does not get on"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)


def seen_in(folder: Path, which: str) -> dict[int, list[tuple[int, ...]]]:
    """For each batch the rows that all workers were given of it."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for path in folder.glob(f"{which}-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):  # the last one may be cut off
                batch, rows = json.loads(line)
                found.setdefault(batch, []).extend(map(tuple, rows))
    return found


def losses_in(run: Path) -> dict[int, float]:
    return {
        int(event["iter"]): float(event["loss"]) for _, event in read_events(run) if "loss" in event and "iter" in event
    }


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many rows as an epoch has, some of them padded."""
    folder = tmp_path_factory.mktemp("tokens")
    drawn = random.Random(0)
    lines = [
        {"text": "".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=2 + number % (LENGTH - 2)))}
        for number in range(BATCH * PER_EPOCH)
    ]
    source = write_lines(folder / "rows.jsonl", lines)
    return make_tokens(source, folder / "tokens", find_tokenizer(make_tokenizer(folder / "tokenizer"))).folder


@pytest.mark.timeout(3 * LIMIT_S)
def test_every_sequence_once_and_the_same_losses(tokens: Path, tmp_path: Path) -> None:
    whole = start(tmp_path / "seen", tmp_path / "whole", tokens, "0:0")
    first = start(tmp_path / "before", tmp_path / "run", tokens, "0:0-1.0:2", HOLD="6")
    kill_after(first, tmp_path / "run", 6)
    before = losses_in(tmp_path / "run")
    second = start(tmp_path / "after", tmp_path / "run", tokens, "0:0.0:1")
    assert (whole.wait(LIMIT_S), second.wait(LIMIT_S)) == (0, 0)
    for which in ("inputs", "targets"):
        early, late = seen_in(tmp_path / "before", which), seen_in(tmp_path / "after", which)
        assert sorted(late) == list(range(6, PER_EPOCH))
        together = [row for batch in range(PER_EPOCH) for row in (early if batch < 6 else late)[batch]]
        alone = seen_in(tmp_path / "seen", which)
        expected_rows = [row for rows in alone.values() for row in rows]
        assert set(together) == set(expected_rows)
        if which == "inputs":  # labels are read once more, to count those of the whole batch
            assert sorted(together) == sorted(expected_rows)
            assert len(together) == len(set(together)) == BATCH * PER_EPOCH
    expected, after = losses_in(tmp_path / "whole"), losses_in(tmp_path / "run")
    assert sorted(after) == sorted(expected) == list(range(1, PER_EPOCH + 1))
    assert {**before, **after} == pytest.approx(expected, rel=1e-9)
