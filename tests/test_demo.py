"""`make demo`, as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.record import Record

SCRIPT = Path(__file__).parents[1] / "scripts" / "demo.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo leaves."""
    made = tmp_path_factory.mktemp("demo")
    done = subprocess.run([sys.executable, SCRIPT, made], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"report: {made / 'report.html'}" in done.stdout
    return made


def test_it_predicts_trains_and_reports(folder: Path) -> None:
    records = {path.name.removesuffix(".record.json"): Record.load(path) for path in folder.glob("*.record.json")}
    assert sorted(records) == ["3-1.measured", "3-1.simulated", "data-parallel.measured", "data-parallel.simulated"]
    assert records["3-1.measured"].plan.replicas == (3, 1)
    assert (folder / "report.html").is_file()


def test_both_plans_train_the_same_weights(folder: Path) -> None:
    """Both are exact, so their losses agree to rounding."""
    first, second = (losses(folder / f"{name}.measured.record.json") for name in ("3-1", "data-parallel"))
    assert len(first) == len(second) > 10
    assert first == pytest.approx(second, rel=1e-3)


def losses(file: Path) -> list[float]:
    """The loss of every step of a record."""
    return [point.value for point in Record.load(file).points if point.name == "loss"]
