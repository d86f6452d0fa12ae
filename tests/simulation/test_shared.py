"""Hosts that share cores: what computes at the same time slows down, and so does what sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.cluster import Cluster, Device, Host, Link
from stagewright.cost import Costs
from stagewright.plan import Plan, Policy, Stage
from stagewright.profile import LayerProfile, Profile
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate
from stagewright.simulation.engine import pieces


def hosts(
    count: int, cores: float | None, *, share: float | None = None, spent: float = 0.0, rate: float = 1e9
) -> Cluster:
    """Hosts of one device each on one switch."""
    host = Host(
        devices=(Device(kind="cpu", memory_bytes=1 << 40),),
        links=(Link(ends=("0", "nic"), kind="local", bytes_per_s=1e12),),
        cpu_share=share,
    )
    links = tuple(Link(ends=(f"{n}:nic", "net"), kind="NET", bytes_per_s=rate) for n in range(count))
    return Cluster(name="hosts", hosts=(host,) * count, links=links, cores=cores, core_s_per_byte=spent)


def profile(parameter_bytes: int = 0, output_bytes: float = 0.0) -> Profile:
    """Two layers: a row takes 1 s forward and 2 s backward in each."""
    layers = tuple(
        LayerProfile(
            name=name, forward_s=(1.0,), backward_s=(2.0,), output_bytes=output_bytes, saved_bytes=0,
            parameter_bytes=parameter_bytes,
        )
        for name in ("body", "loss")
    )  # fmt: skip
    return Profile(model="two", device="cpu", source="measured", batch_sizes=(1,), layers=layers)


def data_parallel(cluster: Cluster, *, num_buckets: int = 1) -> Plan:
    """A row for each device."""
    stage = Stage(layers=("body", "loss"), devices=cluster.device_ids, num_buckets=num_buckets)
    return Plan(model="two", stages=(stage,), batch=len(cluster.device_ids))


def two_stages(cluster: Cluster, *, policy: Policy = "1f1b") -> Plan:
    """One stage on each of the first two devices, two microbatches of one row."""
    body, loss = (
        Stage(layers=(name,), devices=(id,)) for name, id in zip(("body", "loss"), cluster.device_ids, strict=True)
    )
    return Plan(model="two", stages=(body, loss), batch=2, num_microbatches=2, policy=policy)


def step_s(plan: Plan, cluster: Cluster, of: Profile) -> float:
    return simulate(make_schedule(plan), of, cluster).median_step_s


@pytest.mark.parametrize(("cores", "expected"), [(None, 6.0), (4.0, 6.0), (2.0, 12.0), (1.0, 24.0)])
def test_four_workers_on_fewer_cores_share_them_evenly(cores: float | None, expected: float) -> None:
    cluster = hosts(4, cores)
    assert step_s(data_parallel(cluster), cluster, profile()) == pytest.approx(expected)


@pytest.mark.parametrize(("count", "expected"), [(2, 6.0), (3, 9.0), (4, 12.0), (8, 24.0)])
def test_planner_and_simulator_have_one_formula_for_shared_cores(count: int, expected: float) -> None:
    cluster = hosts(count, 2.0)
    assert step_s(data_parallel(cluster), cluster, profile()) == pytest.approx(expected)
    speed = Costs(profile(), cluster).speed(cluster.device_ids[0], cluster.device_ids)
    assert 6.0 / speed == pytest.approx(expected)


@pytest.mark.parametrize("policy", ["1f1b", "dynamic"])
@pytest.mark.parametrize(("cores", "expected"), [(2.0, 9.0), (1.0, 12.0)])
def test_a_worker_alone_gets_the_whole_core(policy: Policy, cores: float, expected: float) -> None:
    # 1f1b   0 │ F0 F1 ·· B0 ·· B1      on two cores 9 s; on one, the 12 s of work are done one after the other,
    #        1 │ ·· F0 B0 F1 B1         whichever worker does them
    cluster = hosts(2, cores)
    assert step_s(two_stages(cluster, policy=policy), cluster, profile()) == pytest.approx(expected)


def test_a_host_gets_no_more_than_its_share_and_the_profile_already_knows_it() -> None:
    cluster = hosts(4, 2.0, share=0.5)
    assert step_s(data_parallel(cluster), cluster, profile()) == pytest.approx(6.0)


def test_moving_bytes_takes_cores_from_those_who_compute() -> None:
    # 6 s of compute on a core each, then a ring of 2 workers that sends 1e9 bytes each way: 1 s on the wires; the cores
    # need 2 ends × 2 directions × 1e9 bytes × 1 ns = 4 core-seconds for it, 2 s of both.
    fast = hosts(2, 2.0, rate=1e9)
    plan, of = data_parallel(fast), profile(parameter_bytes=500_000_000)
    assert step_s(plan, fast, of) == pytest.approx(6.0 + 1.0)
    costly = replace(fast, core_s_per_byte=1e-9)
    assert step_s(plan, costly, of) == pytest.approx(6.0 + 2.0)


def test_buckets_are_ready_while_backward_runs_at_half_speed() -> None:
    # On one core the step's 12 s of compute take 12 s; the first bucket's 2 s on the wires hide behind the last layer's
    # backward, the second one's follow.
    cluster = hosts(2, 1.0, rate=0.5e9)
    of = profile(parameter_bytes=1_000_000_000)
    whole = step_s(data_parallel(cluster), cluster, of)
    cut = step_s(data_parallel(cluster, num_buckets=2), cluster, of)
    assert whole == pytest.approx(12.0 + 4.0)
    assert cut == pytest.approx(12.0 + 2.0)


def test_hosts_with_a_share_of_a_core_reduce_and_compute_in_turns() -> None:
    """The first of two buckets, a second on the wire, is ready in the middle of 4 s of backward: 0.4 s of it hide."""
    small = profile(parameter_bytes=10**9)
    free, limited = (hosts(2, 2.0, share=share, spent=1e-12) for share in (None, 1.0))
    assert step_s(data_parallel(free, num_buckets=2), free, small) == pytest.approx(7.0, rel=0.01)
    assert step_s(data_parallel(limited, num_buckets=2), limited, small) == pytest.approx(7.6, rel=0.01)


def test_an_op_is_cut_where_buckets_are_ready() -> None:
    assert pieces(()) == [(1.0, -1)]
    assert pieces((0.25, 1.0)) == [(0.25, 0), (0.75, 1)]
    assert pieces((0.5, 0.5)) == [(0.5, 0), (0.0, 1), (0.5, -1)]


def test_what_the_cpu_limits_is_named() -> None:
    cluster = hosts(2, 2.0, spent=1e-6, rate=1e12)
    record = simulate(make_schedule(two_stages(cluster)), profile(output_bytes=10_000_000), cluster)
    assert "by the CPU" in record.limit
