"""Devices of unlike kinds, each with a profile of its own: every layer takes what it takes on the kind it runs on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import stagewright as sw
from stagewright.cluster import Cluster, Device, DeviceId, Host, Link
from stagewright.cost import Costs
from stagewright.errors import ProfileError
from stagewright.planning.fixed import fixed_plan
from stagewright.profile import LayerProfile, Profile
from stagewright.simulation import simulator
from stagewright.system import OWN, System

GPU, CPU = "gpu", "cpu"


def profile_of(kind: str, *seconds: float, trained: int = 0) -> Profile:
    """Layers a, b … of so many seconds for a row, forward; backward takes twice that."""
    layers = [
        LayerProfile(
            name=name,
            forward_s=(each, 8 * each),
            backward_s=(2 * each, 16 * each),
            output_bytes=4,
            saved_bytes=4,
            parameter_bytes=trained,
        )
        for name, each in zip("abcdefgh", seconds)
    ]
    return Profile(model="net", device=kind, source="imported", batch_sizes=(1, 8), layers=tuple(layers))


def cluster_of(*kinds: str, memory: int = 1 << 30) -> Cluster:
    devices = tuple(Device(kind=kind, memory_bytes=memory) for kind in kinds)
    links = tuple(Link(ends=(str(at), "hub"), kind="x", bytes_per_s=1e12) for at in range(len(kinds)))
    return Cluster(name="mixed", hosts=(Host(devices=devices, links=links),))


BOTH = Profile.of_kinds([profile_of(GPU, 1.0, 1.0, 1.0), profile_of(CPU, 6.0, 1.1, 2.0)])
MIXED = cluster_of(GPU, CPU)


def step_s(plan: sw.Plan, profile: Profile = BOTH, cluster: Cluster = MIXED, system: System = OWN) -> float:
    return sw.simulate(sw.make_schedule(plan), profile, cluster, system=system).median_step_s


def test_a_stage_takes_what_its_layers_take_on_its_kind() -> None:
    plan = fixed_plan(BOTH, sw.PlanOptions(batch=8, placement="0:0.0:1", cut=("b",)), MIXED)
    assert step_s(plan) == pytest.approx(8 * 3 * (1.0 + 1.1 + 2.0), rel=1e-6)
    plan = fixed_plan(BOTH, sw.PlanOptions(batch=8, placement="0:1.0:0", cut=("b",)), MIXED)
    assert step_s(plan) == pytest.approx(8 * 3 * (6.0 + 1.0 + 1.0), rel=1e-6)


def test_rows_go_to_unlike_replicas_as_each_needs_for_the_layers_of_its_stage() -> None:
    cluster = cluster_of(GPU, CPU, GPU)
    plan = fixed_plan(BOTH, sw.PlanOptions(batch=21, placement="0:0-1.0:2", cut=("b",)), cluster)
    assert plan.stages[0].row_weights == pytest.approx((1.0, 1 / 6))
    assert [share.stop - share.start for share in plan.shares(0, 0)] == [18, 3]
    own = Costs(BOTH, cluster)
    assert own.stage_speed(own.cluster.device(DeviceId(0, 1)), 1, 2) == pytest.approx(1 / 1.1)


def test_profiles_of_kinds_that_are_not_there_do_not_matter() -> None:
    only = cluster_of(CPU, CPU)
    plan = fixed_plan(BOTH, sw.PlanOptions(batch=8, placement="0:0.0:1", cut=("b",)), only)
    alone = profile_of(CPU, 6.0, 1.1, 2.0)
    assert step_s(plan, BOTH, only) == pytest.approx(step_s(plan, alone, only))
    with pytest.raises(ProfileError, match="is of gpu and cpu devices, but the cluster mixed has tpu"):
        step_s(plan, BOTH, cluster_of("tpu", "tpu"))


def test_a_group_of_cards_holds_its_own_share_of_the_weights() -> None:
    group = Profile.of_kinds([profile_of(GPU, 1.0, 1.0, trained=400), profile_of("gpu-tp4", 0.3, 0.3, trained=100)])
    costs = Costs(group, cluster_of(GPU, "gpu-tp4"))
    sizes = [
        costs.on(device).stage_bytes(0, 2, rows=1, device=device).weights for device in costs.cluster.hosts[0].devices
    ]
    assert sizes == [800, 200]


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_near_the_best_of_all_plans_of_two_unlike_devices(seed: int) -> None:
    import random

    draw = random.Random(seed)
    gpu = [draw.uniform(0.5, 2.0) for _ in range(6)]
    both = Profile.of_kinds(
        [
            profile_of(GPU, *gpu, trained=1000),
            profile_of(CPU, *(each * draw.uniform(1.1, 6.0) for each in gpu), trained=1000),
        ]
    )
    found = sw.make_plan(both, MIXED, sw.PlanOptions(batch=16, staleness="0"))
    score, best = simulator(both, MIXED), float("inf")
    places = ["0:0", "0:1", "0:0-1", *product(("0:0.0:1", "0:1.0:0"), "bcdef")]
    for place, many in product(places, (1, 2, 4, 8, 16)):
        where, cut = (place, ()) if isinstance(place, str) else (place[0], (place[1],))
        options = sw.PlanOptions(batch=16, placement=where, cut=cut, num_microbatches=many)
        best = min(best, score(fixed_plan(both, options, MIXED)).median_step_s)
    assert found.best.step_s <= best * 1.02


def test_a_worker_whose_sends_block_does_nothing_else_meanwhile() -> None:
    layers = [replace(layer, output_bytes=1e6) for layer in profile_of(GPU, 1.0, 1.0).layers]
    both, two = replace(profile_of(GPU, 1.0, 1.0), layers=tuple(layers)), cluster_of(GPU, GPU)
    slow = replace(two.hosts[0], links=tuple(replace(link, bytes_per_s=1e6) for link in two.hosts[0].links))
    plan = fixed_plan(both, sw.PlanOptions(batch=4, placement="0:0.0:1", cut=("b",), num_microbatches=4), two)
    wires, blocks = Cluster(name="c", hosts=(slow,)), System(name="b", blocking_sends=True)
    plain, blocking = step_s(plan, both, wires), step_s(plan, both, wires, blocks)
    # A microbatch's rows take a second on the wire; what neither worker can hide behind waiting for the other is two.
    assert blocking == pytest.approx(plain + 2)
    assert step_s(plan, both, two, blocks) == pytest.approx(step_s(plan, both, two), rel=1e-4)
