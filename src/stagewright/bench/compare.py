"""Two folders of results against one another: which cases changed, and which only wavered.

A repetition is one observation. Whether two cases differ is asked of the exact rank test (Wilcoxon, "Individual
comparisons by ranking methods", 1945; Mann and Whitney, 1947), which supposes nothing about how times are distributed;
how much, of a bootstrap interval of the ratio of medians (Efron, "Bootstrap methods", 1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb, erfc, sqrt
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from stagewright.report.cases import Case, differences, plan_key, read_results

_Verdict = Literal["faster", "slower", "noise", "same", "too few runs", "not the same work", "only in A", "only in B"]
_LEVEL = 0.05
"""How often, of all cases that did not change, one may be called changed (Benjamini and Hochberg 1995: of those called
changed, how many may not have)."""


class Comparison(NamedTuple):
    """One case in both folders; what `--json` prints."""

    name: str
    source: str
    verdict: _Verdict
    before: float | None = None
    after: float | None = None
    """Median images a second."""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    """The interval that holds the ratio 95 times in 100."""
    p: float | None = None
    runs: tuple[int, int] = (0, 0)
    why: str = ""


def compare(before: Path, after: Path) -> list[Comparison]:
    """Every case that is in either folder; verdicts take account of how many cases were looked at."""
    first, second = (
        {(case.name, case.source): case for case in read_results(folder).cases} for folder in (before, after)
    )
    return _judge([
        _compare_cases(first[key], second[key]) if key in first and key in second
        else Comparison(*key, "only in A" if key in first else "only in B")
        for key in dict.fromkeys((*first, *second))
    ])  # fmt: skip


def _compare_cases(one: Case, two: Case) -> Comparison:
    """One case before and after; no verdict yet where chance may explain the difference."""
    made = Comparison(one.name, one.source, "noise", runs=(len(one.rates), len(two.rates)))
    # Another machine is what may be compared; other work is not.
    unlike = [text for text in differences(two, one) if not text.startswith("cluster ")]
    unlike += [] if plan_key(one.plan) == plan_key(two.plan) else ["the plans differ"]
    if unlike:
        return made._replace(verdict="not the same work", why="; ".join(unlike))
    ratio = two.gain(one)
    made = made._replace(before=one.samples_per_s, after=two.samples_per_s, ratio=ratio)
    if one.source == "simulated":
        # Nothing wavers in a simulation: any difference is a change.
        return made._replace(verdict="same" if abs(ratio - 1) <= 1e-9 else "faster" if ratio > 1 else "slower")
    if 2 / comb(sum(made.runs), made.runs[0]) > _LEVEL:  # the smallest p that the rank test can give
        why = "no result could tell so few runs from chance: 4 on either side can"
        return made._replace(verdict="too few runs", why=why)
    low, high = _ratio_interval(one.rates, two.rates)
    return made._replace(low=low, high=high, p=_rank_test(one.rates, two.rates))


def _judge(made: Sequence[Comparison]) -> list[Comparison]:
    """The verdicts: of m tested cases those k with the smallest p are changes, k the largest with p ≤ 0.05 · k / m."""
    ranked = sorted(one.p for one in made if one.p is not None)
    limit = max((p for place, p in enumerate(ranked, 1) if p <= _LEVEL * place / len(ranked)), default=-1.0)
    return [
        one if one.p is None or one.ratio is None or one.p > limit
        else one._replace(verdict="faster" if one.ratio > 1 else "slower")
        for one in made
    ]  # fmt: skip


def _rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """How probable a difference of ranks at least this large is, if both come from one distribution; two-sided.

    Σ ranks of `first` against all ways to deal the same ranks, ties shared, to so many observations.
    """
    _, places, counts = np.unique((*first, *second), return_inverse=True, return_counts=True)
    # From 1; equal values share the mean of theirs.
    ranks: list[float] = (np.cumsum(counts) - (counts - 1) / 2)[places].tolist()
    number, total = len(first), len(ranks)
    expected = number * sum(ranks) / total
    found = abs(sum(ranks[:number]) - expected)
    if comb(total, number) <= 200_000:  # beyond, the normal distribution is near enough
        sums = (sum(chosen) for chosen in combinations(ranks, number))
        far = [abs(each - expected) >= found - 1e-9 for each in sums]
        return sum(far) / len(far)
    spread = sum((rank - sum(ranks) / total) ** 2 for rank in ranks)
    variance = spread * number * (total - number) / (total * (total - 1))
    return erfc(max(found - 0.5, 0.0) / sqrt(2 * variance)) if variance else 1.0


def _ratio_interval(first: Sequence[float], second: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Where the ratio of the medians lies, by drawing from each side's observations over and over; seed fixed."""
    dice = np.random.default_rng(0)
    one, two = (np.median(dice.choice(np.array(side), (4000, len(side))), axis=1) for side in (first, second))
    low, high = np.quantile(two / one, ((1 - share) / 2, (1 + share) / 2))
    return float(low), float(high)


def changed_facts(before: Path, after: Path) -> list[tuple[str, str, str]]:
    """What differs between the environments of two folders: (fact, before, after)."""
    first, second = _facts_of(before), _facts_of(after)
    keys = sorted(first.keys() | second.keys())
    return [(key, first.get(key, ""), second.get(key, "")) for key in keys if first.get(key) != second.get(key)]


def _facts_of(folder: Path) -> dict[str, str]:
    """The facts of a folder's records; several values of one fact stand side by side."""
    found: dict[str, dict[str, None]] = {}
    for record in (record for case in read_results(folder).cases for record in case.records):
        for key, value in record.environment.items():
            found.setdefault(key, {})[value] = None
    return {key: " | ".join(values) for key, values in found.items()}
