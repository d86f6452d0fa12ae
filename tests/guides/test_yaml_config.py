"""The task: own model and data named in a YAML file, as --print-config writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from stagewright.record import Record
from stagewright.training.config import Config
from tests.guides.own import do, typed


@pytest.mark.timeout(320)
def test_yaml_config(tmp_path: Path) -> None:
    do("From the command line", tmp_path)
    config = Config.load(tmp_path / "run.yaml")
    assert (config.model.name, config.data.data) == ("python:mine.py:model", "python:mine.py:data")
    again = typed("stagewright train --config run.yaml --print-config", tmp_path)
    assert again == (tmp_path / "run.yaml").read_text()
    mine, other = (Record.load(tmp_path / "results" / name / "record.json") for name in ("mine", "other"))
    losses = [[point.value for point in record.points if point.name == "loss"] for record in (mine, other)]
    assert [len(each) for each in losses] == [20, 10]
    assert losses[0][:10] != losses[1], "another seed"
    assert any(point.name == "validation_loss" for point in mine.points)
    assert load_file(tmp_path / "mine.safetensors")["2.weight"].shape == (4, 32)
