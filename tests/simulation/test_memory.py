"""Memory by kind: what is held, when, and that the planner's bound is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from stagewright.cost import Costs
from stagewright.memory import StageBytes
from stagewright.policy import holds
from stagewright.record import MEMORY_KINDS
from stagewright.simulation.memory import Ledger
from tests.simulation.cases import even_profile, layer, plan, profile, run, star
from tests.simulation.test_conservation import settings_of_a_run


def peaks(*case, num_batches=1):
    program, log = run(*case, num_batches=num_batches)
    return [Ledger(program, log).use(worker).peak_parts for worker in range(len(program.ops))]


def test_the_kinds_of_the_formula_are_those_of_records():
    assert StageBytes._fields == MEMORY_KINDS


@pytest.mark.parametrize(("policy", "held"), [("gpipe", [4, 4, 4]), ("1f1b", [3, 2, 1])])
def test_activations_held_by_each_stage(policy, held):
    found = peaks(plan([1, 1, 1], 4, policy=policy), even_profile(3, saved_bytes=10.0))
    assert [parts["activations"] for parts in found] == [10 * count for count in held]


def test_recomputing_keeps_inputs_and_one_microbatch_in_full():
    figures = replace(even_profile(1, saved_bytes=100.0), input_bytes=7.0)
    found = peaks(plan([1], 4, policy="gpipe", recompute=True), figures)
    assert found[0]["activations"] == 4 * 7 + 100


def test_weights_versions_gradients_states_and_flat_buckets():
    found = peaks(plan([2], versions=[3]), profile(layer("l0", parameter_bytes=100)), star(1e9, 1e9), num_batches=6)
    expected = {"weights": 100, "versions": 200, "optimizer": 100, "buffers": 3 * 100}
    assert {kind: found[0][kind] for kind in expected} == expected


def test_a_framework_that_keeps_more_than_needed_is_scaled():
    cluster = star(1.0)
    device = replace(cluster.hosts[0].devices[0], saved_factor=1.5, framework_bytes=1000)
    cluster = replace(cluster, hosts=(replace(cluster.hosts[0], devices=(device,)),))
    found = peaks(plan([1], batch=2), even_profile(1, saved_bytes=10.0), cluster)
    assert (found[0]["activations"], found[0]["framework"]) == (30, 1000)


@pytest.mark.parametrize(("sets_aside", "held"), [(False, 1), (True, 2)])
def test_a_framework_that_sets_memory_aside_has_room_for_every_batch_that_versions_allow(sets_aside, held):
    # With hold 1 one batch is under way at a time, though K = 2 would allow two.
    cluster = star(1e9, 1e9)
    device = replace(cluster.hosts[0].devices[0], sets_aside=sets_aside)
    cluster = replace(cluster, hosts=(replace(cluster.hosts[0], devices=(device,) * 2),))
    found = peaks(plan([1, 1], versions=[2, 1], hold=1), even_profile(2, saved_bytes=10.0), cluster, num_batches=4)
    assert [parts["activations"] for parts in found] == [10 * held, 10]


@settings(max_examples=80, deadline=None)
@given(settings_of_a_run(policies=("gpipe", "1f1b", "zero-bubble", "dynamic")))
def test_held_activations_stay_within_what_the_schedule_promises(case):
    made, figures, cluster = case
    costs = Costs(figures, cluster)
    program, log = run(*case, num_batches=4)
    ledger, bounds = Ledger(program, log), holds(made)
    for stage, workers in enumerate(made.workers):
        rows = max(work.rows for work in program.works if work.stage == stage)
        most = rows * costs.held_bytes(stage, stage + 1, bounds[stage], made.stages[stage].recompute)
        for worker in workers:
            assert ledger.use(worker).peak_parts["activations"] <= most + 1
