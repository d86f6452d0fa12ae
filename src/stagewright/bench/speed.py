"""Predictions and measurements on a machine that drifts, brought to one speed: that of the profile.

A pulse beats beside the profile and beside every turn; how many times as long a beat takes is the drift. Work and beats
do not slow down quite alike, so passes over the whole model take turns with the plans. How many beats a pass takes is
the same for the profile and for the turns, but for chance: all passes together tell it better than those of the
profile, which is over in seconds.

              profile       turns
    passes   ▇▇▇▇ ▇▇▇▇     ▇▇▇▇         ▇▇▇▇         ▇▇▇▇
    plans                      ▇▇▇ ▇▇       ▇▇▇ ▇▇
    pulse    │  │  │  │    │  │  │  │  │  │  │  │  │  │  │

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
from stagewright.profiling.inside import middle_size
from stagewright.profiling.pulse import Pulse
from stagewright.rehearsal.measuring import Beats
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate


def predict(plan: Plan, profile: Profile, cluster: Cluster, drift: float = 1.0) -> float:
    """Seconds of a step on a machine that takes so many times as long as it did for the profile."""
    later = replace(cluster, core_s_per_byte=cluster.core_s_per_byte * drift)
    return simulate(make_schedule(plan), slowed(profile, drift), later, detail=False).median_step_s


def middle_pass(profile: Profile) -> tuple[int, float]:
    """The rows of a pass over the whole model, and the seconds that the profile has for it."""
    middle = middle_size(profile.batch_sizes)
    return profile.batch_sizes[middle], profile.model_s[middle]


def drifts_of(times: Mapping[str, Any], file: Path, beats: Beats | None) -> dict[str, list[float]]:
    """By contender, how many times as long as for the profile the machine took in each turn; cards keep their speed."""
    if beats is None:
        return {name: [1.0] * len(turns) for name, turns in times["when"].items()}
    pulse = Pulse.load(file)
    beat_s = {name: [pulse.between(*turn) for turn in turns] for name, turns in times["when"].items()}
    in_beats = [own / beat for own, beat in zip(times["step_s"][PASSES], beat_s[PASSES])]
    # The profile's passes took what they took: where that is few beats, these were long ones.
    usual_s = beats.beat_s * median(beats.in_beats) / median([*beats.in_beats, *in_beats])
    return {name: [beat / usual_s for beat in turns] for name, turns in beat_s.items()}


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
