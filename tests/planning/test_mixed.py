"""Clusters of unlike kinds: plans beside the best of all plans, and files that cannot be planned with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.oracle import best_of_all, random_mixed_case

from stagewright.cli.plan import plan
from stagewright.cluster import Cluster, Device, Host, Link
from stagewright.errors import StagewrightError
from stagewright.planning.options import PlanOptions
from stagewright.planning.search import make_plan
from stagewright.profile import Profile
from stagewright.simulation import simulator
from tests.planning.cases import chain
from tests.profiling.test_cli import run

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_plan_of_all_is_much_faster_on_kinds_with_a_profile_each_and_little_memory(seed: int) -> None:
    case, (best_s, best) = random_mixed_case(seed), best_of_all(seed, random_mixed_case)
    assert len(case.profile.by_kind) > 1
    options = PlanOptions(batch=case.batch, staleness=case.staleness)
    found = make_plan(case.profile, case.cluster, options, simulator(case.profile, case.cluster)).best
    assert found.step_s <= best_s * 1.02, f"{found.plan} beside {best}"


def test_profiles_of_different_models_are_refused_by_the_layer_that_differs(tmp_path: Path) -> None:
    made = chain((0.1, 0.1, 0.1))
    made.save(tmp_path / "profiles" / "cpu.json")
    layers = (*made.layers[:-1], replace(made.layers[-1], name="other"))
    replace(made, device="v100", layers=layers).save(tmp_path / "profiles" / "v100.json")
    with pytest.raises(StagewrightError, match="are of different models: layer c in one is other in the other"):
        run(plan, tmp_path / "profiles", "--batch", 8)
    assert Profile.load(tmp_path / "profiles" / "cpu.json") == made


def test_a_link_that_is_missing_is_named_with_both_devices(tmp_path: Path) -> None:
    profile = chain((0.1, 0.1, 0.1)).save(tmp_path / "profile.json")
    wired = Link(ends=("0", "hub"), kind="x", bytes_per_s=1e9)
    host = Host(devices=(Device(kind="cpu", memory_bytes=1 << 34),) * 2, links=(wired,))
    file = Cluster(name="torn", hosts=(host,)).save(tmp_path / "torn.yaml")
    with pytest.raises(StagewrightError, match=r"no link leads from 0:[01] to 0:[01] in torn\n.*add the missing link"):
        run(plan, profile, "--cluster", file, "--batch", 8)
