"""`stagewright data`: make, convert, inspect, as a person and as a script meets them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from stagewright.cli import data as verbs
from stagewright.cli import main

Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `stagewright data …` in a new folder: its status, what it printed, and what it said on stderr."""
    monkeypatch.chdir(tmp_path)

    def ran(line: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["data", *shlex.split(line)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return ran


def test_the_examples_of_the_help_work_in_turn(run: Run) -> None:
    for verb in (verbs.make, verbs.convert, verbs.inspect):
        example = " ".join((verb.__doc__ or "").split("Example: ")[1].split())
        assert example.startswith(f"stagewright data {verb.__name__} ")
        status, out, err = run(example.removeprefix("stagewright data "))
        assert (status, err) == (0, ""), f"{example}\n{err}"
        assert out.strip()
    with Image.open("shapes.png") as sheet:
        assert sheet.format == "PNG"


@pytest.mark.parametrize("format", ["folder", "ofrecord", "tar"])
def test_a_set_goes_through_every_format_and_stays_what_it_was(format: str, run: Run) -> None:
    run("make made --images 30 --classes 3 --size 16 --format folder")
    status, out, _ = run(f"convert made there --format {format} --json")
    assert (status, json.loads(out)) == (0, {"directory": "there", "num_images": 30, "num_skipped": 0})
    made, there = (json.loads(run(f"inspect {name} --json")[1]) for name in ("made", "there"))
    assert there == made
    assert there["class_counts"] == [10, 10, 10]
    assert there["heights"] == {"smallest": 16, "median": 16, "largest": 16}


def test_inspect_counts_what_cannot_be_read(run: Run, tmp_path: Path) -> None:
    run("make made --images 20 --classes 2 --size 16 --format ofrecord")
    part = tmp_path / "made" / "part-00000"
    part.write_bytes(part.read_bytes()[:-5])
    status, out, _ = run("inspect made")
    assert status == 0
    assert "19 images of 2 classes" in out
    assert "1 cannot be read" in out
    assert "part-00000, record 19" in out
    status, _, err = run("inspect made --on-corrupt stop")
    assert status == 2
    assert "record 19" in err


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("make made --classes 0", "0 classes cannot be drawn"),
        ("make made --images 4 --format zip", "--format is 'zip': expected one of folder, ofrecord, tar"),
        ("inspect nowhere", "nowhere is not a directory"),
        ("convert nowhere there", "nowhere is not a directory"),
    ],
)
def test_a_mistake_is_status_2(line: str, what: str, run: Run) -> None:
    status, out, err = run(line)
    assert (status, out) == (2, "")
    assert what in err
