"""Predictions for a machine that drifts: at the speed of the profile, and at that of each round.

Around the turns of a plan the hosts pass over the model as they did when they were profiled; how many times as long
that takes is the drift of that round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagewright.bench.contest import PASS_S
from stagewright.cluster import Cluster
from stagewright.plan import Plan
from stagewright.profile import Profile
from stagewright.profiling.inside import pass_rows
from stagewright.rehearsal.measuring import alike, busy_together
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate


class Prediction:
    """What the simulator says of a plan: at the speed of the profile, and at that of each round."""

    def __init__(self, plan: Plan, profile: Profile, cluster: Cluster, drifts: Sequence[float]) -> None:
        schedule = make_schedule(plan)

        def at(drift: float) -> float:
            later = replace(cluster, core_s_per_byte=cluster.core_s_per_byte * drift)
            return simulate(schedule, slowed(profile, drift), later, detail=False).median_step_s

        self.plan, self.drifts = plan, drifts
        self.profiled_s = at(1.0)
        self.round_s = tuple(map(at, drifts))


def pass_over(profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Passes over the model between the turns, on the hosts that made the profile: with how many rows, how often."""
    rows = pass_rows(profile, PASS_S)
    times = max(1, round(PASS_S / profile.model_s[profile.batch_sizes.index(rows)]))
    hosts = busy_together(cluster)
    return {"hosts": hosts, "counted": [n for n in hosts if n in alike(cluster, 0)], "rows": rows, "times": times}


def drifts_of(
    pass_s: Mapping[str, Sequence[float]], passes: Mapping[str, Any] | None, profile: Profile
) -> dict[str, list[float]]:
    """For each plan, round by round, how many times as long as in the profile a pass took around its turn."""
    if passes is None:
        return {}
    usual_s = profile.model_s[profile.batch_sizes.index(passes["rows"])]
    return {name: [seconds / usual_s for seconds in rounds] for name, rounds in pass_s.items()}


def slowed(profile: Profile, drift: float) -> Profile:
    """The profile of a machine that takes so many times as long for everything."""

    def times(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(each * drift for each in seconds)

    layers = tuple(
        layer.with_times({key: times(seconds) for key, seconds in layer.timed.items()}) for layer in profile.layers
    )
    optimizer_s = profile.optimizer_s * drift
    return replace(profile, layers=layers, optimizer_s=optimizer_s, model_s=times(profile.model_s))
