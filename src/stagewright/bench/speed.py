"""Predictions and measurements on a machine that drifts, brought to one speed: that of the profile.

Passes over the whole model take turns with the plans, and a pulse beats beside all of them. How many times as long as
in the profile passes take tells how long a beat is at the profile's speed; how many times as long as that a beat is in
a turn is the turn's drift.

    passes   ▇▇▇▇          ▇▇▇▇          ▇▇▇▇    a round each, against the profile: a beat of the profile
    plans          ▇▇▇ ▇▇        ▇▇▇ ▇▇
    pulse    │  │   │   │  │  │   │   │   │  │   in a turn, against that: its drift

A turn's step is then the measured one, times what is predicted without drift over what is predicted with it: compute
takes as many times as long, and wires do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from stagewright.bench.contest import PASSES
from stagewright.cluster import Cluster
from stagewright.plan import Plan
from stagewright.profile import Profile
from stagewright.profiling.pulse import Pulse
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate


def predict(plan: Plan, profile: Profile, cluster: Cluster, drift: float = 1.0) -> float:
    """Seconds of a step on a machine that takes so many times as long as it did for the profile."""
    later = replace(cluster, core_s_per_byte=cluster.core_s_per_byte * drift)
    return simulate(make_schedule(plan), slowed(profile, drift), later, detail=False).median_step_s


def middle_pass(profile: Profile) -> tuple[int, float]:
    """The rows of a pass over the whole model, and the seconds that the profile has for it."""
    middle = len(profile.batch_sizes) // 2
    return profile.batch_sizes[middle], profile.model_s[middle]


def drifts_of(times: Mapping[str, Any], beats: Path, profile: Profile) -> dict[str, list[float]]:
    """By contender, how many times as long as for the profile the machine took in each turn; a card's speed is its own.

    One pass scatters by more than beats do, so all rounds tell together what a beat of the profile is.
    """
    if PASSES not in times["step_s"]:
        return {name: [1.0] * len(turns) for name, turns in times["when"].items()}
    pulse, (_, usual_s) = Pulse.load(beats), middle_pass(profile)
    beat_s = {name: [pulse.between(*turn) for turn in turns] for name, turns in times["when"].items()}
    of_profile_s = median(beat * usual_s / own for beat, own in zip(beat_s[PASSES], times["step_s"][PASSES]))
    return {name: [beat / of_profile_s for beat in beats] for name, beats in beat_s.items()}


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
