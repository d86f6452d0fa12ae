"""One flipped bit makes a replica another one, and it is named; sound ones are left in peace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.running import run_workers


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("placement", "who", "says"),
    [
        ("3-1", 1, "worker 1 (device 0:1) has other weights of stage 0 after step 6 than 0, 2, to the bit"),
        ("2", 1, "workers 0, 1 have different weights of stage 0 after step 6, to the bit"),
        ("3-1", 9, ""),
    ],
)
def test_the_replica_that_has_diverged_is_named_once(placement: str, who: int, says: str, tmp_path: Path) -> None:
    size = sum(map(int, placement.split("-")))
    run_workers(size, "tests.runtime.diverging", str(tmp_path), placement, str(who))
    told = [(tmp_path / f"{placement}-{who}-{worker}.txt").read_text() for worker in range(size)]
    assert told[0].startswith(says)
    assert told[0].count("different") + told[0].count("other") == (1 if says else 0)
    assert not any(told[1:])
