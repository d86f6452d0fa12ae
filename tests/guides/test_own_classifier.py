"""The task: a classifier on a Dataset of one's own, from the guide alone; under torchrun the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from stagewright.record import Record
from tests.guides.own import do

pytestmark = pytest.mark.timeout(320)


@pytest.mark.parametrize("launcher", ["python", "torchrun --standalone --nproc-per-node=4"])
def test_own_classifier(launcher: str, tmp_path: Path) -> None:
    said = do("Ten lines", tmp_path, launcher=launcher).splitlines()
    placement, accuracy, *shape = said[-1].split()
    assert (placement, " ".join(shape)) == ("0:0-2.0:3", "torch.Size([1, 4])")
    assert float(accuracy) > 0.8
    assert set(load_file(tmp_path / "trained" / "model.safetensors")) == {
        f"{n}.{p}" for n in "024" for p in ("bias", "weight")
    }
    losses = [point.value for point in Record.load(tmp_path / "trained" / "record.json").points if point.name == "loss"]
    assert len(losses) == 40
    assert losses[-1] < 0.5 * losses[0]
