"""The search finds the optimum of its own cost: against every plan there is."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from stagewright.cluster import Device, make_cluster
from stagewright.cost import Costs
from stagewright.errors import PlanError
from stagewright.plan import Plan
from stagewright.planning import PlanOptions
from stagewright.planning.estimate import estimate
from stagewright.planning.exact import _PLAIN_SLACK, Candidate, Found, Leaders, price, runs, search_exactly, subsets
from stagewright.planning.groups import Savings, Setting
from stagewright.planning.problem import Problem
from stagewright.planning.search import make_plan
from tests.planning.cases import GIB, MIB, chain, random_cluster, random_options, random_profile
from tests.planning.exhaustive import best_of_all, every_candidate


def found_and_best(seed: int, num_layers: int, num_devices: int) -> tuple[float, float]:
    """The search's step and the oracle's, on one random case; infinite where nothing fits."""
    draw = random.Random(seed)
    profile, cluster = random_profile(draw, num_layers), random_cluster(draw, num_devices)
    options = random_options(draw, wide=num_layers * num_devices <= 12)
    problem = Problem(Costs(profile, cluster), options)
    plain = [setting for setting in problem.plain_settings() if options.staleness == "2bw"]
    best_s, _ = best_of_all(problem.costs, problem.settings(weighed=True))
    best_s = min(best_s, best_parallel(problem, plain))
    try:
        found = make_plan(profile, cluster, options)
    except PlanError:
        return float("inf"), best_s
    return found.best.step_s, best_s


def best_parallel(problem: Problem, settings: list[Setting]) -> float:
    """Exact data parallelism, which competes even where all others keep two versions."""
    edges, devices = (0, len(problem.costs.profile.layers)), problem.costs.cluster.device_ids
    priced = (price(Candidate(edges, (devices,), each), problem.estimator(each)) for each in settings)
    return min((found.step_s for found in priced if found is not None), default=float("inf"))


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_optimum_of_4_layers_on_3_devices(seed: int) -> None:
    found, best = found_and_best(seed, 4, 3)
    assert found == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_search_finds_the_optimum_of_6_layers_on_4_devices(seed: int) -> None:
    found, best = found_and_best(seed, 6, 4)
    assert found == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_labels_alone_find_the_optimum_without_a_good_plan_to_begin_with(seed: int) -> None:
    draw = random.Random(seed)
    profile, cluster = random_profile(draw, 7), random_cluster(draw, 3)
    options = replace(random_options(draw, wide=False), num_microbatches=4, staleness="0")
    problem = Problem(Costs(profile, cluster), options)
    (setting,) = problem.settings()
    leaders = Leaders()
    search_exactly(problem.estimator(setting), problem.cuts, subsets(problem.costs, cluster.device_ids), leaders)
    assert leaders.bound == pytest.approx(best_of_all(problem.costs, [setting])[0], rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_plans_of_two_stages_come_along_though_deeper_ones_are_a_little_faster(seed: int) -> None:
    """Of each size of groups the best, as every plan there is says; a simulation may prefer one of them."""
    draw = random.Random(seed)
    profile, cluster = random_profile(draw, 6), make_cluster(4)
    options = replace(random_options(draw, wide=False), num_microbatches=4, staleness="0")
    problem = Problem(Costs(profile, cluster), options)
    (setting,) = problem.settings()
    estimator, leaders = problem.estimator(setting), Leaders()
    search_exactly(estimator, problem.cuts, subsets(problem.costs, cluster.device_ids), leaders)
    best: dict[tuple[int, ...], float] = {}
    for candidate in every_candidate(problem.costs, setting):
        found = price(candidate, estimator) if len(candidate.groups) == 2 else None
        if found is not None:
            sizes = tuple(map(len, candidate.groups))
            best[sizes] = min(found.step_s, best.get(sizes, float("inf")))
    near = sorted(step_s for step_s in best.values() if step_s <= _PLAIN_SLACK * leaders.bound)[: leaders.sizes]
    kept = [found.step_s for found in leaders.shallow.get(2, [])]
    assert kept[: len(near)] == pytest.approx(near, rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(8))
def test_the_search_finds_the_optimum_of_8_layers_on_6_devices(seed: int) -> None:
    found, best = found_and_best(seed, 8, 6)
    assert found == pytest.approx(best, rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_search_finds_the_optimum_of_hundreds_of_small_cases() -> None:
    for seed, layers, devices in product(range(100, 200), (2, 3, 5), (1, 2, 3)):
        found, best = found_and_best(seed, layers, devices)
        assert found == pytest.approx(best, rel=1e-9), (seed, layers, devices)


def recomputed_in_every_way(plan: Plan) -> list[Plan]:
    flags = product((False, True), repeat=len(plan.stages))
    return [replace(plan, stages=tuple(replace(s, recompute=f) for s, f in zip(plan.stages, each))) for each in flags]


@pytest.mark.parametrize("seed", range(6))
def test_recomputing_only_where_memory_needs_it_is_best(seed: int) -> None:
    """The oracle here makes whole plans, recomputes in every subset of the stages, and asks for each one's estimate."""
    draw = random.Random(seed)
    profile, cluster = random_profile(draw, 3), random_cluster(draw, 2)
    options = PlanOptions(batch=24, num_microbatches=2, route="split")
    problem = Problem(Costs(profile, cluster), options)
    steps = [float("inf")]
    for setting in problem.settings(weighed=True):
        for candidate in every_candidate(problem.costs, setting):
            for plan in recomputed_in_every_way(whole_of(candidate, problem)):
                found = estimate(plan, problem.costs)
                steps += [found.step_s] if found.shortage is None else []
    try:
        mine = make_plan(profile, cluster, options).best.step_s
    except PlanError:
        mine = float("inf")
    assert mine == pytest.approx(min(steps), rel=1e-9)


def whole_of(candidate: Candidate, problem: Problem) -> Plan:
    """A candidate as a plan that does not recompute."""
    return problem.plan(Found(0.0, candidate, (Savings(),) * len(candidate.groups)))


@pytest.mark.parametrize("seed", range(10))
def test_a_candidate_is_priced_as_its_plan_is_estimated(seed: int) -> None:
    draw = random.Random(seed)
    profile, cluster = random_profile(draw, 4), random_cluster(draw, 3)
    problem = Problem(Costs(profile, cluster), random_options(draw, wide=False))
    (setting,) = problem.settings()
    for candidate in list(every_candidate(problem.costs, setting))[::17]:
        priced = price(candidate, problem.estimator(setting))
        if priced is not None:
            assert estimate(problem.plan(priced), problem.costs).step_s == pytest.approx(priced.step_s, rel=1e-12)


def test_equal_devices_are_tried_once() -> None:
    """Four twins: a stage gets one, two, three or four of them, and it does not matter which."""
    costs = Costs(chain((1.0, 1.0)), make_cluster(4))
    space = subsets(costs, costs.cluster.device_ids)
    assert [len(group) for group, _ in space.groups(space.start)] == [1, 2, 3, 4]


def test_runs_hand_out_neighbours_from_the_end() -> None:
    ids = make_cluster(4).device_ids
    space = runs(ids, (1, 2))
    assert [[str(id) for id in group] for group, _ in space.groups(1)] == [["0:2"], ["0:1", "0:2"]]


def test_leaders_keep_the_best_of_each_shape() -> None:
    profile = chain((1.0, 2.0, 3.0))
    problem = Problem(
        Costs(profile, make_cluster(2, device=Device(kind="cpu", memory_bytes=GIB))), PlanOptions(batch=8)
    )
    leaders = Leaders(most=2)
    for setting in problem.settings():
        search_exactly(
            problem.estimator(setting), problem.cuts, subsets(problem.costs, problem.costs.cluster.device_ids), leaders
        )
    shapes = [found.candidate.sizes for found in leaders.found]
    assert len(leaders.found) == 2
    assert leaders.found[0].step_s <= leaders.found[1].step_s
    assert shapes[0] == (2,)  # nothing to reduce and nothing to carry: data parallelism


def test_memory_decides_where_weights_may_lie() -> None:
    """Layer b needs 3 GiB of weights, gradients and momentum: only the large device can hold it."""
    profile = chain((1.0, 1.0, 1.0), weights=(0, GIB, 0))
    small, large = (Device(kind="cpu", memory_bytes=size) for size in (GIB, 4 * GIB))
    cluster = make_cluster(3, device=small)
    host = replace(cluster.hosts[0], devices=(small, large, small))
    found = make_plan(profile, replace(cluster, hosts=(host,)), PlanOptions(batch=8))
    holder = next(stage for stage in found.best.plan.stages if "b" in stage.layers)
    assert [str(id) for id in holder.devices] == ["0:1"]
    assert found.data_parallel is None
    assert "layers a … c need 4.0 GiB on 0:2, which has 1.0 GiB" in found.why_no_data_parallel


def test_layers_that_share_weights_stay_together() -> None:
    profile = chain((1.0,) * 4, weights=(300 * MIB,) * 4)
    tied = tuple(replace(layer, cuttable=layer.name != "c") for layer in profile.layers)
    cluster = make_cluster(4, device=Device(kind="cpu", memory_bytes=64 * GIB), bytes_per_s=1e8)
    found = make_plan(replace(profile, layers=tied), cluster, PlanOptions(batch=8))
    assert len(found.best.plan.stages) > 1
    assert all(stage.layers[0] != "c" for stage in found.best.plan.stages)
