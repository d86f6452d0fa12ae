"""Predictions for a machine that drifts: at the speed that it had in a comparison.

Around the turns of plans the hosts pass over the model as they did when they were profiled; how many times as long
that takes is the drift. One drift holds for a whole case: a single pass says less of the turn beside it than the median
of all passes does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from stagewright.bench.contest import PASS_S
from stagewright.cluster import Cluster
from stagewright.plan import Plan
from stagewright.profile import Profile
from stagewright.profiling.inside import pass_rows
from stagewright.rehearsal.measuring import alike, busy_together
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate


def predict(plan: Plan, profile: Profile, cluster: Cluster, drift: float) -> float:
    """Seconds of a step on a machine that takes so many times as long as it did for the profile."""
    later = replace(cluster, core_s_per_byte=cluster.core_s_per_byte * drift)
    return simulate(make_schedule(plan), slowed(profile, drift), later, detail=False).median_step_s


def pass_over(profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Passes over the model between the turns, on the hosts that made the profile: with how many rows, how often."""
    rows = pass_rows(profile, PASS_S)
    times = max(1, round(PASS_S / profile.model_s[profile.batch_sizes.index(rows)]))
    hosts = busy_together(cluster)
    return {"hosts": hosts, "counted": [n for n in hosts if n in alike(cluster, 0)], "rows": rows, "times": times}


def drift_of(pass_s: Sequence[float], passes: Mapping[str, Any] | None, profile: Profile) -> float:
    """How many times as long as in the profile a pass took, in the median; 1 where there were none."""
    if passes is None or not pass_s:
        return 1.0
    usual_s = profile.model_s[profile.batch_sizes.index(passes["rows"])]
    return median(pass_s) / usual_s


def slowed(profile: Profile, drift: float) -> Profile:
    """The profile of a machine that takes so many times as long for everything."""
    model_s = tuple(drift * seconds for seconds in profile.model_s)
    layers = profile.slowed([drift] * len(profile.batch_sizes))
    return replace(layers, optimizer_s=drift * profile.optimizer_s, model_s=model_s)
