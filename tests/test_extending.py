"""docs/extending.md: what it says is done in a copy of the package, which then trains with all of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
ADDED = re.findall(r"^In `(\S+)`, after `([^`\n]+)`:\n\n```python\n(.*?)```", PAGE, re.M | re.S)
REWRITTEN = re.findall(r"^In `(\S+)`, after `([^`\n]+)`, in that line, write `([^`]+)` for `([^`]+)`", PAGE, re.M)


def test_each_thing_touches_three_files_at_most() -> None:
    for section in PAGE.split("\n## ")[1:]:
        assert len(set(re.findall(r"`(\w[\w/]*\.py)`", section))) <= 3, section.splitlines()[0]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the page's changes in it."""
    home = tmp_path_factory.mktemp("extended")
    package = shutil.copytree(ROOT / "src" / "stagewright", home / "stagewright")
    assert (len(ADDED), len(REWRITTEN)) == (4, 1)
    for name, place, new in ADDED:
        change(package / name, place, lambda line, new=new: line + new)
    for name, place, new, old in REWRITTEN:
        change(package / name, place, lambda line, new=new, old=old: line.replace(old, new))
    return home


def change(file: Path, place: str, how: object) -> None:
    """Changes the one line that holds the place."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    (found,) = [number for number, line in enumerate(lines) if place in line]
    changed = how(lines[found])  # type: ignore[operator]
    assert changed != lines[found]
    lines[found] = changed
    file.write_text("".join(lines), encoding="utf-8")


def test_a_new_optimizer_schedule_and_model_train_together(extended: Path, tmp_path: Path) -> None:
    words = (
        "train linear --device cpu --batch 8 --microbatches 2 --placement 0:0.0:1 --cut out --steps 2 --warm-up 0 "
        f"--schedule mine --optimizer nadam --json --no-save-final -o {tmp_path / 'run'}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "stagewright", *words.split()], cwd=tmp_path, capture_output=True, text=True,
        timeout=100, env={**os.environ, "PYTHONPATH": str(extended)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images_per_s"] > 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["plan"]["policy"], record["plan"]["model"]) == ("mine", "linear")
    assert "optimizer: nadam" in (tmp_path / "run" / "config.yaml").read_text()
