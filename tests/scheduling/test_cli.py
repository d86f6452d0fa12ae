"""`stagewright schedule`: the grid, the figures and the files."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from stagewright.cli.schedule import schedule
from stagewright.errors import ScheduleError, UsageError
from stagewright.schedule import Schedule
from tests.scheduling.cases import drawn, plan_of
from tests.scheduling.torch_reader import read_csv


def run(line: str, *more: str) -> str:
    """What the command prints; its errors come out as they are."""
    app = typer.Typer()
    app.command()(schedule)
    result = CliRunner().invoke(app, [*line.split(), *more], catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def body(text: str) -> str:
    """The rows of the grid."""
    return "\n".join(line.strip() for line in text.splitlines() if "│" in line)


def test_the_grid_of_seven_and_one():
    text = run("--replicas 7,1 --microbatches 14 --policy 1f1b --route rotate")
    assert body(text) == drawn("""
        0 │ F0 F7 B0 B7 U
        1 │ F1 F8 B1 B8 U
        2 │ F2 F9 B2 B9 U
        3 │ F3 F10 B3 B10 U
        4 │ F4 F11 B4 B11 U
        5 │ F5 F12 B5 B12 U
        6 │ F6 F13 B6 B13 U
        7 │ F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8 F9 B9 F10 B10 F11 B11 F12 B12 F13 B13 U
    """)
    assert "1f1b, rotate, 14 microbatches a batch · checked: 127 actions, no lock, buffered or rendezvous" in text
    assert "holds 2, 1 microbatches by stage" in text


def test_a_loop_is_drawn_over_so_many_batches():
    assert body(run("--replicas 3,1 --staleness ssp --batches 4")) == drawn("""
        0-2 │ F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 B3 U3
        3   │ F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3
    """)


def test_time_and_actions():
    assert body(run("--replicas 1,1 --times")) == drawn("""
        0 │ F0          B0───
        1 │    F0 B0───
    """)
    assert body(run("--replicas 1,1 --actions")).startswith("0 │ F0.0 SF0.0>1 RB1.0<1 B0.0 U0")


def test_a_placement_with_shared_devices():
    text = run("--placement 0:0.0:1.0:0.0:1 --microbatches 4 --policy interleaved --json")
    figures = json.loads(text)
    assert figures["num_workers"] == 2
    assert figures["idle_share"] == pytest.approx(1 / 9)


def test_files(tmp_path):
    plan = plan_of((1, 1), 2).save(tmp_path / "plan.json")
    names = {key: tmp_path / "new" / f"schedule.{key}" for key in ("json", "svg", "csv")}
    out = run("", str(plan), "-o", str(names["json"]), "--svg", str(names["svg"]), "--csv", str(names["csv"]))
    assert "saved" in out
    made = Schedule.load(names["json"])
    assert names["svg"].read_text().startswith("<svg")
    assert read_csv(names["csv"].read_text()).orders == made.orders


def test_a_plan_file_with_other_sizes(tmp_path):
    plan = plan_of((2, 1), 2).save(tmp_path / "plan.json")
    figures = json.loads(run("--rows 30 --microbatches 5 --hold 2 --json", str(plan)))
    assert (figures["num_microbatches"], figures["holds"]) == (5, [2, 1])


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("", UsageError, "0 of a plan file, --replicas and --placement were given"),
        ("--replicas 1 --placement 0:0", UsageError, "2 of a plan file, --replicas and --placement"),
        ("--replicas 7,0", ScheduleError, "stage 1 has 0 replicas"),
        ("--replicas 1 --microbatches 0", UsageError, "--microbatches is 0: expected 1 or more"),
        ("--replicas 1 --policy best", UsageError, "--schedule is 'best': expected one of gpipe"),
        ("--replicas 1,1 --staleness ssp --batches 1", ScheduleError, "2 weight versions in a run of 1"),
    ],
)
def test_mistakes(line, error, message):
    with pytest.raises(error, match=message):
        run(line)
