"""A plan that is given in every part: what ratios, cuts, placements and batches mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.cluster import Cluster, Device, Host, make_cluster
from stagewright.errors import PlacementError, PlanError, UsageError
from stagewright.planning import LayerTable, PlanOptions, fixed_plan, table_of
from stagewright.planning.fixed import _cut_by_names, cut_by_ratio
from tests.planning.cases import MIB, chain

TABLE = LayerTable(
    model="m", names=tuple("abcdef"), flops=(4.0, 4.0, 2.0, 2.0, 2.0, 4.0), parameter_bytes=(0, 0, 0, 0, 50 * MIB, 9)
)


@pytest.mark.parametrize(
    ("ratio", "stages"),
    [
        ("2:1", ["abcd", "ef"]),  #  12 : 6 exactly
        ("1:1", ["ab", "cdef"]),  # 8 : 10 and 10 : 8 miss by as much: the earlier cut
        ("1:100", ["a", "bcdef"]),  # every stage keeps a layer
        ("1:1:1", ["a", "bcd", "ef"]),
    ],
)
def test_a_ratio_cuts_where_the_costs_come_closest(ratio: str, stages: list[str]) -> None:
    cuts = cut_by_ratio(TABLE.flops, tuple(float(part) for part in ratio.split(":")))
    edges = (0, *cuts, 6)
    found = ["abcdef"[low:high] for low, high in zip(edges, edges[1:])]
    assert found == stages


@given(
    costs=st.lists(st.floats(0.01, 100), min_size=1, max_size=30),
    shares=st.lists(st.floats(0.1, 10), max_size=6, min_size=1),
)
def test_a_ratio_gives_every_stage_a_layer_and_keeps_the_order(costs: list[float], shares: list[float]) -> None:
    if len(shares) > len(costs):
        with pytest.raises(PlanError, match="cannot be cut into"):
            cut_by_ratio(costs, shares)
        return
    cuts = cut_by_ratio(costs, shares)
    assert len(cuts) == len(shares) - 1
    assert list(cuts) == sorted(set(cuts))
    assert all(0 < cut < len(costs) for cut in cuts)


def test_a_ratio_is_of_time_flops_params_or_layers() -> None:
    profile = chain((8.0, 1.0, 1.0, 8.0), weights=(1, 1, 1, 97))

    def first_stage(of: str) -> int:
        options = PlanOptions(batch=8, placement="0:0.0:1", ratio="1:1", ratio_of=of)  # type: ignore[arg-type]
        return len(fixed_plan(profile, options).stages[0].layers)

    assert (first_stage("time"), first_stage("params"), first_stage("layers")) == (2, 3, 2)


def test_time_without_a_profile_goes_with_flops() -> None:
    assert TABLE.costs("time") == TABLE.flops
    assert table_of(chain((1.0, 2.0))).costs("time") == pytest.approx((1.0, 2.0))


def test_without_a_ratio_stages_get_work_in_proportion_to_their_devices() -> None:
    profile = chain((1.0,) * 8)
    assert [len(s.layers) for s in fixed_plan(profile, PlanOptions(batch=8, placement="0:0-6.0:7")).stages] == [7, 1]


def test_a_cut_begins_a_stage_at_the_named_layer() -> None:
    plan = fixed_plan(TABLE, PlanOptions(batch=8, placement="0:0-1.0:2.0:3", cut=("c", "f")))
    assert [stage.layers for stage in plan.stages] == [("a", "b"), ("c", "d", "e"), ("f",)]
    assert plan.placement == "0:0-1.0:2.0:3"


def test_an_empty_placement_is_data_parallelism() -> None:
    plan = fixed_plan(TABLE, PlanOptions(batch=8), make_cluster(4))
    assert (plan.placement, plan.replicas) == ("0:0-3", (4,))


def test_the_batch_per_device_is_that_of_the_first_stage() -> None:
    assert fixed_plan(TABLE, PlanOptions(batch_per_device=32, placement="0:0-6.0:7")).batch == 224


def test_only_replicated_stages_are_reduced_and_in_buckets() -> None:
    table = LayerTable(model="m", names=("a", "b"), flops=(1.0, 1.0), parameter_bytes=(40 * MIB, 400 * MIB))
    plan = fixed_plan(table, PlanOptions(batch=8, placement="0:0-6.0:7"))
    assert [stage.num_buckets for stage in plan.stages] == [8, 1]


def test_rows_go_with_speed_on_mixed_devices() -> None:
    kinds = tuple(Device(kind="cpu", memory_bytes=1, speed=speed) for speed in (1.0, 1.0, 2.0))
    plan = fixed_plan(TABLE, PlanOptions(batch=8), Cluster(name="mixed", hosts=(Host(devices=kinds),)))
    assert plan.stages[0].row_weights == (1.0, 1.0, 2.0)
    assert [share.stop - share.start for share in plan.shares(0, 0)] == [2, 2, 4]


def test_staleness_hold_and_the_rest_reach_the_plan() -> None:
    options = PlanOptions(
        batch=8, placement="0:0-1.0:2", staleness="ssp", hold=1, policy="gpipe", route="rotate", num_microbatches=4
    )
    plan = fixed_plan(TABLE, options)
    assert (plan.versions, plan.hold, plan.policy, plan.route, plan.num_microbatches) == (
        (2, 1),
        1,
        "gpipe",
        "rotate",
        4,
    )


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"batch": 0}, UsageError, "--batch is 0"),
        ({}, UsageError, "the batch is not given"),
        ({"batch": 8, "batch_per_device": 1}, UsageError, "both given"),
        ({"batch": 8, "ratio": "1:2", "cut": ("b",)}, UsageError, "both say where to cut"),
        ({"batch": 8, "placement": "0:0.0:1", "ratio": "1:2:3"}, UsageError, "3 stages, but the placement has 2"),
        ({"batch": 8, "placement": "0:0.0:1", "ratio": "1:0"}, PlacementError, "positive numbers"),
        ({"batch": 8, "placement": "0:0.0:1", "cut": ("nope",)}, UsageError, "no such layer"),
        ({"batch": 8, "placement": "0:0.0:1", "cut": ("a",)}, UsageError, "the first layer"),
        ({"batch": 8, "placement": "0:0.0:1.0:2", "cut": ("d", "b")}, UsageError, "in the model's order"),
        ({"batch": 8, "placement": "0:0.0:1", "num_microbatches": 9}, PlanError, "9, but the batch has 8 rows"),
        ({"batch": 8, "placement": "0:0.0:1", "policy": "fast"}, UsageError, "--schedule is 'fast'"),
        ({"batch": 8, "placement": "0:0.0:1", "hold": 0}, UsageError, "--hold is 0"),
    ],
)
def test_what_means_nothing_is_refused(wrong: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fixed_plan(TABLE, PlanOptions(**wrong), make_cluster(3))  # type: ignore[arg-type]


def test_costs_of_zero_have_no_ratio() -> None:
    with pytest.raises(PlanError, match="all zero"):
        cut_by_ratio((0.0, 0.0), (1.0, 1.0))
    assert _cut_by_names("abc", ["c"]) == (2,)
