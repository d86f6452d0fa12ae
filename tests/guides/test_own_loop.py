"""The task: a loop of one's own, with gradients and optimizers in reach; under torchrun the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guides.own import do


@pytest.mark.timeout(400)
def test_own_loop(tmp_path: Path) -> None:
    alone, under = (
        [line for line in do("A loop of your own", tmp_path, launcher=launcher).splitlines() if " " in line]
        for launcher in ("python", "torchrun --standalone --nproc-per-node=3")
    )
    for lines in (alone, under):
        losses = [float(line.split(": ")[1]) for line in lines if line.startswith("batch ")]
        assert len(losses) == 3
        assert losses[-1] < losses[0]
        assert sum(line.startswith("the model is trained: 0.") for line in lines) == 1
    told = [[line for line in lines if line.startswith(("batch", "the model"))] for lines in (alone, under)]
    assert told[0] == told[1]
