"""Faces of a schedule: text, files, pictures."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.errors import FileError, ScheduleError
from stagewright.schedule import Action, Schedule, parse_order
from stagewright.scheduling import make_schedule
from stagewright.scheduling.drawing import draw_svg, timed_grid
from tests.scheduling.cases import drawn, orders_of, placed, plan_of, wrapped

SAMPLES = [
    make_schedule(plan_of((3, 1), 6, route="rotate"), agree=True),
    make_schedule(plan_of((2, 3, 1), 4, batch=17), staleness="ssp"),
    make_schedule(plan_of((1, 1, 1), 4), policy="zero-bubble"),
    make_schedule(wrapped((2, 2, 2), 3, 4), policy="interleaved"),
]


@pytest.mark.parametrize("schedule", SAMPLES)
def test_text_parses_back(schedule):
    assert orders_of(schedule.text) == schedule.orders


@pytest.mark.parametrize("schedule", SAMPLES)
@pytest.mark.parametrize("name", ["schedule.json", "schedule.yaml"])
def test_files_load_back(schedule, name, tmp_path):
    assert Schedule.load(schedule.save(tmp_path / name)) == schedule


def test_a_file_can_be_read_by_people(tmp_path):
    path = make_schedule(plan_of((2,))).save(tmp_path / "schedule.json")
    assert '"F0.0 B0.0 G0 U0"' in path.read_text()


def test_a_damaged_order_in_a_file_is_named(tmp_path):
    path = make_schedule(plan_of((2,))).save(tmp_path / "schedule.json")
    path.write_text(path.read_text().replace("B0.0", "Q0.0", 1))
    with pytest.raises((FileError, ScheduleError), match=r"Q0\.0"):
        Schedule.load(path)


@pytest.mark.parametrize("orders", [(1,), ("F0.0", ("B0.0",)), ((("F", 0, 0, 0, -1),),)])
def test_orders_are_lines_or_actions(orders):
    with pytest.raises(ScheduleError, match="a line of actions such as"):
        Schedule(plan=plan_of((1,) * len(orders)), orders=orders)


@pytest.mark.parametrize("text", ["F0.3", "SF0.3>5+1", "RB1.0<2-4", "G0-1", "A", "A+1", "U0-1"])
def test_an_action_is_written_as_it_is_read(text):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["F0", "F0.0>1", "SF0.0<1", "G", "G0/0", "A0", "U", "U0.1", "X0.0", "F0.0+", "F-1.0", ""]
)
def test_other_words_are_refused(text):
    with pytest.raises(ScheduleError, match="action"):
        Action.parse(text)


def test_an_older_line_with_a_reduction_for_each_bucket_is_read():
    assert parse_order("F0.0 B0.0 G0/0-1 G0/1-1 G0/10-1 U0") == parse_order("F0.0 B0.0 G0-1 U0")


def test_unrolling_fills_and_drains():
    schedule = Schedule(plan=plan_of((1,)), orders=(parse_order("F0.0+1 B0.0 U0-1"),))
    assert [str(action) for action in schedule.unroll(0, 3)] == [
        "F0.0", "F0.0+1", "B0.0", "F0.0+2", "B0.0+1", "U0", "B0.0+2", "U0+1", "U0+2",
    ]  # fmt: skip
    assert [str(action) for action in schedule.unroll(0, 1, first_batch=7)] == ["F0.0+7", "B0.0+7", "U0+7"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 6), st.sampled_from(SAMPLES))
def test_unrolling_yields_every_action_of_every_batch_once(first, count, schedule):
    for worker, order in enumerate(schedule.orders):
        found = sorted(schedule.unroll(worker, count, first))
        batches = range(first, first + count)
        assert found == sorted(action._replace(batch=batch) for action in order for batch in batches)


def test_a_grid_names_batches_only_where_there_are_several():
    schedule = make_schedule(plan_of((1,), 2))
    assert schedule.grid() == "0 │ F0 B0 F1 B1 U"
    assert schedule.grid(2) == "0 │ 0:F0 0:B0 0:F1 0:B1 0:U 1:F0 1:B0 1:F1 1:B1 1:U"
    assert make_schedule(plan_of((1,))).grid(2) == "0 │ F0 B0 U0 F1 B1 U1"


def test_a_grid_names_stages_where_workers_have_several():
    assert make_schedule(placed("0:0.0:0"), agree=True).grid() == "0 │ F0.0 F1.0 B1.0 B0.0 A U0 U1"
    assert make_schedule(placed("0:0.0:0")).grid(2) == "0 │ F0.0 F1.0 B1.0 U1.0 B0.0 U0.0 F0.1 F1.1 B1.1 U1.1 B0.1 U0.1"


def test_a_loop_over_time_shows_how_it_fills():
    schedule = make_schedule(plan_of((1, 1)), staleness="ssp")
    assert timed_grid(schedule, 3) == drawn("""
        0 │ F0 F1       B0─── F2 B1───    B2───
        1 │    F0 B0─── F1 B1─── F2 B2───
    """)


@pytest.mark.parametrize("schedule", SAMPLES)
def test_the_picture_has_a_box_for_every_computation_and_a_row_for_every_worker(schedule):
    root = ElementTree.fromstring(draw_svg(schedule, 3))
    boxes = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("rx")]
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    computed = [cell for worker in range(len(schedule.orders)) for cell in schedule.cells(worker, 3)]
    computed = [cell for cell in computed if "U" not in cell and "A" not in cell]
    assert len(boxes) == len(computed)
    assert sorted(texts) == sorted([*computed, *map(str, range(len(schedule.orders)))])
    assert all(float(box.get("width")) > 0 for box in boxes)
