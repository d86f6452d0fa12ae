"""The formulas: seconds and bytes of layers, rings, trees and stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.cluster import Cluster, Device, DeviceId, Host, Link, find_cluster, make_cluster
from stagewright.cost import (
    Costs,
    Handled,
    _interpolate,
    handled_by_each,
    num_buckets,
)
from stagewright.memory import crossings
from stagewright.network import Network
from stagewright.profile import LayerProfile
from tests.simulation.cases import even_profile, layer, profile, star


def ids(count: int) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(0, number) for number in range(count))


@pytest.mark.parametrize(("rows", "seconds"), [(0, 0.0), (5, 2.0), (10, 3.0), (15, 4.0), (20, 5.0), (40, 9.0)])
def test_seconds_lie_on_the_lines_between_and_beyond_the_measured_sizes(rows, seconds):
    assert _interpolate((10, 20), (3.0, 5.0), rows) == pytest.approx(seconds)


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.5), (2, 1.0), (4, 5.0), (8, 13.0)])
def test_below_the_smallest_size_seconds_do_not_fall_faster_than_rows(rows, seconds):
    # The line through 2 and 8 rows meets zero at 1.5 rows.
    assert _interpolate((2, 8), (1.0, 13.0), rows) == pytest.approx(seconds)


def test_one_measured_size_means_proportion():
    assert _interpolate((10,), (3.0,), 25) == pytest.approx(7.5)


@pytest.mark.parametrize(("rows", "seconds"), [(15, 4.0), (20, 3.0), (40, 3.0)])
def test_beyond_the_largest_measured_size_time_never_falls(rows: float, seconds: float):
    """A library may take a faster way for twenty rows than for ten; for forty it is not faster still."""
    assert _interpolate((10, 20), (5.0, 3.0), rows) == pytest.approx(seconds)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.integers(1, 9), st.data())
def test_prefix_sums_are_sums(seconds, rows, data):
    costs = Costs(profile(*(layer(f"l{n}", value, 2 * value) for n, value in enumerate(seconds))), make_cluster(1))
    first = data.draw(st.integers(0, len(seconds)))
    last = data.draw(st.integers(first, len(seconds)))
    assert costs.seconds(first, last, rows).forward == pytest.approx(rows * sum(seconds[first:last]), abs=1e-9)
    assert costs.seconds(first, last, rows, 2.0).backward == pytest.approx(rows * sum(seconds[first:last]), abs=1e-9)


def test_recomputing_adds_a_forward_to_backward():
    costs = Costs(even_profile(2), make_cluster(1))
    assert costs.seconds(0, 2, 1, recompute=True).backward == pytest.approx(2 * (2.0 + 1.0))


def test_a_linear_layer_folds_while_its_rows_take_half_of_its_weights():
    # 10 s for the weights whatever the rows, half of it for their gradient; 20 bytes of rows for 100 of weights.
    fixed = {"kind": "matmul", "saved_bytes": 1.0, "output_bytes": 1.0, "parameter_bytes": 100, "weight_share": 0.5}
    wide = LayerProfile(name="l0", forward_s=(1.0, 1.0), backward_s=(10.0, 10.0), **fixed)
    costs = Costs(replace(profile(layer("l0")), batch_sizes=(1, 64), layers=(wide,)), make_cluster(1))
    assert costs.seconds(0, 1, rows=10).backward == 10.0
    assert costs.seconds(0, 1, rows=10, handled=Handled(8)).backward == pytest.approx(5.0 + 5.0 / 2)
    assert costs.seconds(0, 1, rows=5, handled=Handled(8)).backward == pytest.approx(5.0 + 5.0 / 5)
    assert costs.seconds(0, 1, rows=5, handled=Handled(3)).backward == pytest.approx(5.0 + 5.0 / 3)
    assert costs.seconds(0, 1, rows=40, handled=Handled(8)).backward == 10.0
    assert costs.seconds(0, 1, rows=5, handled=Handled(3)).kept == pytest.approx(5.0 / 3), "until the batch's last"
    assert costs.seconds(0, 1, rows=5, handled=Handled(8)).kept == 0.0, "not of eight, for five are all that it keeps"
    assert costs.seconds(0, 1, rows=5, handled=Handled(3, folds=False)).kept == 0.0
    conv = replace(wide, kind="conv")
    plain = Costs(replace(profile(layer("l0")), batch_sizes=(1, 64), layers=(conv,)), make_cluster(1))
    assert plain.seconds(0, 1, rows=5, handled=Handled(8)).backward == 10.0


def test_the_weights_half_counts_as_it_was_measured():
    # Of 10 and 40 s for 1 and 4 rows, 1 and 35 s are the weights': folding two rows costs more than each alone.
    fixed = {"kind": "matmul", "saved_bytes": 1.0, "output_bytes": 1.0, "parameter_bytes": 100, "weight_share": 0.5}
    steep = LayerProfile(name="l1", forward_s=(1.0, 1.0), backward_s=(10.0, 40.0), weight_s=(1.0, 35.0), **fixed)
    before = replace(steep, name="l0", weight_s=())
    costs = Costs(replace(profile(layer("l0")), batch_sizes=(1, 4), layers=(before, steep)), make_cluster(1))
    assert costs.seconds(1, 2, rows=1, handled=Handled(1, folds=False)).weight == pytest.approx(1.0)
    assert costs.seconds(1, 2, rows=4, handled=Handled(1, folds=False)).weight == pytest.approx(35.0)
    two = (1.0 + (35.0 - 1.0) / 3) / 2
    assert costs.seconds(1, 2, rows=1, handled=Handled(2)).backward == pytest.approx(10.0 - 1.0 + two)
    # Beyond the largest size its line is steeper than backward's, of which it is a part all the same.
    assert (
        costs.seconds(1, 2, rows=400, handled=Handled(1, folds=False)).weight <= costs.seconds(1, 2, rows=400).backward
    )


def test_what_a_replica_handles_folds_unless_backward_is_in_halves():
    assert handled_by_each("1f1b", "split", 8, 3) == Handled(8, folds=True)
    assert handled_by_each("1f1b", "rotate", 8, 3) == Handled(3, folds=True)
    assert handled_by_each("zero-bubble", "split", 8, 3) == Handled(8, folds=False)


def adding_costs(kind: str) -> Costs:
    """Two layers of 3 and 1 parts of a step of 4 s; backward takes 10 s a layer, half of it for the weights."""
    layers = [
        replace(layer(name, 1.0, 10.0, parameter_bytes=size, output_bytes=1.0), kind=kind, weight_share=0.5)
        for name, size in (("l0", 30), ("l1", 10))
    ]
    return Costs(profile(*layers, optimizer_s=4.0), make_cluster(1))


def test_every_microbatch_but_a_batchs_first_adds_its_weight_gradients_to_those_before():
    costs = adding_costs("conv")
    two, many = Handled(2), Handled(100)
    assert 2 * costs.seconds(0, 1, rows=1, handled=two).backward == pytest.approx(2 * 10.0 + 0.6 * 3.0)
    assert 2 * costs.seconds(1, 2, rows=1, handled=two).backward == pytest.approx(2 * 10.0 + 0.6 * 1.0)
    assert costs.seconds(0, 2, 1, 2.0, handled=many).backward == pytest.approx((20.0 + 0.99 * 0.6 * 4.0) / 2)


@pytest.mark.parametrize("kind", ["conv", "matmul"])
@pytest.mark.parametrize("folds", [True, False])
def test_one_microbatch_adds_nothing(kind, folds):
    assert adding_costs(kind).seconds(0, 2, rows=1, handled=Handled(1, folds)).backward == pytest.approx(20.0)


def test_a_layer_that_folds_adds_inside_its_product():
    assert adding_costs("matmul").seconds(0, 2, rows=1, handled=Handled(4)).backward == pytest.approx(20.0)


def test_a_backward_in_halves_adds_in_the_weights_half():
    costs, halves = adding_costs("matmul"), Handled(2, folds=False)
    whole = costs.seconds(1, 2, rows=1, handled=halves).backward
    weight = costs.seconds(1, 2, rows=1, handled=halves).weight
    assert weight == pytest.approx(5.0 + 0.6 * 1.0 / 2)
    assert whole - weight == pytest.approx(5.0)


@pytest.mark.parametrize("recompute", [False, True])
def test_all_of_the_first_stages_backward_is_for_its_weights(recompute):
    costs = adding_costs("conv")
    whole = costs.seconds(0, 1, rows=1, recompute=recompute).backward
    assert costs.seconds(0, 1, rows=1, recompute=recompute).weight == whole == pytest.approx(10.0 + recompute)


def test_a_skip_connection_crosses_every_cut_that_it_spans():
    # a ─▶ b ─▶ c ─▶ d, and a ─▶ d beside it
    layers = [layer(name, output_bytes=size) for name, size in (("a", 1.0), ("b", 10.0), ("c", 100.0))]
    made = profile(*layers, replace(layer("d", output_bytes=5.0), inputs=("a", "c")))
    assert crossings(made) == (0.0, 1.0, 11.0, 101.0, 0.0)


def test_the_optimizer_step_is_shared_out_by_parameters_and_versions_cost_a_copy():
    layers = (layer("l0", parameter_bytes=30), layer("l1", parameter_bytes=10))
    costs = Costs(profile(*layers, optimizer_s=4.0), make_cluster(1))
    assert costs.optimizer_s(0, 1) == pytest.approx(3.0)
    assert costs.optimizer_s(0, 1, versions=2) == pytest.approx(3.0 * (1 + 0.4))


def test_buckets_are_ready_from_the_last_layer_to_the_first():
    # Backward: conv2 1 s and conv1 1 s hold 20 bytes each, fc 2 s holds 40.
    layers = [layer(n, 1, s, parameter_bytes=b) for n, s, b in (("conv1", 1, 20), ("conv2", 1, 20), ("fc", 2, 40))]
    costs = Costs(profile(*layers), make_cluster(1))
    assert costs.ready_shares(0, 3, 1, 2) == pytest.approx((0.5, 1.0))
    assert costs.ready_shares(0, 3, 1, 4) == pytest.approx((0.5, 0.5, 0.75, 1.0))
    assert costs.ready_shares(0, 3, 1, 1) == pytest.approx((1.0,))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_an_all_reduce_alone_is_a_ring_over_the_slowest_link(count):
    costs = Costs(even_profile(1), star(*[10.0] * (count - 1), 4.0))
    assert costs.reduce_s(1000, ids(count)) == pytest.approx(2 * (count - 1) / count * 1000 / 4.0)


def test_one_device_reduces_nothing():
    assert Costs(even_profile(1), star(1.0)).reduce_s(1000, ids(1)) == 0.0


def test_small_reductions_over_slow_wires_climb_a_tree():
    wires = Network(star(*[1e9] * 16, latency_s=1e-3))
    assert wires.collective(ids(16), 8).kind == "tree"
    assert wires.collective(ids(16), 1e9).kind == "ring"


def test_ring_edges_that_cross_one_link_in_one_direction_share_it():
    # Devices 0 and 2 on one switch, 1 and 3 on the other; any good ring crosses the bridge once in each direction.
    device = Device(kind="cpu", memory_bytes=1)
    links = [Link(ends=(str(n), f"s{n % 2}"), kind="PIX", bytes_per_s=10.0) for n in range(4)]
    bridge = Link(ends=("s0", "s1"), kind="SYS", bytes_per_s=5.0)
    cluster = Cluster(name="c", hosts=(Host(devices=(device,) * 4, links=(*links, bridge)),))
    wires = Network(cluster)
    assert wires.collective(ids(4), 1e6).bytes_per_s == 5.0
    assert [id.device % 2 for id in wires.ring_order(ids(4))] in ([0, 0, 1, 1], [0, 1, 1, 0])


def test_the_ring_over_nvlinks_uses_double_links_all_the_way_round():
    wires = Network(find_cluster("v100-sxm2-8x4"))
    order = wires.ring_order(ids(8))
    kinds = {
        wires.cluster.wires[link // 2].kind for a, b in zip(order, (*order[1:], order[0])) for link in wires.path(a, b)
    }
    assert kinds == {"NV2"}


def test_transfers_that_start_together_take_as_long_as_the_fullest_link():
    costs = Costs(even_profile(1), star(*[100.0] * 7, 10.0))
    moves = [(DeviceId(0, number), DeviceId(0, 7), 50.0) for number in range(7)]
    assert costs.network.exchange_s(moves) == pytest.approx(35.0)
    assert costs.network.exchange_s(moves[:1]) == pytest.approx(5.0)


def test_bytes_of_a_stage_by_kind():
    made = profile(
        layer("l0", output_bytes=3.0, saved_bytes=5.0, parameter_bytes=100, workspace_bytes=2.0),
        layer("l1", saved_bytes=1.0),
    )
    costs = Costs(made, make_cluster(2))
    device = Device(kind="cpu", memory_bytes=1 << 40, framework_bytes=7)
    found = costs.stage_bytes(0, 1, rows=10, held=3, versions=2, num_replicas=4, device=device)
    assert found._asdict() == {
        "weights": 100,
        "versions": 100,
        "gradients": 100,
        "optimizer": 100,
        "activations": 150,
        "buffers": 2 * 10 * 3 + 2 * 100,
        "workspace": 20,
        "framework": 7,
        "allocator": 0,
    }
    assert found.total == sum(found)


def test_buckets_are_several_and_of_sixteen_mebibytes_at_most():
    assert [num_buckets(size << 20) for size in (0, 1, 9, 16, 100, 129, 528)] == [1, 1, 4, 8, 8, 9, 33]


def test_devices_that_share_cores_are_slower_while_others_compute():
    cluster = replace(find_cluster("hosts-4"), cores=2.0)
    costs, all_four = Costs(even_profile(2), cluster), cluster.device_ids
    assert [costs.speed(id, all_four) for id in all_four] == [0.5] * 4
    assert [costs.speed(all_four[0], all_four[:number]) for number in (1, 2, 3)] == [1.0, 1.0, pytest.approx(2 / 3)]
    assert [costs.network.cores.share(all_four[:number]) for number in (1, 2, 3)] == [0.5, 1.0, 1.0]
    mixed = find_cluster("hosts-4-mixed")
    assert [Costs(even_profile(2), mixed).speed(id, mixed.device_ids) for id in mixed.device_ids] == [1.0] * 4


def test_a_transfer_between_hosts_that_share_cores_costs_both_ends():
    cluster = replace(find_cluster("hosts-4"), core_s_per_byte=1e-8)
    wires = Costs(even_profile(2), cluster).network
    first, second = cluster.device_ids[:2]
    # two cores move 2 / (2 · 10 ns) = 1e8 bytes/s, less than the link's 1.25e8
    assert wires.rate(first, second) == pytest.approx(1e8)
    assert wires.rate(first, first) == float("inf")
    four = wires.collective(cluster.device_ids, 1e9)
    assert four is not None
    assert four.bytes_per_s == pytest.approx(2 / (4 * 2 * 1e-8))


# The optimizer


def test_states_are_those_of_the_optimizer_and_only_what_is_trained_has_any():
    frozen = replace(layer("l0", parameter_bytes=30), trained_bytes={})
    mixed = replace(layer("l1", parameter_bytes=30), trained_bytes={"matrix": 10, "embedding": 10})
    plain = profile(frozen, mixed, optimizer_s=5.0)
    costs = Costs(plain, make_cluster(1))
    held = costs.stage_bytes(0, 2, rows=1, versions=3, num_replicas=2)
    assert (held.weights, held.versions, held.gradients, held.optimizer) == (60, 2 * 20, 20, 20)
    assert costs.gradient_bytes(0, 1) == 0
    assert costs.optimizer_s(0, 2) == pytest.approx(5.0)
    adamw = Costs(plain.with_states(lambda role: 2), make_cluster(1))
    assert adamw.stage_bytes(0, 2, rows=1).optimizer == 40
    assert adamw.optimizer_s(1, 2) == pytest.approx(7.0)  # seven passes over memory, where SGD with momentum has five
    muon = Costs(plain.with_states(lambda role: 1 if role == "matrix" else 2), make_cluster(1))
    assert muon.stage_bytes(0, 2, rows=1).optimizer == 30
