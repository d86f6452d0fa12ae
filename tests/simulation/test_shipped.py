"""The cluster and device files that come with the package predict what calibration found, and what others measured."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stagewright.cli.simulate import simulate
from stagewright.profiling.kinds import DeviceKind, find_kind

APP = typer.Typer()
APP.command()(simulate)
MIB = 1 << 20

with (Path(__file__).parent / "published.csv").open(encoding="utf-8", newline="") as file:
    ROWS = list(csv.DictReader(file))
TOLERANCES = {"alexnet-ssp-loss-only": 0.08, "vgg16-ssp": 0.10}
"""How far a prediction may be from the measurement; 5 % elsewhere."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_shipped_files_reproduce_the_calibration(row):
    result = CliRunner().invoke(APP, [*row["options"].split(), "--json"])
    found = json.loads(result.output)
    assert found["images_per_s"] == pytest.approx(float(row["predicted_images_per_s"]), rel=0.005)
    assert found["images_per_s"] == pytest.approx(float(row["images_per_s"]), rel=TOLERANCES.get(row["id"], 0.05))
    for place, end in ((0, "first"), (-1, "last")):
        if row[f"predicted_mib_{end}_stage"]:
            peak = found["devices"][place]["peak_bytes"] / MIB
            assert peak == pytest.approx(float(row[f"predicted_mib_{end}_stage"]), rel=0.005)


def test_predicted_memory_is_within_a_tenth_of_the_measured_on_average():
    pairs = [
        (float(row[f"predicted_mib_{end}_stage"]), float(row[f"mib_{end}_stage"]))
        for row in ROWS
        for end in ("first", "last")
        if row[f"mib_{end}_stage"]
    ]
    assert sum(abs(predicted / measured - 1) for predicted, measured in pairs) / len(pairs) < 0.10


@pytest.mark.parametrize("name", DeviceKind.ready_made())
def test_no_device_file_claims_more_than_its_memory_moves(name):
    efficiency = find_kind(name).efficiency
    assert all(value <= 1.0 for key, value in efficiency.items() if key.startswith("memory"))
