"""Every plan equals a few lines of single-process PyTorch, with real processes, in double precision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from stagewright.runtime.launch.mps import shared_cards
from tests.runtime.cases import Case, all_cases, size_of
from tests.runtime.running import run_workers

TOLERANCE = 1e-9
STRIDE = 11
"""Every eleventh case runs by default; the strides walk through placements, policies, routes and sizes."""


def run_cases(
    cases: list[Case], folder: Path, timeout_s: float, extra: Mapping[str, str] | None = None
) -> list[dict[str, object]]:
    """What came out of the cases, from one set of workers for each number of workers."""
    results: list[dict[str, object]] = []
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    for size in sorted({size_of(case) for case in cases}):
        out = folder / f"results-{size}.json"
        run_workers(size, "tests.runtime.cases", str(folder / "cases.json"), str(out), timeout_s=timeout_s, extra=extra)
        results += json.loads(out.read_text())
    return results


def check(results: list[dict[str, object]], expected: int) -> None:
    """Every case ran, and none is further from the reference than rounding explains."""
    assert len(results) == expected
    wrong = [result for result in results if not float(str(result["worst"])) < TOLERANCE]
    assert not wrong, f"{len(wrong)} of {expected} differ from the reference, such as {wrong[0]}"


@pytest.mark.timeout(600)
def test_a_part_of_the_matrix_equals_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = all_cases()[::STRIDE]
    results = run_cases(cases, tmp_path, 200)
    check(results, len(cases))
    with capsys.disabled():
        print(f"\n{len(cases)} of {len(all_cases())} exactness cases, worst {max(r['worst'] for r in results):.1e}")


@pytest.mark.timeout(200)
def test_stages_of_one_worker_that_are_updated_at_different_times_share_a_verdict(tmp_path: Path) -> None:
    """Stage 0 of two on the same workers is updated a batch later than stage 1, and clipped by the same norm."""
    cases = [Case(place, clip_norm=0.05, staleness="ssp", steps=8) for place in ("shared", "loop")]
    check(run_cases(cases, tmp_path, 100), len(cases))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
def test_workers_that_share_a_card_equal_the_reference(tmp_path: Path) -> None:
    """Sums, transfers and agreements of NCCL and of staged memory, on one card for all workers."""
    cases = [case for case in all_cases()[:: 2 * STRIDE] if size_of(case) <= 4]
    with shared_cards(4, "staged") as shared:
        check(run_cases(cases, tmp_path, 500, {**shared, "STAGEWRIGHT_TEST_DEVICE": "cuda"}), len(cases))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_matrix_equals_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = all_cases()
    results = run_cases(cases, tmp_path, 1800)
    check(results, len(cases))
    with capsys.disabled():
        print(f"\nall {len(cases)} exactness cases, worst {max(r['worst'] for r in results):.1e}")


def test_the_default_part_touches_everything() -> None:
    cases = all_cases()[::STRIDE]
    assert {case.placement for case in cases} == {case.placement for case in all_cases()}
    assert {case.policy for case in cases} == {case.policy for case in all_cases()}
    assert {case.route for case in cases} == {"split", "rotate"}
    assert {case.optimizer for case in cases} == {"sgd", "adamw", "scheduled"}
    assert {"0", "ssp", "2bw"} <= {case.staleness for case in cases}
    assert any(case.clip_norm for case in cases)
    assert {case.batch % case.microbatches == 0 for case in cases} == {True, False}
