"""The estimate in closed form, on cases that fit on a napkin."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stagewright.cluster import Cluster, Device, Host, Link, find_cluster, make_cluster
from stagewright.cost import Costs
from stagewright.plan import Plan, overlaps
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.planning.estimate import estimate
from stagewright.planning.groups import find_twins
from tests.planning.cases import GIB, MIB, chain, random_cluster, random_profile

ROOMY = Device(kind="cpu", memory_bytes=64 * GIB)


def step_s(plan: Plan, costs: Costs) -> float:
    return estimate(plan, costs).step_s


def costs_of(profile: object, num_devices: int, bytes_per_s: float = 1e12) -> Costs:
    return Costs(profile, make_cluster(num_devices, device=ROOMY, bytes_per_s=bytes_per_s))  # type: ignore[arg-type]


def test_one_device_takes_its_layers_one_after_the_other() -> None:
    costs = costs_of(chain((1.0, 2.0, 3.0)), 1)
    assert step_s(fixed_plan(costs.profile, PlanOptions(batch=8), costs.cluster), costs) == pytest.approx(6.0)


def test_hosts_that_share_cores_wait_for_them_and_not_for_hosts_that_wait() -> None:
    """Four hosts on two cores, four even stages of one second a batch: one after the other, or all at once."""
    cluster = replace(find_cluster("hosts-4"), cores=2.0)
    costs = Costs(chain((1.0, 1.0, 1.0, 1.0)), cluster)

    def seconds(count: int, **options: str) -> float:
        wanted = PlanOptions(batch=8, num_microbatches=count, **options)
        return step_s(fixed_plan(costs.profile, wanted, cluster), costs)

    assert seconds(1, placement="0:0.1:0.2:0.3:0") == pytest.approx(4.0, rel=0.01)  # each has a core to itself
    assert seconds(1) == pytest.approx(2.0, rel=0.01)  # a quarter of the rows each, at half the speed
    assert seconds(8, placement="0:0.1:0.2:0.3:0", staleness="ssp") == pytest.approx(2.0, rel=0.01)  # all the work


def test_a_flushed_pipeline_fills_and_drains() -> None:
    """Two even stages of one second a batch, M microbatches: (M + 1) / M seconds."""
    costs = costs_of(chain((1.0, 1.0)), 2)
    for count in (1, 2, 4, 8):
        plan = fixed_plan(
            costs.profile, PlanOptions(batch=8, placement="0:0.0:1", num_microbatches=count), costs.cluster
        )
        assert step_s(plan, costs) == pytest.approx((count + 1) / count)


def test_without_a_flush_the_slowest_stage_sets_the_pace() -> None:
    costs = costs_of(chain((1.0, 2.0)), 2)
    plan = fixed_plan(costs.profile, PlanOptions(batch=8, placement="0:0.0:1", staleness="ssp"), costs.cluster)
    assert step_s(plan, costs) == pytest.approx(2.0)


def test_holding_one_batch_takes_the_overlap_away() -> None:
    """K = 2, 1 but one batch in flight: the stages wait for one another, 1 + 2 seconds."""
    costs = costs_of(chain((1.0, 2.0)), 2)
    options = PlanOptions(batch=8, placement="0:0.0:1", staleness="ssp", hold=1)
    assert step_s(fixed_plan(costs.profile, options, costs.cluster), costs) == pytest.approx(3.0)


def test_data_parallelism_waits_for_its_reduction() -> None:
    """4 devices, 160 MB at 1 GB/s: 2 · 3/4 · 0.16 s; the one bucket is complete when backward ends."""
    profile = chain((4.0,), weights=(16 * 10**6,))
    costs = costs_of(profile, 4, bytes_per_s=1e9)
    plan = fixed_plan(profile, PlanOptions(batch=8, num_buckets=1), costs.cluster)
    assert step_s(plan, costs) == pytest.approx(4.0 / 4 + 1.5 * 0.016)


def test_buckets_hide_behind_backward() -> None:
    """The heavy last layer's gradients are complete early in backward, so that only the first layer's are exposed."""
    profile = chain((9.0, 9.0), weights=(16 * MIB, 16 * MIB))
    costs = costs_of(profile, 2, bytes_per_s=1e8)
    one, two = (
        step_s(fixed_plan(profile, PlanOptions(batch=8, num_buckets=count), costs.cluster), costs) for count in (1, 2)
    )
    assert one - 9.0 == pytest.approx(2 * (two - 9.0))


def test_what_crosses_a_cut_takes_its_time_twice() -> None:
    """1 MB a row × 8 rows at 1 GB/s there, and its gradient back."""
    profile = chain((1.0, 1.0), outputs=(1e6, 0.0))
    plan = fixed_plan(profile, PlanOptions(batch=8, placement="0:0.0:1"))
    costs = costs_of(profile, 2, bytes_per_s=1e9)
    assert step_s(plan, costs) == pytest.approx(2.0 + 2 * 0.008)


def test_rotated_microbatches_do_not_wait_for_one_another() -> None:
    """Two replicas, two microbatches of four rows: each replica runs one of them, at the same time."""
    profile = chain((8.0,))
    costs = costs_of(profile, 2)
    plan = fixed_plan(profile, PlanOptions(batch=8, num_microbatches=2, route="rotate"), costs.cluster)
    assert step_s(plan, costs) == pytest.approx(4.0)


def test_recomputing_runs_forward_again_and_saves_memory() -> None:
    profile = chain((3.0, 3.0), saved=100e6)
    costs = costs_of(profile, 1)
    plain = fixed_plan(profile, PlanOptions(batch=8), costs.cluster)
    again = replace(plain, stages=tuple(replace(stage, recompute=True) for stage in plain.stages))
    assert step_s(again, costs) - step_s(plain, costs) == pytest.approx(2.0)
    piped = PlanOptions(batch=8, placement="0:0.0:1", num_microbatches=4)
    two = costs_of(profile, 2)
    first = estimate(fixed_plan(profile, piped, two.cluster), two).parts[0].peak_bytes
    lean = estimate(fixed_plan(profile, replace(piped, recompute=True), two.cluster), two).parts[0].peak_bytes
    assert lean < first


def test_a_plan_that_does_not_fit_says_where() -> None:
    profile = chain((1.0, 1.0), weights=(0, 3 * GIB))
    cluster = make_cluster(2, device=Device(kind="cpu", memory_bytes=8 * GIB))
    found = estimate(fixed_plan(profile, PlanOptions(batch=8, placement="0:0.0:1"), cluster), Costs(profile, cluster))
    assert found.shortage is not None
    assert (str(found.shortage.device), found.shortage.first, found.shortage.has_bytes) == ("0:1", 1, 8 * GIB)


def test_the_limit_is_named() -> None:
    profile = chain((1.0, 0.1), weights=(0, 400 * MIB))
    costs = costs_of(profile, 4, bytes_per_s=1e8)
    parallel = estimate(fixed_plan(profile, PlanOptions(batch=8), costs.cluster), costs)
    assert parallel.limit.startswith("all-reduce of b (400 MiB; ")
    cut = estimate(fixed_plan(profile, PlanOptions(batch=8, placement="0:0-2.0:3", cut=("b",)), costs.cluster), costs)
    assert cut.limit == "compute of stage 0"


def test_more_of_anything_never_makes_the_estimate_smaller() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        profile, cluster = random_profile(draw, 4), random_cluster(draw, 3)
        plan = fixed_plan(profile, PlanOptions(batch=24, placement="0:0-1.0:2", num_microbatches=3), cluster)
        base = step_s(plan, Costs(profile, cluster))
        slower = replace(profile, layers=tuple(replace(layer, forward_s=(1.0, 1.0)) for layer in profile.layers))
        host = cluster.hosts[0]
        thin = replace(host, links=tuple(replace(link, bytes_per_s=link.bytes_per_s / 2) for link in host.links))
        assert step_s(plan, Costs(slower, cluster)) >= base
        assert step_s(plan, Costs(profile, replace(cluster, hosts=(thin,)))) >= base


def test_rows_go_to_the_replica_that_has_their_place() -> None:
    ids = make_cluster(5).device_ids
    thirds, halves = (0.0, 1 / 3, 2 / 3, 1.0), (0.0, 0.5, 1.0)
    sources, targets = (list(zip(*each)) for each in ((ids, thirds, thirds[1:]), (ids[3:], halves, halves[1:])))
    moves = overlaps(sources, targets)
    assert [(str(a), str(b), round(stop - start, 3)) for a, b, start, stop in moves] == [
        ("0:0", "0:3", 0.333),
        ("0:1", "0:3", 0.167),
        ("0:1", "0:4", 0.167),
        ("0:2", "0:4", 0.333),
    ]


def test_twins_are_wired_alike() -> None:
    links = (("0", "left", 1e9), ("1", "left", 1e9), ("2", "left", 2e9), ("3", "right", 1e9), ("left", "right", 1e9))
    host = Host(
        devices=(ROOMY,) * 4, links=tuple(Link(ends=(a, b), kind="w", bytes_per_s=rate) for a, b, rate in links)
    )
    twins = find_twins(Costs(chain((1.0,)), Cluster(name="c", hosts=(host,))))
    assert {str(id): [str(each) for each in others] for id, others in twins.items()} == {
        "0:0": ["0:0", "0:1"],
        "0:1": ["0:0", "0:1"],
        "0:2": ["0:2"],
        "0:3": ["0:3"],
    }
