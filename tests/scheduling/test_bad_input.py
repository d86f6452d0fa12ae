"""Requests that cannot work are refused with the thing, its value and a way out."""

from __future__ import annotations

import pytest

from stagewright.errors import ScheduleError
from stagewright.policy import holds
from stagewright.scheduling import make_schedule
from stagewright.scheduling.drawing import parse_replicas, sketch_plan
from tests.scheduling.cases import plan_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"policy": "fastest"},
            "policy 'fastest' is unknown\nuse one of gpipe, 1f1b, interleaved, zero-bubble, dynamic",
        ),
        ({"route": "zigzag"}, "route 'zigzag' is unknown\nuse one of split, rotate"),
        ({"hold": 0}, "key hold is 0: expected greater than or equal to 1"),
        ({"num_microbatches": 0}, "key num_microbatches is 0"),
        ({"num_microbatches": 99}, "a batch of 8 rows cannot be cut into 99 microbatches"),
        ({"staleness": "fresh"}, "staleness 'fresh': expected 0, ssp, 2bw"),
        ({"staleness": "3,2,1"}, "staleness '3,2,1' names 3 stages, but the plan has 2"),
        ({"versions": (2,)}, r"versions \(2,\): expected 2 numbers from 1 on"),
        ({"versions": (2, 0)}, r"versions \(2, 0\): expected 2 numbers from 1 on"),
        ({"versions": (2, 1), "staleness": "ssp"}, "were both given: give one"),
        ({"versions": (5, 1), "num_batches": 4}, "5 weight versions in a run of 4 batches"),
        ({"num_batches": 0}, "1 weight versions in a run of 0 batches"),
    ],
)
def test_a_request_that_cannot_work(options, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(plan_of((2, 1), 4, batch=8), **options)


def test_gpipe_cannot_keep_a_small_bound():
    with pytest.raises(
        ScheduleError, match="hold 3 cannot work: under gpipe stage 0 runs all of its 4 forwards first"
    ) as caught:
        make_schedule(plan_of((1, 1), 4), policy="gpipe", hold=3)
    assert caught.value.todo == "use hold 4, fewer microbatches, or policy 1f1b"
    assert holds(make_schedule(plan_of((1, 1), 4), policy="gpipe", hold=4).plan) == (4, 4)


@pytest.mark.parametrize("replicas", [(7, 0), (0,), (), (3, -1)])
def test_a_stage_without_replicas(replicas):
    with pytest.raises(ScheduleError, match="replicas: expected at least 1 in every stage"):
        sketch_plan(replicas)


@pytest.mark.parametrize("text", ["", "7,", "seven", "7;1", "-1", "99999"])
def test_replicas_that_cannot_be_read(text):
    with pytest.raises(ScheduleError, match="expected a number for each stage, such as 7,1"):
        parse_replicas(text)


def test_replicas_that_can():
    assert parse_replicas("7,1") == (7, 1)
    assert sketch_plan((7, 1), num_microbatches=3).placement == "0:0-6.0:7"
    assert sketch_plan((7, 1), num_microbatches=3).batch == 21
