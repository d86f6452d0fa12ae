"""What the charts are told to draw."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from stagewright.record import Record
from stagewright.report import make_report

from .synthetic import dp, make_record


def charts(folder: Path, *records: Record) -> dict[str, Any]:
    """The block of chart data on the page of these records."""
    page = make_report(records, folder).page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="charts-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def lines(told: dict[str, Any]) -> dict[str, list[tuple[int, str]]]:
    """By type the number of devices and the name of each point of a speedup."""
    return {
        line["type"]: [(point["devices"], point["name"]) for point in line["points"]]
        for line in told["families"][0]["speedup"]
    }


def test_a_line_of_speedup_goes_through_the_fastest_case_of_each_number_of_devices(tmp_path: Path) -> None:
    records = (
        dp("one", 100, 1), dp("eight", 500, 8), dp("eight-slow", 450, 8),
        make_record("fast", samples_per_s=700), make_record("slow", samples_per_s=600, num_microbatches=4),
    )  # fmt: skip
    assert lines(charts(tmp_path, *records)) == {"data parallel": [(1, "one"), (8, "eight")], "ssp": [(8, "fast")]}


def test_cases_of_as_many_devices_have_no_speedup_to_draw(tmp_path: Path) -> None:
    assert lines(charts(tmp_path, dp("eight", 500, 8), make_record("fast", samples_per_s=700))) == {}


def test_curves_that_lie_on_one_another_are_named(tmp_path: Path) -> None:
    one = dataclasses.replace(make_record("one", with_points=True, seed=1), notes=())
    near = tuple(dataclasses.replace(point, value=point.value * 1.001) for point in one.points)
    far = tuple(dataclasses.replace(point, value=point.value + 1) for point in one.points)
    others = [dataclasses.replace(one, name=name, points=points) for name, points in (("near", near), ("far", far))]
    told = {chart["title"].split()[0]: chart for chart in charts(tmp_path, one, *others)["curves"]}
    assert [line["name"] for line in told["loss"]["lines"]] == ["one", "near", "far"]
    assert told["loss"]["coincide"] == [[0, 1]]
