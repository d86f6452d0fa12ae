"""What fits is found where memory decides, and what fits in no way is refused with what each stage lacks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stagewright.cluster import Device, make_cluster
from stagewright.cost import Costs
from stagewright.errors import PlanError
from stagewright.planning import explore
from stagewright.planning.explore import least_full
from stagewright.planning.options import PlanOptions
from stagewright.planning.problem import Problem
from stagewright.planning.search import make_plan
from stagewright.profile import Profile
from tests.planning.cases import GIB, MIB, chain


def small(memory: int) -> Device:
    return Device(kind="cpu", memory_bytes=memory)


def heavy(*weights: int) -> Profile:
    """Layers that take as long, of so many MiB; each needs three times as much: weights, gradients and one state."""
    return chain((1.0,) * len(weights), weights=tuple(each * MIB for each in weights))


def test_the_cut_is_where_the_fullest_device_is_least_full() -> None:
    """100 50 50 │ 10 10 on 900 MiB and 100 MiB; balanced in time or in bytes it would be cut elsewhere."""
    cluster = make_cluster(2, device=small(900 * MIB))
    devices = (small(900 * MIB), small(100 * MIB))
    cluster = replace(cluster, hosts=(replace(cluster.hosts[0], devices=devices),))
    profile = heavy(100, 50, 50, 10, 10)
    found = least_full(Problem(Costs(profile, cluster), PlanOptions(batch=8)))
    assert found.candidate.edges == (0, 3, 5)
    assert [str(use.device) for use in found.stages] == ["0:0", "0:1"]
    assert found.ratio == pytest.approx(200 * 3 / 900)


@pytest.mark.parametrize("seed", [1, 3, 10, 12])
def test_a_plan_that_fits_is_found_where_balanced_ones_do_not(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    weights = [draw.choice((1, 1, 1, 50, 100)) for _ in range(16)]
    profile = chain(tuple(draw.choice((1.0, 1.0, 10.0)) for _ in range(16)), weights=tuple(w * MIB for w in weights))
    cluster = make_cluster(3, device=small(int(sum(weights) * 1.08 + 10) * MIB))
    best = make_plan(profile, cluster, PlanOptions(batch=8)).best
    assert max(best.peak_bytes) <= int(sum(weights) * 1.08 + 10) * MIB
    monkeypatch.setattr(explore, "least_full", lambda problem: least_full(problem)._replace(ratio=9.0))
    with pytest.raises(PlanError, match="fits on"):
        make_plan(profile, cluster, PlanOptions(batch=8))


def refusal(profile: Profile, memory: int, options: PlanOptions, **ways: Profile) -> tuple[str, list[str]]:
    with pytest.raises(PlanError) as refused:
        make_plan(profile, make_cluster(2, device=small(memory)), options, ways=ways)
    return refused.value.what, (refused.value.todo or "").splitlines()


def test_a_refusal_says_what_each_stage_needs_and_what_would_make_it_fit() -> None:
    profile = heavy(1024, 1024, 1024, 1024)
    what, todo = refusal(profile, 4 * GIB, PlanOptions(batch=8), lora=profile.frozen(), sgd=profile)
    assert what.endswith("where the fullest device is least full, layers a … b need 6.0 GiB on 0:0, which has 4.0 GiB")
    each = "which has 4.0 GiB (weights 2.00 GiB, gradients 2.00 GiB, optimizer 2.00 GiB)"
    assert todo[:2] == [
        f"layers a … b need 6.0 GiB on 0:0, {each}", f"layers c … d need 6.0 GiB on 0:1, {each}",
    ]  # fmt: skip
    assert "lora brings the fullest device, 0:0, to about 2.0 GiB of 4.0 GiB" in todo
    assert "sgd does not suffice: it brings the fullest device, 0:0, to about 6.0 GiB of 4.0 GiB" in todo


def test_what_was_forbidden_is_offered_where_it_would_help() -> None:
    # weights, what is reduced, and a gradient on its way there: 5 GiB, and states of 4 GiB or half of them
    profile = heavy(1024, 1024).with_states(lambda role: 2)
    _, todo = refusal(profile, 8 * GIB, PlanOptions(batch=8, placement="0:0-1", shard_optimizer=False))
    assert any(line.startswith("--shard-optimizer brings the fullest device, 0:0, to") for line in todo)
    kept = chain((1.0,) * 4, saved=300e6)
    _, todo = refusal(kept, 3 * GIB, PlanOptions(batch=8, recompute=False, num_microbatches=1))
    assert any(line.startswith("without --microbatches, more of them brings") for line in todo)
    assert any(line.startswith("--batch 2 brings the fullest device") for line in todo)
