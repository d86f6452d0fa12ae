"""A small ResNet learns real images in the stalest of the pipelines; benchmarks/curves.py runs the others as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.record import Record

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_over_90_percent_of_unseen_images_are_named_right(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "curves.py"), str(tmp_path), "--only", "3-1 ssp"]
    subprocess.run(words, check=True, timeout=380, stdout=subprocess.DEVNULL)
    points = Record.load(tmp_path / "3-1-ssp" / "record.json").points
    assert [point.value for point in points if point.name == "validation_top_1"][-1] > 0.9
    assert (tmp_path / "report" / "report.html").exists()
