"""Plans that do the same are the same: one form for fields without effect."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from stagewright.cluster import Device, make_cluster, parse_placement
from stagewright.cost import Costs
from stagewright.plan import Plan, Route, Stage
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.planning.estimate import estimate
from stagewright.planning.fixed import normal_form
from stagewright.planning.search import make_plan
from stagewright.scheduling import make_schedule
from tests.planning.cases import GIB, MIB, chain

PROFILE = chain((1.0, 1.0, 2.0), weights=(MIB, 64 * MIB, 64 * MIB), outputs=(1e6, 1e6, 0.0))
CLUSTER = make_cluster(4, device=Device(kind="cpu", memory_bytes=64 * GIB), bytes_per_s=1e9)
LAYERS = {1: (("a", "b", "c"),), 2: (("a", "b"), ("c",)), 3: (("a",), ("b",), ("c",))}


def plan_of(placement: str, *, route: Route = "split", buckets: int = 4, weights: bool = True) -> Plan:
    groups = parse_placement(placement, CLUSTER)
    stages = tuple(
        Stage(layers=names, devices=ids, num_buckets=buckets, row_weights=(2.0,) * len(ids) if weights else None)
        for names, ids in zip(LAYERS[len(groups)], groups)
    )
    return Plan(model="chain", stages=stages, batch=8, num_microbatches=4, route=route)


def test_a_lone_replica_has_one_bucket_and_no_weights() -> None:
    plan = normal_form(plan_of("0:0-2.0:3"))
    assert [stage.num_buckets for stage in plan.stages] == [4, 1]
    assert [stage.row_weights for stage in plan.stages] == [None, None]


def test_fields_that_matter_stay() -> None:
    uneven = replace(plan_of("0:0-1.0:2-3").stages[0], row_weights=(1.0, 2.0))
    plan = plan_of("0:0-1.0:2-3", route="rotate", weights=False)
    assert normal_form(plan) == plan
    mixed = plan_of("0:0-1.0:2-3", weights=False)
    mixed = replace(mixed, stages=(uneven, mixed.stages[1]))
    assert normal_form(mixed) == mixed


def test_weights_matter_only_where_rows_are_split() -> None:
    split = plan_of("0:0-1.0:2-3", weights=False)
    uneven = replace(split, stages=tuple(replace(stage, row_weights=(1.0, 2.0)) for stage in split.stages))
    turned = normal_form(replace(uneven, route="rotate"))
    assert [stage.row_weights for stage in turned.stages] == [None, None]


def test_stages_of_one_replica_have_one_route() -> None:
    assert normal_form(plan_of("0:0.0:1", route="rotate")).route == "split"


@pytest.mark.parametrize("placement", ["0:0", "0:0.0:1", "0:0-2.0:3", "0:0.0:1-2.0:3", "0:0-3"])
def test_the_normal_form_does_the_same(placement: str) -> None:
    costs = Costs(PROFILE, CLUSTER)
    for route, buckets, weights in product(("split", "rotate"), (1, 5), (False, True)):
        plan = plan_of(placement, route=route, buckets=buckets, weights=weights)  # type: ignore[arg-type]
        form = normal_form(plan)
        assert make_schedule(form).orders == make_schedule(plan).orders
        assert estimate(form, costs).step_s == estimate(plan, costs).step_s
        assert normal_form(form) == form


def test_buckets_that_a_person_gives_go_to_replicated_stages_only() -> None:
    options = PlanOptions(batch=8, placement="0:0-2.0:3", cut=("c",), num_buckets=6)
    assert [stage.num_buckets for stage in fixed_plan(PROFILE, options, CLUSTER).stages] == [6, 1]
    assert [stage.num_buckets for stage in make_plan(PROFILE, CLUSTER, options).best.plan.stages] == [6, 1]


def test_two_ways_to_say_a_plan_make_one() -> None:
    """What the rehearsal's table would show twice."""
    wishes = [PlanOptions(batch=8, placement="0:0.0:1", num_buckets=count, route=route)
              for count in (None, 3) for route in ("split", "rotate")]  # fmt: skip
    assert len({fixed_plan(PROFILE, options, CLUSTER) for options in wishes}) == 1
