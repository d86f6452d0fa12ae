"""Parameters that a cut tears apart train as in a plain loop, with real processes, and their copies stay equal."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from stagewright.plan import Plan
from stagewright.runtime.weights import _find_holders
from tests.runtime.cases import PLACEMENTS, Case, plan_of
from tests.runtime.modules import MODELS
from tests.runtime.test_exactness import check, run_cases

TIED = "tied words"


def planned(**given: object) -> Plan:
    layered = MODELS[TIED].layered()
    return plan_of(Case(model=TIED, **given), layered.names, layered.cuts())  # type: ignore[arg-type]


def test_the_stages_that_hold_a_parameter_are_found() -> None:
    layered = MODELS[TIED].layered()
    assert layered.cuts() == tuple(range(1, layered.num_layers))
    loop = planned(placement="loop")
    assert [stage.layers for stage in loop.stages] == [("embed", "a"), ("b", "c"), ("d", "norm"), ("head", "loss")]
    assert _find_holders(loop, layered) == {(0, 3): ["embed.weight"], (0, 2): ["a.weight"]}
    assert not _find_holders(planned(placement="4"), layered)


@pytest.mark.timeout(400)
def test_synchronous_plans(tmp_path: Path) -> None:
    """Every policy, uneven replicas, rows that do not divide, holders on one worker."""
    orders = (("gpipe", "split"), ("1f1b", "rotate"), ("zero-bubble", "split"), ("dynamic", "rotate"))
    cases = [
        Case(place, policy, route, 3, 23, "adamw", model=TIED)
        for (policy, route), place in product(orders, ("3-1", "2-2", "loop"))
    ]
    wide = [Case("5-2-1", batch=23, optimizer="adamw", model=TIED), Case("4-1-4", optimizer="sgd", model=TIED)]
    check(run_cases([*cases, *wide], tmp_path, 350), len(cases) + len(wide))


@pytest.mark.timeout(400)
def test_versions_are_those_of_the_holder_with_the_most(tmp_path: Path) -> None:
    cases = [
        Case(place, policy, "split", many, 21, "adamw", staleness, 12, model=TIED)
        for place in ("3-1", "loop", "shared")
        for policy, many in (("1f1b", 1), ("dynamic", 3))
        for staleness in ("ssp", "2bw", ",".join(("3", "1", "1", "2")[: len(PLACEMENTS[place].split("."))]))
    ]
    check(run_cases(cases, tmp_path, 350), len(cases))


@pytest.mark.timeout(400)
def test_clipping_counts_them_once_and_a_skipped_step_skips_them(tmp_path: Path) -> None:
    cases = [
        Case(place, clip_norm=clip, precision=precision, staleness=stale, steps=8, model=TIED, recompute=clip is None)
        for place in ("3-1", "loop")
        for stale in ("0", "ssp")
        for clip, precision in ((0.05, "fp64"), (0.05, "fp16"), (None, "fp16"))
    ]
    check(run_cases(cases, tmp_path, 350), len(cases))


@pytest.mark.timeout(400)
def test_a_replica_without_rows_waits_for_the_sum_before(tmp_path: Path) -> None:
    """Microbatches of one sample on two replicas: one never goes forward, and could overwrite what peers still add."""
    cases = [
        Case(place, policy, "split", 3, 3, "adamw", stale, 8, model=TIED)
        for place in ("2-2", "1-2")
        for policy, stale in (("1f1b", "0"), ("1f1b", "2bw"), ("dynamic", "ssp"))
    ]
    check(run_cases(cases, tmp_path, 350), len(cases))
