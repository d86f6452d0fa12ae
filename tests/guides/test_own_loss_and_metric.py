"""The task: a loss and a metric of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.guides.own import do


@pytest.mark.timeout(320)
def test_own_loss_and_metric(tmp_path: Path) -> None:
    said = do("A loss and a metric", tmp_path)
    found = re.search(r"^loss (\d\.\d+), close (\d\.\d+)$", said, re.MULTILINE)
    assert found is not None
    assert 0 < float(found[1]) < 0.8
    assert 0.5 < float(found[2]) <= 1
    assert "close: " in said, "the log has it too"
