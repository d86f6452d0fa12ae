"""`stagewright simulate`, from the outside."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from stagewright.cli.simulate import simulate
from stagewright.cluster import Cluster
from stagewright.errors import PlanError, UsageError
from stagewright.record import Record
from tests.simulation.cases import even_profile, plan, star

APP = typer.Typer()
APP.command()(simulate)


@pytest.fixture
def files(tmp_path):
    """A plan of two stages, its profile and a cluster, as files."""
    figures = replace(even_profile(2, output_bytes=1.0, parameter_bytes=100, saved_bytes=1.0), sample_name="images")
    return {
        "plan": str(plan([2, 1], 2).save(tmp_path / "plan.json")),
        "profile": str(figures.save(tmp_path / "profile.json")),
        "cluster": str(star(10.0, 10.0, 10.0).save(tmp_path / "cluster.yaml")),
    }


def call(files, *options):
    what = [files["plan"], "--profile", files["profile"], "--cluster", files["cluster"]]
    result = CliRunner().invoke(APP, [*what, *options])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_json_has_the_promised_figures(files):
    figures = json.loads(call(files, "--json"))
    assert {"images_per_s", "step_s", "epoch_s", "devices"} <= set(figures)
    assert [set(device) for device in figures["devices"]] == [{"device", "peak_bytes", "busy_share"}] * 3
    assert figures["images_per_s"] == pytest.approx(4 / figures["step_s"])
    assert figures["epoch_s"] == pytest.approx(1_281_167 / figures["images_per_s"])


def test_the_screen_says_where_the_time_goes(files):
    text = call(files)
    for words in ("images/s", "epoch", "0:0-1", "busy", "GiB", "critical path:", "limited by", "reduce among 0:0-1"):
        assert words in text


def test_a_plan_that_does_not_fit_ends_with_an_error_after_its_figures(files, tmp_path):
    wide = Cluster.load(files["cluster"])
    small = replace(wide.hosts[0].devices[2], memory_bytes=1000)
    devices = (*wide.hosts[0].devices[:2], small)
    cluster = replace(wide, hosts=(replace(wide.hosts[0], devices=devices),)).save(tmp_path / "small.json")
    what = [files["plan"], "--profile", files["profile"], "--cluster", str(cluster)]

    def called(*options):
        return CliRunner().invoke(APP, [*what, *options])

    many = ("--batch", "4000")
    for options in ((), ("--json",), ("--bandwidth", "x1,x2")):
        result = called(*many, *options)
        assert isinstance(result.exception, PlanError), options
        assert re.search(r"does not fit: 0:2 needs [0-9.]+ KiB, and has 1000 B", result.exception.what)
        assert "--batch" in result.exception.todo
    assert "images/s" in called(*many).output
    assert json.loads(called(*many, "--json").output)["fits"] is False
    sweep = called("--batch", "4,4000", "--json")
    assert sweep.exception is None, "one of the two fits"
    assert [point["fits"] for point in json.loads(sweep.output)] == [True, False]
    table = called("--batch", "4,4000").output
    assert ["does not fit: 0:2 needs" in line for line in table.splitlines() if "batch " in line][:2] == [False, True]


def test_trace_timeline_and_record_are_saved(files, tmp_path):
    trace, picture, record = tmp_path / "trace.json", tmp_path / "timeline.svg", tmp_path / "run.record.json"
    call(files, "--trace", str(trace), "--timeline", str(picture), "-o", str(record))
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(name.startswith("F") for name in names)
    assert picture.read_text().lstrip().startswith("<svg")
    assert Record.load(record).source == "simulated"


def test_sweeps_are_a_table_and_a_plot(files, tmp_path):
    text = call(files, "--bandwidth", "x1,x2,x64,x128", "--plot", str(tmp_path / "plot.svg"))
    assert "links ×64" in text
    assert "stops helping after" in text
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
    rows = json.loads(call(files, "--batch", "4,8", "--json"))
    assert [row["setting"] for row in rows] == ["batch 4", "batch 8"]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--data", "films"], "--data is 'films'"),
        (["--precision", "fp1"], "--precision is 'fp1'"),
        (["--bandwidth", "fast"], "--bandwidth 'fast'"),
        (["--devices", "2,4"], "--devices is for data parallelism"),
        (["--batch", "4,8", "--bandwidth", "x1,x2"], "sweep one at a time|more than one"),
    ],
)
def test_options_that_mean_nothing_are_refused(files, options, fault):
    with pytest.raises(UsageError, match=fault):
        call(files, *options)


def test_another_system_is_simulated_by_its_facts(files, tmp_path):
    (tmp_path / "other.yaml").write_text("format: stagewright.system\nversion: 1\nname: other\nblocking_sends: true\n")
    steps = {}
    for system in ("stagewright", "unhidden-reduction", str(tmp_path / "other.yaml")):
        found = json.loads(call(files, "--system", system, "--json"))
        steps[system] = found["step_s"]
    own, unhidden, other = steps.values()
    assert own <= unhidden < other
    assert "as other works: sends block, reductions overlap next batch" in found["notes"]
    with pytest.raises(UsageError, match="no system is named 'no'"):
        call(files, "--system", "no")
