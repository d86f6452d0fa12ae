"""Plans for what is left when devices are lost."""

from __future__ import annotations

import pytest

from stagewright.cluster import DeviceId
from stagewright.errors import PlanError
from stagewright.plan import Plan
from stagewright.scheduling import make_schedule
from stagewright.training.start import _describe_change, _plan_without, _plan_without_hosts
from tests.runtime.cases import PLACEMENTS, Case, plan_of

NAMES = tuple(f"l{number}" for number in range(6))


def plan(placement: str) -> Plan:
    return plan_of(Case(placement), NAMES)


@pytest.mark.parametrize(
    ("placement", "lost", "expected"),
    [
        ("7-1", "3", "0:0-2,0:4-6.0:7"),
        ("7-1", "7", "0:0-5.0:6"),
        ("5-2-1", "5,6", "0:0-3.0:4.0:7"),
        ("4", "0", "0:1-3"),
        ("shared", "0", "0:1"),
        ("3-1", "0,1,2", "0:3"),
        ("loop", "1", "0:0"),
    ],
)
def test_the_stages_stay_and_the_devices_move(placement: str, lost: str, expected: str) -> None:
    before = plan(placement)
    after = _plan_without(before, {DeviceId(0, int(device)) for device in lost.split(",")})
    assert after.placement == expected
    assert (after.layers, after.batch) == (before.layers, before.batch)
    make_schedule(after)


def test_every_loss_of_some_devices_leaves_a_plan() -> None:
    for name in PLACEMENTS:
        whole = plan(name)
        for survivor in whole.devices:
            after = _plan_without(whole, set(whole.devices) - {survivor})
            assert after.devices == (survivor,)
            make_schedule(after)


def test_nothing_left_is_said() -> None:
    with pytest.raises(PlanError, match="all devices"):
        _plan_without(plan("3-1"), set(plan("3-1").devices))


def test_hosts_move_up() -> None:
    before = Plan.from_dict({**plan("3-1").to_dict(), "stages": [
        {"layers": list(NAMES[:3]), "devices": "0:0,1:0-1"}, {"layers": list(NAMES[3:]), "devices": "2:0"},
    ]})  # fmt: skip
    after = _plan_without_hosts(before, {1})
    assert after.placement == "0:0.1:0"
    assert _describe_change(before, after) == "going on as 1-1 instead of 3-1: 0:0.1:0 instead of 0:0,1:0-1.2:0"
