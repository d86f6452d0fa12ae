"""Noise is told from change: exact p-values, intervals that hold the truth, and no verdict where none can be had."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.bench.compare import (
    Comparison,
    _judge,
    _rank_test,
    _ratio_interval,
    changed_facts,
    compare,
)
from tests.report.synthetic import dp, make_record


def save(folder: Path, name: str, rates: Sequence[float], **keys: object) -> None:
    for number, rate in enumerate(rates, 1):
        record = dp(name, rate, 8, seed=number, with_spans=False, **keys)
        scaled = replace(record, step_s=(record.step_samples / rate,))
        scaled.save(folder / f"{name}.{number}.record.json")


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        # tables of the exact distribution: all of one side above the other is 2 / (n + m over n)
        ((1, 2, 3), (4, 5, 6), 2 / 20),
        ((1, 2, 3, 4), (5, 6, 7, 8), 2 / 70),
        ((1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14), 2 / 3432),
        # W = 11 for 4 and 4 is reached or passed in 2 ways at either end
        ((1, 2, 3, 5), (4, 6, 7, 8), 4 / 70),
        ((1, 4), (2, 3), 1.0),
        ((5, 5, 5), (5, 5, 5), 1.0),
    ],
)
def test_the_rank_test_is_exact(first: Sequence[float], second: Sequence[float], p: float) -> None:
    assert _rank_test(first, second) == pytest.approx(p)
    assert _rank_test(second, first) == pytest.approx(p)


def test_large_samples_follow_the_normal_distribution() -> None:
    """12 against 12 has 2.7 million arrangements; the exact p of a complete separation is 7.4e-7, here near it."""
    apart = _rank_test(range(12), range(12, 24))
    mixed = _rank_test(range(0, 24, 2), range(1, 24, 2))
    assert 0 < apart < 1e-4
    assert mixed > 0.5


def test_chance_is_called_change_as_seldom_as_it_says() -> None:
    dice = random.Random(3)
    samples = [([dice.gauss(0, 1) for _ in range(5)], [dice.gauss(0, 1) for _ in range(5)]) for _ in range(2000)]
    share = sum(_rank_test(one, two) <= 0.05 for one, two in samples) / len(samples)
    # 5 and 5 have steps in p: the largest at or below 0.05 is 0.032
    assert share == pytest.approx(0.032, abs=0.012)


def test_the_interval_holds_the_ratio() -> None:
    dice = random.Random(4)
    held = 0
    for _ in range(200):
        one = [dice.gauss(100, 3) for _ in range(9)]
        two = [dice.gauss(110, 3) for _ in range(9)]
        low, high = _ratio_interval(one, two)
        held += low <= 1.1 <= high
    assert held / 200 > 0.88


def test_how_few_runs_are_too_few() -> None:
    """Even where all of one side lie above all of the other."""
    assert _rank_test((1, 2, 3), (4, 5, 6)) > 0.05 > _rank_test((1, 2, 3, 4), (5, 6, 7, 8))
    assert _rank_test((1,), range(2, 9)) > 0.05


def test_of_many_cases_a_small_p_alone_is_no_change() -> None:
    """With 20 cases, one p of 0.03 is what chance gives; 20 of them are not."""

    def cases(count: int, p: float) -> list[Comparison]:
        return [Comparison(name="x", source="measured", verdict="noise", ratio=1.1, p=p)] * count

    assert {one.verdict for one in _judge([*cases(1, 0.03), *cases(19, 0.8)])} == {"noise"}
    assert {one.verdict for one in _judge(cases(20, 0.03))} == {"faster"}


def test_two_folders(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    save(a, "quicker", (100, 101, 102, 103, 104))
    save(b, "quicker", (110, 111, 112, 113, 114))
    save(a, "slower", (100, 101, 102, 103, 104))
    save(b, "slower", (90, 91, 92, 93, 94))
    save(a, "wavers", (100, 102, 104, 106, 108))
    save(b, "wavers", (101, 103, 105, 107, 99))
    save(a, "few", (100, 101))
    save(b, "few", (200, 201))
    save(a, "work", (100, 101, 102, 103), batch=224)
    save(b, "work", (100, 101, 102, 103), batch=448)
    save(a, "computed", (100,), source="simulated")
    save(b, "computed", (101,), source="simulated")
    save(a, "gone", (100,))
    save(b, "new", (100,))

    found = {one.name: one for one in compare(a, b)}

    assert {name: one.verdict for name, one in found.items()} == {
        "quicker": "faster",
        "slower": "slower",
        "wavers": "noise",
        "few": "too few runs",
        "work": "not the same work",
        "computed": "faster",
        "gone": "only in A",
        "new": "only in B",
    }
    assert found["quicker"].ratio == pytest.approx(112 / 102)
    assert found["quicker"].low is not None
    assert found["quicker"].low > 1
    assert found["work"].why == "batch 448 against 224"
    assert {one.verdict for one in compare(a, a) if one.source == "simulated"} == {"same"}


def test_what_differs_between_the_environments_is_told(tmp_path: Path) -> None:
    for folder, commit in (("a", "1"), ("b", "2")):
        record = replace(make_record(), environment={"commit": commit, "driver": "550"})
        record.save(tmp_path / folder / "x.record.json")

    assert changed_facts(tmp_path / "a", tmp_path / "b") == [("commit", "1", "2")]
