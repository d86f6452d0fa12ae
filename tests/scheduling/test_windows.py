"""Windows of an order: nothing is lost, nothing runs before what it needs, and each stage keeps its sequence."""

from __future__ import annotations

import pytest

from stagewright.cluster import parse_placement
from stagewright.plan import Plan, Stage, parse_staleness
from stagewright.schedule import COMPUTE, RECEIVES, TRANSFERS, Action, Schedule
from stagewright.scheduling import make_schedule
from stagewright.scheduling.windows import _key_of, _Window, windows


def schedule_of(placement: str, staleness: str, route: str, hold: int | None) -> Schedule:
    groups = parse_placement(placement)
    versions = parse_staleness(staleness, len(groups))
    stages = tuple(
        Stage(layers=(f"layer{n}",), devices=group, versions=versions[n], num_buckets=2)
        for n, group in enumerate(groups)
    )
    plan = Plan(model="tower", stages=stages, batch=24, num_microbatches=2, policy="dynamic", route=route, hold=hold)  # type: ignore[arg-type]
    return make_schedule(plan)


def in_turn(window: _Window[Action]) -> list[Action]:
    """A window's actions in the sequence of the order."""
    inside = [each for unit in window.units.values() for each in (*unit.receives, unit.compute, *unit.sends)]
    return [*window.late, *inside, *window.rest]


@pytest.mark.parametrize("hold", [None, 2])
@pytest.mark.parametrize("route", ["split", "rotate"])
@pytest.mark.parametrize("staleness", ["0", "ssp"])
@pytest.mark.parametrize("placement", ["0:0-3", "0:0-2.0:3", "0:0-1.0:0-1", "0:0-3.0:0.0:0-3"])
def test_windows_keep_what_an_order_promises(placement: str, staleness: str, route: str, hold: int | None) -> None:
    schedule = schedule_of(placement, staleness, route, hold)
    for worker in range(len(schedule.orders)):
        order = list(schedule.unroll(worker, 5, 0))
        found = [in_turn(window) for window in windows(order, lambda action: (action, action.batch))]
        assert sorted(map(str, order)) == sorted(str(action) for window in found for action in window)
        made = set()
        for action in (action for window in found for action in window):
            key = _key_of(action, action.batch)
            if action.kind in COMPUTE:
                made.add(key)
            elif action.kind in RECEIVES:
                assert key not in made
            elif action.kind in TRANSFERS:
                assert key in made


def test_a_send_after_the_end_of_its_window_opens_the_next_one() -> None:
    schedule = schedule_of("0:0-3.0:0.0:0-3", "ssp", "rotate", 2)
    order = schedule.unroll(0, 5, 0)
    late = [window.late for window in windows(order, lambda action: (action, action.batch))]
    assert any(late)
    assert not late[0]
