"""The timeline's colours stay apart for colour-blind readers."""

from __future__ import annotations

from itertools import combinations

import pytest

from stagewright.report.timeline import PAGE_WORDS

# Machado, Oliveira and Fernandes 2009, table 1, full severity; on linear RGB.
VISION = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
JUST_TOLD_APART = 2.3
"""The distance in CIELAB at which two colours are just told apart side by side."""
IDLE = {"light": "#ececf0", "dark": "#2a2c34"}


def linear(colour: str) -> list[float]:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(weight * part for weight, part in zip(row, rgb)) for row in to_xyz]
    x, y, z = (
        value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116
        for value in (xyz[0] / 0.9505, xyz[1], xyz[2] / 1.089)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    rgb = linear(colour)
    return lab([min(max(sum(w * part for w, part in zip(row, rgb)), 0), 1) for row in VISION[vision]])


def distance(one: str, two: str, vision: str) -> float:
    return sum((a - b) ** 2 for a, b in zip(seen(one, vision), seen(two, vision))) ** 0.5


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("idle", IDLE.values(), ids=IDLE)
def test_kinds_of_spans_are_told_apart_by_every_reader(vision: str, idle: str) -> None:
    colours = dict(PAGE_WORDS["span_families"]) | {"idle": idle}

    near = {
        pair: round(distance(colours[pair[0]], colours[pair[1]], vision), 1)
        for pair in combinations(colours, 2)
        if distance(colours[pair[0]], colours[pair[1]], vision) < 5 * JUST_TOLD_APART
    }

    assert near == {}
