"""What a step costs workers beside their layers: seen by a real run, and counted by the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

import stagewright as sw
from stagewright.errors import ClusterError
from stagewright.profiling.detect import cpu_cluster
from stagewright.training import overhead


def test_a_step_of_nothing_costs_something_and_the_simulator_counts_it(nets):
    cluster = replace(cpu_cluster(2, "here"), cores=2.0)
    found = overhead.measure_step_overhead(cluster)
    costs = {device.step_overhead_s for device in found.hosts[0].devices}
    assert len(costs) == 1
    assert 1e-5 < costs.pop() < 5.0
    assert "beside its layers" in found.notes[-1]
    profile = sw.make_profile(nets, batch_sizes=[4], repeats=1)
    plan = sw.make_plan(profile, cluster, sw.PlanOptions(batch=8, placement="0:0-1")).best.plan
    times = [sw.simulate(sw.make_schedule(plan), profile, each).median_step_s for each in (cluster, found)]
    assert times[1] - times[0] == pytest.approx(found.hosts[0].devices[0].step_overhead_s, rel=0.5)


def test_workers_that_fail_are_told_with_what_they_said(monkeypatch):
    monkeypatch.setattr(overhead, "_STEPS", 0)
    with pytest.raises(ClusterError, match=r"they said: .*steps"):
        overhead.measure_step_overhead(cpu_cluster(2, "here"))


@pytest.fixture
def nets():
    return overhead.next_to_nothing()
