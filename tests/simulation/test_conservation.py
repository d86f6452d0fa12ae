"""What holds for every schedule: nothing is computed twice at once, no link overflows, no byte is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.cluster import Cluster
from stagewright.errors import SimulationError
from stagewright.plan import POLICIES, Plan, Policy
from stagewright.profile import Profile
from stagewright.schedule import RECEIVES, SENDS, Schedule, parse_order
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate
from stagewright.simulation.critical import Path
from stagewright.simulation.engine import Engine
from stagewright.simulation.memory import Ledger
from stagewright.simulation.program import make_program
from tests.simulation.cases import layer, length, plan, profile, run, star, used

SLACK = 1 + 1e-9


@st.composite
def settings_of_a_run(
    draw: st.DrawFn, synchronous: bool = False, policies: tuple[Policy, ...] = ("gpipe", "1f1b", "zero-bubble")
) -> tuple[Plan, Profile, Cluster]:
    """Up to three stages of up to three replicas, uneven layers, uneven links, every order and route."""
    replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    stages = len(replicas)
    policy = draw(st.sampled_from(policies))
    is_stale = not synchronous and policy in ("1f1b", "dynamic") and draw(st.booleans())
    made = plan(
        replicas,
        draw(st.integers(1, 6)),
        batch=draw(st.integers(12, 20)),
        versions=[stages - number for number in range(stages)] if is_stale else None,
        policy=policy,
        route=draw(st.sampled_from(["split", "rotate"])),
        num_buckets=draw(st.integers(1, 3)),
        recompute=draw(st.booleans()) and policy != "zero-bubble",
    )
    seconds = st.sampled_from([0.25, 0.5, 1.0, 3.0])
    sizes = st.sampled_from([0.0, 1.0, 7.0])
    layers = [
        layer(
            f"l{number}",
            draw(seconds),
            draw(seconds),
            output_bytes=draw(sizes),
            saved_bytes=draw(sizes),
            workspace_bytes=draw(sizes),
            parameter_bytes=draw(st.integers(0, 40)),
        )
        for number in range(stages)
    ]
    rates = [draw(st.sampled_from([1.0, 5.0, 20.0])) for _ in made.devices]
    latency_s = draw(st.sampled_from([0.0, 0.1]))
    return made, profile(*layers, optimizer_s=0.5), star(*rates, latency_s=latency_s)


@settings(max_examples=60, deadline=None)
@given(settings_of_a_run())
def test_no_device_computes_two_things_at_once(case):
    _, log = run(*case, num_batches=3)
    for entries in log.done:
        assert all(later.start_s >= earlier.stop_s for earlier, later in zip(entries, entries[1:]))


@settings(max_examples=60, deadline=None)
@given(settings_of_a_run(policies=POLICIES))
def test_no_link_ever_carries_more_than_its_rate(case):
    made, figures, cluster = case
    engine = Engine(make_program(make_schedule(made), figures, cluster), 2)
    settle, rates = engine.traffic.settle, engine.traffic.rates

    def watched(now_s: float) -> None:
        settle(now_s)
        assert all(have <= rate * SLACK for have, rate in zip(used(engine.traffic), rates))

    engine.traffic.settle = watched  # type: ignore[method-assign]
    engine.run()
    assert not any(used(engine.traffic))


@settings(max_examples=60, deadline=None)
@given(settings_of_a_run(policies=POLICIES))
def test_every_byte_that_is_sent_arrives(case):
    made, figures, _ = case
    program, log = run(*case, num_batches=2)
    rows = sum(figures.layers[stage].output_bytes * made.batch for stage in range(len(made.stages) - 1))
    assert sum(moved.op.num_bytes for moved in log.moved) == pytest.approx(2 * 2 * rows)
    listed = [pair for order, ops in zip(program.orders, program.ops) for pair in zip(order, ops)]
    sends = sum(op.num_bytes for action, op in listed if action.kind in SENDS)
    receipts = sum(op.num_bytes for action, op in listed if action.kind in RECEIVES)
    assert sends == pytest.approx(receipts)


@settings(max_examples=60, deadline=None)
@given(settings_of_a_run(policies=POLICIES))
def test_memory_returns_to_its_start_after_a_flush(case):
    program, log = run(*case, num_batches=3)
    ledger = Ledger(program, log)
    for worker in range(len(program.ops)):
        use = ledger.use(worker)
        assert all(abs(column[0] - column[-1]) <= 1 for column in use.parts.values())
        assert min(min(column) for column in use.parts.values()) >= 0
        assert use.peak_bytes + 1 >= max(sum(column) for column in zip(*use.parts.values()))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(settings_of_a_run(synchronous=True), st.sampled_from([1.5, 2.0, 10.0]))
def test_faster_links_everywhere_never_make_a_synchronous_step_longer(case, factor):
    made, figures, cluster = case
    host = cluster.hosts[0]
    links = tuple(replace(link, bytes_per_s=link.bytes_per_s * factor) for link in host.links)
    faster = replace(cluster, hosts=(replace(host, links=links),))
    assert length(run(made, figures, faster)[1]) <= length(run(made, figures, cluster)[1]) * SLACK


@settings(max_examples=50, deadline=None, derandomize=True)
@given(settings_of_a_run(synchronous=True), st.sampled_from([1.5, 2.0, 10.0]))
def test_faster_devices_and_links_never_make_a_synchronous_step_longer(case, factor):
    made, figures, cluster = case
    host = cluster.hosts[0]
    devices = tuple(replace(device, speed=factor) for device in host.devices)
    links = tuple(replace(link, bytes_per_s=link.bytes_per_s * factor) for link in host.links)
    faster = replace(cluster, hosts=(replace(host, devices=devices, links=links),))
    assert length(run(made, figures, faster)[1]) <= length(run(made, figures, cluster)[1]) * SLACK


@settings(max_examples=50, deadline=None)
@given(settings_of_a_run(synchronous=True), st.integers(0, 8), st.sampled_from([1.5, 2.0, 10.0]))
def test_one_faster_device_never_makes_a_step_longer_where_links_are_free(case, which, factor):
    made, figures, cluster = case
    links = tuple(replace(link, bytes_per_s=1e30) for link in cluster.hosts[0].links)
    free = replace(cluster, hosts=(replace(cluster.hosts[0], links=links),))
    assert (
        length(run(made, figures, faster_device(free, which, factor))[1]) <= length(run(made, figures, free)[1]) * SLACK
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(settings_of_a_run(synchronous=True), st.integers(0, 8), st.sampled_from([1.5, 2.0, 10.0]))
def test_one_faster_device_costs_a_few_percent_at_most_where_links_are_shared(case, which, factor):
    # The exception: it sends earlier, and then takes half of a link from a transfer that everyone waits for.
    made, figures, cluster = case
    faster = faster_device(cluster, which, factor)
    assert length(run(made, figures, faster)[1]) <= length(run(made, figures, cluster)[1]) * 1.05


def faster_device(cluster: Cluster, which: int, factor: float) -> Cluster:
    """The cluster with one of its devices made faster."""
    host = cluster.hosts[0]
    number = which % len(host.devices)
    devices = tuple(replace(d, speed=factor) if n == number else d for n, d in enumerate(host.devices))
    return replace(cluster, hosts=(replace(host, devices=devices),))


def two_stage_schedule(first: str, second: str) -> Schedule:
    return Schedule(plan=plan([1, 1], 2), orders=(parse_order(first), parse_order(second)))


def test_a_schedule_that_waits_for_ever_is_named():
    made = two_stage_schedule("F0.0 F0.1 RB1.0<1 B0.0 RB1.1<1 B0.1 U0", "RF0.0<0 F1.0 B1.0 U1")
    figures = profile(layer("l0", output_bytes=1.0), layer("l1"))
    with pytest.raises(SimulationError, match=r"worker 0 waits for ever before B0.0 of batch 0"):
        simulate(made, figures, star(1.0, 1.0), num_batches=1)


def test_ends_that_disagree_are_named():
    made = two_stage_schedule("F0.0 SF0.0>1 F0.1 SF0.1>1 U0", "RF0.1<0 RF0.0<0 F1.0 F1.1 U1")
    figures = profile(layer("l0", output_bytes=1.0), layer("l1"))
    with pytest.raises(SimulationError, match=r"worker 0 sends SF0.0>1 of batch 0 while worker 1 receives"):
        simulate(made, figures, star(1.0, 1.0), num_batches=1)


def test_a_plan_of_another_model_is_refused():
    with pytest.raises(SimulationError, match="the plan has l0 where the profile has x"):
        simulate(make_schedule(plan([1])), profile(layer("x")), star(1.0))


@settings(max_examples=80, deadline=None)
@given(settings_of_a_run(policies=POLICIES))
def test_the_critical_path_accounts_for_the_time(case):
    # Every moment of the run belongs to an action, a transfer or a reduction that something later waited for.
    program, log = run(*case, num_batches=2)
    path = Path(program, log, 0.0, length(log))
    assert sum(path.seconds.values()) == pytest.approx(length(log), rel=1e-6)


def test_a_first_stage_that_runs_ahead_leaves_the_causes_of_others_alone():
    # Found by the test above: forward of the second batch took the landing that the next stage had waited for.
    plans = plan([1, 1], versions=(2, 1), policy="dynamic")
    program, log = run(plans, profile(layer("l0", output_bytes=0.0), layer("l1")), star(1.0, 1.0), num_batches=2)
    first = next(entry for entry in log.done[1])
    assert first.cause == ("transfer", 0)
    assert sum(Path(program, log, 0.0, length(log)).seconds.values()) == pytest.approx(length(log))


def test_transfers_of_one_channel_run_one_after_the_other():
    # Both receipts are issued at once and the sends come a second apart, but the wire takes ten seconds for each.
    made = two_stage_schedule(
        "F0.0 SF0.0>1 F0.1 SF0.1>1 RB1.0<1 B0.0 RB1.1<1 B0.1 U0",
        "RF0.0<0 RF0.1<0 F1.0 B1.0 SB1.0>0 F1.1 B1.1 SB1.1>0 U1",
    )
    figures = profile(layer("l0", output_bytes=10.0), layer("l1"))
    log = Engine(make_program(made, figures, star(1.0, 1.0)), 1).run()
    forward = [(moved.start_s, moved.stop_s) for moved in log.moved if moved.sent.stage == 0]
    assert forward == [(1.0, 11.0), (11.0, 21.0)]
