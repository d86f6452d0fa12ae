"""Profiles of cores that others use too: for seconds they are a fifth slower or faster, whatever layer runs.

All samples count together: the model in one piece gives its layers their sum, and all batch sizes give a layer its
line. That the whole is not quite on a line is no noise where passes were brought to the pulse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stagewright.profile import Profile
from stagewright.profiling.measured import layers_against_model


def added_up(profile: Profile) -> Profile:
    """The profile with layers that take together what the model takes in one piece.

    Other work on the machine disturbs few of many short samples, and no long one goes without: the layers' medians
    come to less than that of the whole, and a step is as long as the whole.
    """
    return profile.slowed([1 / ratio for ratio in layers_against_model(profile)])


def on_lines(profile: Profile) -> Profile:
    """The profile with every time on a line over the batch sizes: something for a batch, and something for each row.

    A layer on a CPU is close to such a line: AlexNet's convolutions, timed for four minutes, within 4 % from 4 rows to
    64, where a minute's profile strayed by 40 %. Every layer's line weighs the sizes alike, so that sums stay sums.
    What the model takes in one piece stays as it is: ResNet-50 took 29 % more for a row among 16 than among 8 on cores
    with small caches, which a line would hide.
    """
    if len(profile.batch_sizes) < 3:
        return profile
    layers = tuple(
        layer.with_times({
            key: line_through(profile.batch_sizes, seconds, profile.model_s) for key, seconds in layer.timed.items()
        })
        for layer in profile.layers
    )  # fmt: skip
    return replace(profile, layers=layers)


def line_through(sizes: Sequence[int], seconds: Sequence[float], scale_s: Sequence[float]) -> tuple[float, ...]:
    """The seconds on the line that is nearest in units of a scale, which neither begins below zero nor falls."""
    rows, weights = np.array(sizes, dtype=float), 1 / np.array(scale_s)
    slope, start = np.polyfit(rows, seconds, 1, w=weights)
    if start < 0:
        slope, start = np.average(np.array(seconds) / rows, weights=(weights * rows) ** 2), 0.0
    elif slope < 0:
        slope, start = 0.0, np.average(seconds, weights=weights**2)
    return tuple(float(start + slope * size) for size in sizes)
