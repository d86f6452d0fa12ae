"""CSV files that torch.distributed.pipelining reads; its own, which are read here, are schedules that run."""

from __future__ import annotations

import csv
import io

import pytest

from stagewright.errors import ScheduleError
from stagewright.schedule import COMPUTE, format_order
from stagewright.scheduling import check_schedule, make_schedule
from stagewright.scheduling.drawing import write_csv
from tests.scheduling.cases import drawn, placed, plan_of
from tests.scheduling.interpreter import carry_out
from tests.scheduling.torch_reader import read_csv

RECTANGULAR = {
    "gpipe": make_schedule(plan_of((1, 1, 1), 4), policy="gpipe"),
    "1f1b": make_schedule(plan_of((1, 1, 1, 1), 6)),
    "zero-bubble": make_schedule(plan_of((1, 1, 1, 1), 8), policy="zero-bubble"),
    "interleaved": make_schedule(placed("0:0.0:1.0:0.0:1", 4), policy="interleaved"),
    "side by side": make_schedule(plan_of((2, 2), 4)),
}


def test_the_file_of_1f1b_over_two_stages():
    assert write_csv(make_schedule(plan_of((1, 1), 2))).splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]


def test_sends_and_receipts_are_written_with_the_stage_that_does_them():
    text = write_csv(make_schedule(plan_of((1, 1))), comms=True)
    assert text.splitlines() == ["0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"]


def torch_actions(text: str):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows = list(csv.reader(io.StringIO(text)))
    return schedules, {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}


@pytest.mark.parametrize("name", RECTANGULAR)
def test_torch_finds_our_files_right(name):
    schedule = RECTANGULAR[name]
    num_stages = len(schedule.plan.stages)
    schedules, actions = torch_actions(write_csv(schedule))
    ranks = schedules._validate_schedule(actions, len(actions), num_stages, schedule.plan.num_microbatches)
    lowered = schedules._add_send_recv(
        {rank: list(row) for rank, row in actions.items()}, lambda stage: ranks[stage], num_stages
    )
    schedules._simulate_comms_compute(lowered, lambda stage: ranks[stage], num_stages)


@pytest.mark.parametrize("name", RECTANGULAR)
def test_our_sends_and_receipts_are_those_that_torch_would_add(name):
    schedule = RECTANGULAR[name]
    schedules, actions = torch_actions(write_csv(schedule, comms=True))
    ranks = {action.stage_index: rank for rank, row in actions.items() for action in row if action.is_compute_op}
    compute = {rank: [action for action in row if action.is_compute_op] for rank, row in actions.items()}
    theirs = schedules._add_send_recv(compute, lambda stage: ranks[stage], len(schedule.plan.stages))
    assert {rank: sorted(map(str, row)) for rank, row in theirs.items()} == {
        rank: sorted(map(str, row)) for rank, row in actions.items()
    }


@pytest.mark.parametrize("name", [name for name in RECTANGULAR if name != "side by side"])
def test_our_files_come_back_as_they_were(name):
    schedule = RECTANGULAR[name]
    back = read_csv(write_csv(schedule, comms=True), batch=schedule.plan.batch)
    check_schedule(back)
    assert back.plan.placement == schedule.plan.placement
    for ours, theirs in zip(schedule.orders, back.orders):
        compute = [[action for action in order if action.kind in COMPUTE] for order in (ours, theirs)]
        assert format_order(compute[0]) == format_order(compute[1])


class Stage:
    """As little of a stage as torch's schedules ask for to make their lists."""

    is_first = is_last = has_backward = False
    submod = None
    device = "cpu"
    group = None

    def __init__(self, index: int, group_size: int, num_stages: int) -> None:
        self.stage_index, self.group_size, self.num_stages = index, group_size, num_stages
        self.group_rank = index % group_size


@pytest.mark.parametrize("kind", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS"])
@pytest.mark.parametrize(("ranks", "rounds", "microbatches"), [(2, 2, 4), (4, 2, 8), (2, 3, 6)])
def test_schedules_of_torch_are_read_checked_and_carried_out(kind, ranks, rounds, microbatches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [Stage(index, ranks, ranks * rounds) for index in range(0, ranks * rounds, ranks)]
    theirs = getattr(schedules, kind)(stages, microbatches, loss_fn=lambda output, target: output)
    text = io.StringIO()
    csv.writer(text).writerows(theirs.pipeline_order[rank] for rank in range(ranks))
    schedule = read_csv(text.getvalue())
    check_schedule(schedule)
    assert carry_out(schedule, 1, meet=True).keys() == set(range(ranks * rounds))


def test_overlapped_and_empty_cells_are_read():
    text = "0F0,,0UNSHARD,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD\n1F0,1B0,,1F1,1B1,1RESHARD\n"
    assert read_csv(text).grid() == drawn("""
        0 │ F0 F1 B0 B1 U
        1 │ F0 B0 F1 B1 U
    """)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,zzz\n", "CSV cell 'zzz' cannot be read"),
        ("0F0,0B\n", "CSV cell '0B' lacks its microbatch"),
        ("", "the CSV file names stages"),
        ("0F0,0B0\n2F0,2B0\n", r"names stages \[0, 2\]: expected 0, 1, 2"),
        ("0F0,0B0\n0F1,0B1\n", r"stage 0 is in rows \[0, 1\]"),
        ("0B0,0F0\n1F0,1B0\n", "row 0 of the CSV file waits for ever at B0.0"),
        ("0F0,0B0\n1B0,1F0\n", "B1.0: of batch n it must come after F1.0"),
        ("0F0,0B0\n1F0\n", "row 0 of the CSV file waits for ever at B0.0"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(text, message):
    with pytest.raises(ScheduleError, match=message):
        check_schedule(read_csv(text))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (make_schedule(plan_of((2, 1), 2)), r"one worker a stage, but the plan has \(2, 1\)"),
        (make_schedule(plan_of((2, 2), 2, route="rotate")), "route rotate"),
        (make_schedule(plan_of((1, 1)), staleness="ssp"), r"keeps versions \(2, 1\)"),
        (make_schedule(placed("0:0-1.0:1-2")), "does not fall into pipelines side by side"),
    ],
)
def test_what_the_format_cannot_say_is_refused(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        write_csv(schedule)
