"""PipeDream's objective, and PipeDream's plans against ours."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
from benchmarks.pipedream import PipeDreamPlan, along, find_cuts, pipedream_plan

from stagewright.cluster import Device, make_cluster
from stagewright.cost import Costs
from stagewright.errors import PlanError
from stagewright.planning import PlanOptions
from stagewright.planning.exact import Candidate, price
from stagewright.planning.problem import Problem
from stagewright.planning.search import Search, make_plan
from stagewright.profile import Profile
from stagewright.profiling.pipedream import import_pipedream
from tests.planning.cases import GIB, PIPEDREAM, ROWS, chain, needs_pipedream

V100 = Device(kind="v100", memory_bytes=16 * GIB)


@cache
def profile_of(name: str) -> Profile:
    return replace(import_pipedream(PIPEDREAM / f"{name}.txt", batch=ROWS[name]), device=V100.kind)


@cache
def theirs_of(name: str, num_devices: int, bytes_per_s: float) -> PipeDreamPlan:
    """PipeDream's plan, searched once for all tests."""
    return pipedream_plan(profile_of(name), num_devices, bytes_per_s)


def published() -> Iterator[dict[str, str]]:
    with (PIPEDREAM / "optimizer_results.csv").open() as file:
        yield from csv.DictReader(file)


def objective_by_hand(profile: Profile, plan: PipeDreamPlan, bytes_per_s: float) -> float:
    """The formula of the paper, stage by stage."""
    ordered = along(profile, plan)
    rows = profile.batch_sizes[0]
    costs = Costs(ordered, make_cluster(1, device=V100))
    edges = [0, *accumulate(map(len, plan.stages))]
    worst = 0.0
    for number, replicas in enumerate(plan.replicas):
        first, last = edges[number], edges[number + 1]
        compute = sum(costs.seconds(first, last, rows)[:2])
        reduction = 4 * (replicas - 1) / replicas * costs.gradient_bytes(first, last) / bytes_per_s
        worst = max(worst, (compute + reduction) / replicas)
        for cut in (first, last) if number else ():
            carried = costs.crossings[cut] if cut < len(profile.layers) else 0.0
            worst = max(worst, 2 * carried * rows / (bytes_per_s * replicas))
    return worst


def test_a_chain_is_cut_where_the_largest_stage_is_smallest() -> None:
    found = pipedream_plan(chain((1.0, 1.0, 4.0)), 3, 1e12)
    assert found.stages == (("a", "b"), ("c",))
    assert found.replicas == (1, 2)
    assert found.seconds == pytest.approx(2.0)


def test_a_diamond_can_be_cut_along_either_branch() -> None:
    plain = chain((1.0, 1.0, 1.0, 1.0))
    reads = {"b": ("a",), "c": ("a",), "d": ("b", "c")}
    layers = tuple(replace(layer, inputs=reads.get(layer.name)) for layer in plain.layers)
    cuts = find_cuts(replace(plain, layers=layers))
    assert [f"{mask:04b}" for mask in cuts.masks] == ["0000", "0001", "0011", "0101", "0111", "1111"]


def test_graphs_with_too_many_cuts_are_refused() -> None:
    plain = chain((1.0,) * 16)
    wide = tuple(replace(layer, inputs=() if number else None) for number, layer in enumerate(plain.layers))
    with pytest.raises(PlanError, match="more than 20,000 ways"):
        find_cuts(replace(plain, layers=wide))


@needs_pipedream
def test_every_published_row_is_matched_or_beaten(capsys: pytest.CaptureFixture[str]) -> None:
    lines, worse = [], 0
    for row in published():
        profile, rate = profile_of(row["profile"]), float(row["bandwidth_bytes_per_s"])
        found = theirs_of(row["profile"], int(row["devices"]), rate)
        theirs = float(row["seconds_per_batch"])
        assert objective_by_hand(profile, found, rate) == pytest.approx(found.seconds, rel=1e-9)
        worse += found.seconds > theirs * (1 + 1e-9)
        plan = "-".join(map(str, found.replicas))
        lines.append(
            f"{row['profile']:9}{row['devices']:>3} × {rate / 1e9:6.3f} GB/s   theirs {theirs:.6f} s   "
            f"ours {found.seconds:.6f} s   {found.seconds / theirs:.4f}   {plan}"
        )
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert worse == 0
    assert len(lines) == 36


def price_of(profile: Profile, plan: PipeDreamPlan, num_devices: int, rate: float, staleness: str) -> float:
    """Our estimate of PipeDream's plan, with the microbatches and route that suit it best."""
    cluster = make_cluster(num_devices, device=V100, bytes_per_s=rate)
    problem = Problem(
        Costs(along(profile, plan), cluster), PlanOptions(batch=profile.batch_sizes[0], staleness=staleness)
    )
    ends = [0, *accumulate(plan.replicas)]
    groups = tuple(cluster.device_ids[low:high] for low, high in zip(ends, ends[1:]))
    edges = (0, *accumulate(map(len, plan.stages)))
    priced = [price(Candidate(edges, groups, each), problem.estimator(each)) for each in problem.settings()]
    return min((found.step_s for found in priced if found is not None), default=float("inf"))


def plan_for(profile: Profile, num_devices: int, rate: float, staleness: str) -> Search:
    cluster = make_cluster(num_devices, device=V100, bytes_per_s=rate)
    return make_plan(profile, cluster, PlanOptions(batch=profile.batch_sizes[0], staleness=staleness))


@needs_pipedream
@pytest.mark.parametrize("name", ["vgg16", "alexnet", "gnmt", "resnet50"])
@pytest.mark.parametrize("staleness", ["0", pytest.param("ssp", marks=pytest.mark.slow)])
def test_our_plan_is_never_predicted_slower_than_pipedreams_or_data_parallelism(
    name: str, staleness: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, lines = profile_of(name), []
    for num_devices in (4, 8, 16):
        for rate in (1e9, 3.125e9, 1e10):
            found = plan_for(profile, num_devices, rate, staleness)
            theirs = price_of(profile, theirs_of(name, num_devices, rate), num_devices, rate, staleness)
            parallel = float("inf") if found.data_parallel is None else found.data_parallel.step_s
            lines.append(
                f"{name:9}{num_devices:>3} × {rate / 1e9:6.3f} GB/s   PipeDream's {theirs * 1e3:8.2f} ms   "
                f"data parallel {parallel * 1e3:8.2f} ms   ours {found.best.step_s * 1e3:8.2f} ms   "
                f"planned in {found.seconds:.2f} s   {'-'.join(map(str, found.best.plan.replicas))}"
            )
            assert found.best.step_s <= min(theirs, parallel) * (1 + 1e-9), lines[-1]
    with capsys.disabled():
        print("", *lines, sep="\n")
