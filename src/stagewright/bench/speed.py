"""Predictions and measurements on a machine that drifts, brought to one speed: that of the profile.

A pulse beats beside the profile and beside every turn; how many times as long a beat takes is the drift. A turn's step
is then the measured one, times what is predicted without drift over what is predicted with it: compute takes as many
times as long, and wires do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stagewright.cluster import Cluster
from stagewright.plan import Plan
from stagewright.profile import Profile
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate


def predict(plan: Plan, profile: Profile, cluster: Cluster, drift: float = 1.0) -> float:
    """Seconds of a step on a machine that takes so many times as long as it did for the profile."""
    later = replace(cluster, core_s_per_byte=cluster.core_s_per_byte * drift)
    return simulate(make_schedule(plan), slowed(profile, drift), later, detail=False).median_step_s


def at_one_speed(
    step_s: Sequence[float], drifts: Sequence[float], plan: Plan, profile: Profile, cluster: Cluster
) -> tuple[float, ...]:
    """Seconds of a plan's steps, had the machine been as fast in every turn as it was for the profile."""
    points = sorted({min(drifts), 1.0, max(drifts)})
    known = [predict(plan, profile, cluster, drift) for drift in points]
    usual_s = known[points.index(1.0)]
    return tuple(float(own * usual_s / np.interp(drift, points, known)) for own, drift in zip(step_s, drifts))


def slowed(profile: Profile, drift: float) -> Profile:
    """The profile of a machine that takes so many times as long for everything."""
    model_s = tuple(drift * seconds for seconds in profile.model_s)
    layers = profile.slowed([drift] * len(profile.batch_sizes))
    return replace(layers, optimizer_s=drift * profile.optimizer_s, model_s=model_s)
