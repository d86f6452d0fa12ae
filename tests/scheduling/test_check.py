"""The checker: it objects to everything that would go wrong, with the action, the reason and the grid."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagewright.errors import ScheduleError
from stagewright.schedule import Schedule, format_order, parse_order
from stagewright.scheduling import check_schedule, make_schedule
from stagewright.scheduling.check import _first_difference
from tests.scheduling.cases import drawn, orders_of, placed, plan_of, wrapped
from tests.scheduling.interpreter import FaultError, carry_out

GOOD = {
    "split, 1f1b": make_schedule(plan_of((2, 1), 2)),
    "rotate, 1f1b": make_schedule(plan_of((1, 2, 1), 3, route="rotate")),
    "split, gpipe, agree": make_schedule(plan_of((1, 2), 2), policy="gpipe", agree=True),
    "zero-bubble": make_schedule(plan_of((1, 1), 3), policy="zero-bubble"),
    "interleaved": make_schedule(wrapped((1, 1, 1, 1), 2, 2), policy="interleaved"),
    "shared": make_schedule(placed("0:0-1.0:0-1", 2), agree=True),
    "ssp": make_schedule(plan_of((2, 1), 2), staleness="ssp"),
    "ssp, rotate, agree": make_schedule(plan_of((2, 1), 2, route="rotate"), staleness="ssp", agree=True),
    "2bw": make_schedule(plan_of((2,), 2), staleness="2bw"),
}


def with_order(schedule: Schedule, worker: int, order) -> Schedule:
    orders = list(schedule.orders)
    orders[worker] = tuple(order)
    return replace(schedule, orders=tuple(orders))


def sabotaged(schedule: Schedule):
    """Every way to drop or double one action, or to swap two of a worker."""
    for worker, order in enumerate(schedule.orders):
        for at in range(len(order)):
            yield "drop", with_order(schedule, worker, order[:at] + order[at + 1 :])
            yield "duplicate", with_order(schedule, worker, order[: at + 1] + order[at:])
        for first, second in combinations(range(len(order)), 2):
            moved = list(order)
            moved[first], moved[second] = moved[second], moved[first]
            yield "swap", with_order(schedule, worker, moved)


def outcome(bad: Schedule, num_batches: int = 4) -> str:
    """Whether the checker objects; if not, the result must be the same under both semantics."""
    try:
        check_schedule(bad)
    except ScheduleError:
        return "refused"
    carry_out(bad, num_batches, meet=False)
    carry_out(bad, num_batches, meet=True)
    return "harmless"


@pytest.mark.parametrize("name", GOOD)
def test_sabotage_is_refused_or_harmless(name):
    check_schedule(GOOD[name])
    found = Counter((way, outcome(bad)) for way, bad in sabotaged(GOOD[name]))
    print(f"\n{name}: {dict(found)}")
    assert found["drop", "harmless"] == found["duplicate", "harmless"] == 0
    assert found["swap", "refused"] > found["swap", "harmless"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_sabotage_of_larger_schedules(data):
    replicas = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    options = {
        "policy": data.draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble"])),
        "staleness": data.draw(st.sampled_from(["0", "ssp", "2bw"])),
        "agree": data.draw(st.booleans()),
    }
    plan = plan_of(replicas, data.draw(st.integers(1, 6)), route=data.draw(st.sampled_from(["split", "rotate"])))
    schedule = make_schedule(plan, **options)
    worker = data.draw(st.integers(0, len(schedule.orders) - 1))
    order = list(schedule.orders[worker])
    action = order.pop(data.draw(st.integers(0, len(order) - 1)))
    order.insert(data.draw(st.integers(0, len(order))), action)
    outcome(with_order(schedule, worker, order), num_batches=5)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(GOOD)), st.data())
def test_a_batch_too_early_or_too_late_is_refused_or_harmless(name, data):
    schedule = GOOD[name]
    worker = data.draw(st.integers(0, len(schedule.orders) - 1))
    order = list(schedule.orders[worker])
    at = data.draw(st.integers(0, len(order) - 1))
    order[at] = order[at]._replace(batch=order[at].batch + data.draw(st.sampled_from([-2, -1, 1, 2])))
    outcome(with_order(schedule, worker, order), num_batches=6)


def test_the_interpreter_itself_objects_to_what_the_checker_refuses():
    """Else "harmless" would mean nothing: of what is refused for its order, most goes wrong when carried out."""
    went_wrong = Counter()
    for _, bad in sabotaged(GOOD["ssp"]):
        if outcome_of_checker(bad) == "refused":
            try:
                carry_out(bad, 4, meet=True)
                went_wrong["no"] += 1
            except FaultError:
                went_wrong["yes"] += 1
    assert went_wrong["yes"] > 9 * went_wrong["no"]


def outcome_of_checker(bad: Schedule) -> str:
    try:
        check_schedule(bad)
    except ScheduleError:
        return "refused"
    return "accepted"


def edited(name: str, worker: int, old: str, new: str) -> Schedule:
    """A good schedule with a few words of one order replaced."""
    text = format_order(GOOD[name].orders[worker])
    assert old in text, text
    return with_order(GOOD[name], worker, parse_order(text.replace(old, new)))


@pytest.mark.parametrize(
    ("name", "worker", "old", "new", "message"),
    [
        ("split, 1f1b", 2, "F1.1 ", "", "worker 2, F1.1: it is missing"),
        ("split, 1f1b", 2, "F1.1 ", "F1.1 F1.1 ", "worker 2, F1.1: it stands in the order twice"),
        ("split, 1f1b", 2, "F1.1 ", "F1.1 F1.7 ", "worker 2, F1.7: nothing in the plan asks for it"),
        ("split, 1f1b", 2, "F1.0 ", "", "worker 2, F1.0: it is missing"),
        ("split, 1f1b", 0, "B0.1 G0", "G0 B0.1", "worker 0, G0: of batch n it must come after B0.1"),
        ("split, 1f1b", 0, "G0 U0", "U0 G0", "worker 0, U0: of batch n it must come after G0"),
        ("split, 1f1b", 0, "F0.0 SF0.0>2", "SF0.0>2 F0.0", "worker 0, SF0.0>2: of batch n it must come after F0.0"),
        ("split, gpipe, agree", 0, "A U0", "U0 A", "worker 0, U0: of batch n it must come after A"),
        ("zero-bubble", 1, "I1.0", "B1.0", "worker 1, W1.0: nothing in the plan asks for it|B1.0"),
        ("2bw", 0, "U0-1", "U0-2", r"worker 0, F0.0: of batch n it must come after U0 of batch n-2"),
    ],
)
def test_a_fault_is_named(name, worker, old, new, message):
    with pytest.raises(ScheduleError, match=message):
        check_schedule(edited(name, worker, old, new))


def test_transfers_in_another_sequence_are_refused_though_buffers_would_hide_it():
    """Worker 0 sends microbatch 0, then 1; worker 1 asks for 1 first."""
    schedule = make_schedule(plan_of((1, 1), 2), policy="gpipe")
    swapped = parse_order("RF0.1<0 RF0.0<0 F1.0 F1.1 B1.0 SB1.0>0 B1.1 SB1.1>0 U1")
    with pytest.raises(ScheduleError, match=r"worker 0, SF0.0>1: worker 1 issues another transfer of theirs"):
        check_schedule(with_order(schedule, 1, swapped))


def test_reductions_in_another_sequence_are_refused():
    schedule = GOOD["shared"]
    text = " ".join(map(str, schedule.orders[1]))
    order = text.replace(" G1", "").replace("G0", "G0 G1")
    with pytest.raises(ScheduleError, match=r"worker 0, G1: worker 1 issues another reduction or agreement"):
        check_schedule(with_order(schedule, 1, parse_order(order)))


def test_a_lock_is_shown_with_everybody_who_waits():
    """Worker 0 wants microbatch 0 back before it sends 1, worker 3 wants 1 before it sends 0 back."""
    good = make_schedule(plan_of((1, 2, 1), 2, route="rotate"))
    orders = """
        F0.0 SF0.0>1 RB1.0<1 B0.0 F0.1 SF0.1>2 RB1.1<2 B0.1 U0
        RF0.0<0 F1.0 SF1.0>3 RB2.0<3 B1.0 SB1.0>0 G1 U1
        RF0.1<0 F1.1 SF1.1>3 RB2.1<3 B1.1 SB1.1>0 G1 U1
        RF1.1<2 F2.1 B2.1 SB2.1>2 RF1.0<1 F2.0 B2.0 SB2.0>1 U2
    """
    with pytest.raises(ScheduleError) as caught:
        check_schedule(replace(good, orders=orders_of(drawn(orders))))
    assert "worker 0, B0.0: it waits for ever" in str(caught.value)
    assert "workers wait: 0 at B0.0 of batch 0, 1 at B1.0 of batch 0, 2 at F1.1 of batch 0, 3 at F2.1" in str(
        caught.value
    )


def test_more_activations_than_the_bound_are_refused():
    schedule = make_schedule(plan_of((1, 1), 4), policy="gpipe")
    tight = replace(schedule, plan=replace(schedule.plan, hold=3))
    with pytest.raises(
        ScheduleError, match=r"worker 0, F0.3: it is one activation more than the 3 that stage 0 may hold"
    ):
        check_schedule(tight)


def test_held_activations_are_counted_over_turns():
    loop = make_schedule(plan_of((1, 1)), staleness="ssp")
    check_schedule(replace(loop, plan=replace(loop.plan, hold=2)))
    with pytest.raises(ScheduleError, match="one activation more than the 1"):
        check_schedule(replace(loop, plan=replace(loop.plan, hold=1)))


def test_a_fault_shows_the_action_among_its_neighbours_and_the_grid():
    with pytest.raises(ScheduleError) as caught:
        check_schedule(edited("split, 1f1b", 0, "G0 U0", "U0 G0"))
    assert str(caught.value) == drawn("""
        worker 0, U0: of batch n it must come after G0, but stands before it
        0 │ … SF0.1>2 RB1.0<2 B0.0 RB1.1<2 B0.1 ▸U0◂ G0

        0-1 │ F0 F1 B0 B1 U
        2   │ F0 B0 F1 B1 U
    """)


def test_a_large_grid_is_cut():
    schedule = make_schedule(plan_of((40, 1), 100, route="rotate"))
    with pytest.raises(ScheduleError) as caught:
        check_schedule(with_order(schedule, 30, schedule.orders[30][1:]))
    lines = str(caught.value).splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 130
    assert any(line.startswith("30 │") for line in lines)


def test_endless_sequences_may_begin_their_turns_elsewhere():
    a, b = (1,), (2,)
    assert _first_difference([(a, 1), (b, 0)], [(b, 0), (a, 2)]) is None
    assert _first_difference([(a, 1), (b, 0)], [(b, 0), (a, 1)]) == 1
    assert _first_difference([(a, 0), (b, 0)], [(b, 0), (a, 0)]) == 0
    assert _first_difference([(a, 0)], []) == 0


def test_a_run_shorter_than_the_versions_is_refused():
    with pytest.raises(ScheduleError, match="2 weight versions in a run of 1 batches"):
        check_schedule(GOOD["ssp"], num_batches=1)
    check_schedule(GOOD["ssp"], num_batches=2)
