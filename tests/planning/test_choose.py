"""From candidates to a choice: who is simulated, and who wins when several are as fast."""

from __future__ import annotations

from typing import Any

from stagewright.cluster import DeviceId
from stagewright.plan import Plan, Stage
from stagewright.planning.exact import Candidate, Found, Leaders
from stagewright.planning.groups import Savings, Setting
from stagewright.planning.search import _TIE, Choice, _plainest


def choice(num_stages: int, step_s: float, **other: Any) -> Choice:
    stages = tuple(Stage(layers=(f"layer{n}",), devices=(DeviceId(0, n),)) for n in range(num_stages))
    return Choice(plan=Plan(model="any", stages=stages, batch=8, **other), step_s=step_s, peak_bytes=(), limit="")


def test_of_equally_fast_plans_the_plainest_is_taken_and_else_the_fastest() -> None:
    deep, flat = choice(8, 1.0), choice(3, 1.0 + 0.9 * _TIE)
    assert _plainest([deep, flat, choice(2, 1.0 + 1.1 * _TIE)], _TIE) is flat
    assert _plainest([deep, flat], 0.0) is deep
    plain, odd = choice(2, 1.0, num_microbatches=4), choice(2, 1.0, num_microbatches=2, policy="zero-bubble")
    assert _plainest([odd, plain], _TIE) is plain
    assert _plainest([plain, choice(2, 1.0, num_microbatches=2)], _TIE).plan.num_microbatches == 2


def test_the_best_plans_of_few_stages_are_simulated_though_the_estimate_prefers_others() -> None:
    leaders = Leaders(most=2)

    def offer(sizes: tuple[int, ...], step_s: float, first: int = 1) -> None:
        edges = (0, *range(first, first + len(sizes) - 1), 20)
        groups = tuple(tuple(DeviceId(number, n) for n in range(size)) for number, size in enumerate(sizes))
        leaders.offer(Found(step_s, Candidate(edges, groups, Setting(batch=8)), (Savings(),) * len(sizes)))

    deep = (1,) * 5
    for sizes, step_s, first in ((deep, 1.0, 1), (deep, 1.1, 2), ((2, 1), 1.4, 1), ((2, 1), 1.3, 2), ((3, 1), 1.5, 1)):
        offer(sizes, step_s, first)
    offer((1, 1, 2), 1.2)
    offer((1,) * 6, 1.3)
    assert [found.step_s for found in leaders.found] == [1.0, 1.1]
    assert [found.step_s for found in leaders.to_score] == [1.0, 1.1, 1.3, 1.5, 1.2], "of 2-1 the better cut, and 3-1"
    for sizes, step_s in (((2, 2), 1.6), ((1, 2), 1.7), ((1, 1), 1.35)):
        offer(sizes, step_s)
    assert [found.step_s for found in leaders.to_score] == [1.0, 1.1, 1.3, 1.35, 1.5, 1.2], "three sizes of two stages"
