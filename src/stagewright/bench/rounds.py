"""What turns are, and what rounds of them tell: who stays, who is ahead, and whom they cannot tell apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations
from statistics import median, stdev
from typing import Any

Told = Mapping[str, Any]
"""A contender as contest.json has it."""

CLOSE = 1.06
"""Plans that take no more than so many times as long as the planner's choice, by a few rounds, may well be faster."""


def steps_for(seconds: float, turn_s: float) -> int:
    """How many steps fill a turn: two at least where they are not long, for the first finds others' data in caches."""
    return max(1 + (seconds < turn_s), min(20, round(turn_s / max(seconds, 1e-6))))


def stale_steps(steps: int) -> int:
    """How many gaps between updates count in a turn without a flush: two at least, for they come in bursts."""
    return max(2, steps)


def batches_for(steps: int, versions: int) -> int:
    """How many batches a turn of a pipeline without a flush has, in which so many gaps between updates count."""
    return steps + 2 * versions - 1


def steady(gaps: Sequence[float], steps: int, versions: int) -> Sequence[float]:
    """Of all gaps between updates those of the last turn in which its pipeline is full, and no longer fills.

    With K versions a forward waits for the update K batches before it. While a pipeline fills, K forwards run ahead,
    so the first K updates follow one another as they were let in, not as later ones will. And of n batches, counted
    from 0, the gap before update n − K is the last with a forward in it: then it drains, and updates come faster.

        K = 2    F0 F1 U0 F2 U1 F3 U2 U3        of four batches one gap counts, from U1 to U2
    """
    return gaps[len(gaps) - steps - versions + 1 : len(gaps) - versions + 1]


def family_of(told: Told) -> str:
    """What a contender competes with first: itself, or one peer with several numbers of microbatches."""
    return str(told.get("family", told["name"]))


def fastest(told: Sequence[Told], seconds: Mapping[str, float]) -> list[str]:
    """The contenders that stay: of a family, such as one peer with several numbers of microbatches, the fastest."""
    best: dict[str, str] = {}
    for each in told:
        name, family = each["name"], family_of(each)
        if family not in best or seconds[name] < seconds[best[family]]:
            best[family] = name
    return list(best.values())


def slope(turns_s: Sequence[float]) -> float:
    """Seconds of a step where each turn goes on where the one before ended: of all runs of turns the median of means.

    Updates of a pipeline without a flush come in bursts. One that comes late makes its turn long and the next one
    short, which a median of turns cannot see and a run of several evens out (Theil 1950, Sen 1968).
    """
    moments = [0.0, *accumulate(turns_s)]
    return median((moments[to] - moments[since]) / (to - since) for since, to in combinations(range(len(moments)), 2))


def times_as_long(own_s: Sequence[float], others_s: Sequence[float]) -> float:
    """How many times as long as another's one's steps are: the median of the rounds, in which they are neighbours."""
    return median(own / others for own, others in zip(own_s, others_s))


def known_to(own_s: Sequence[float], others_s: Sequence[float]) -> float:
    """How far that median may be off: its standard error, were the rounds' ratios scattered as by a normal law."""
    ratios = [own / others for own, others in zip(own_s, others_s)]
    return math.sqrt(math.pi / 2) * stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf


def close_ones(told: Sequence[Told], step_s: Mapping[str, Sequence[float]]) -> list[str]:
    """The planner's exact choice and the exact plans that may be faster; nobody where there are none.

    Where pipelines without a flush fill and drain in every turn, one more round of two takes as long as three of these.
    """
    exact = {each["name"]: each.get("is_chosen") for each in told if each.get("is_exact")}
    choice = next((name for name, is_chosen in exact.items() if is_chosen), None)
    if choice is None:
        return []
    rivals = [name for name in exact if name != choice and times_as_long(step_s[name], step_s[choice]) < CLOSE]
    return [choice, *rivals] if rivals else []
