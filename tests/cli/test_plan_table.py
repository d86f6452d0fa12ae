"""The table of `plan`: rows that can be told apart, the best one first and not slower than any below it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from stagewright.cli.plan import _passed_over, _rows, _tell_apart
from stagewright.cluster import parse_placement
from stagewright.plan import Plan, Stage
from stagewright.planning.search import Choice, Search

from .conftest import Run


def make_plan(placement: str = "0:0-6.0:7", cut: str = "b", **more: object) -> Plan:
    names = ("a", "b", "c", "d")
    groups = parse_placement(placement)
    edges = (0, *([names.index(cut)] if len(groups) == 2 else range(1, len(groups))), len(names))
    stages = tuple(
        Stage(layers=names[first:last], devices=devices) for first, last, devices in zip(edges, edges[1:], groups)
    )
    return Plan(model="m", stages=stages, batch=64, **more)  # type: ignore[arg-type]


def choice(plan: Plan, step_s: float) -> Choice:
    return Choice(plan=plan, step_s=step_s, peak_bytes=(1 << 30,) * len(plan.stages), limit="compute of stage 0")


def search(best: Choice, *others: Choice, data_parallel: Choice | None = None) -> Search:
    return Search(
        best=best, others=others, data_parallel=data_parallel, why_no_data_parallel="", reason="", num_plans=1,
        num_simulated=0, seconds=0.1,
    )  # fmt: skip


def test_plans_of_one_shape_are_told_apart_by_what_differs_and_no_more() -> None:
    first = make_plan(num_microbatches=2)
    stale = replace(first, stages=(replace(first.stages[0], versions=2), first.stages[1]))
    assert _tell_apart([first, make_plan(cut="c")]) == ["7-1 cut at b", "7-1 cut at c"]
    assert _tell_apart([first, replace(first, num_microbatches=1), make_plan(cut="c")]) == [
        "7-1 cut at b, 2 microbatches", "7-1 cut at b, 1 microbatch", "7-1 cut at c",
    ]  # fmt: skip
    assert _tell_apart([first, replace(first, route="rotate", policy="gpipe"), stale]) == [
        "7-1 cut at b, split, 1f1b, exact",
        "7-1 cut at b, rotate, gpipe, exact",
        "7-1 cut at b, split, 1f1b, versions 2,1",
    ]
    assert _tell_apart([first, make_plan("0:0,0:2-7.0:1", num_microbatches=2)]) == [
        "7-1 cut at b, on 0:0-6.0:7", "7-1 cut at b, on 0:0,0:2-7.0:1",
    ]  # fmt: skip


def test_plans_that_are_the_same_are_one_row() -> None:
    plain = choice(make_plan("0:0-7"), 2.0)
    found = search(plain, choice(make_plan(), 3.0), choice(make_plan(), 3.0), data_parallel=plain)
    assert [label for _, label in _rows(found)] == ["data parallel", "7-1 cut at b"]


def test_no_row_is_faster_than_the_one_that_is_marked() -> None:
    """With one stage more it is 2 % faster, which is not enough to be chosen: that is said, and it is no row."""
    deep = choice(make_plan("0:0-5.0:6.0:7"), 0.98)
    found = search(choice(make_plan(), 1.0), deep, choice(make_plan(cut="c"), 1.1))
    assert [one.step_s for one, _ in _rows(found)] == [1.0, 1.1]
    assert list(_passed_over(found)) == ["6-1-1 cut at b, c would be 2.0% faster (980.0 ms): too little for 3 stages."]


@pytest.mark.parametrize("words", ["alexnet --batch 512 --staleness any", "vgg16 --batch 224 --staleness ssp"])
def test_as_it_is_printed(words: str, run: Run) -> None:
    status, out, _ = run("plan", *words.split(), "--cluster", "titan-v-8")
    assert status == 0
    lines = [re.split(r"\s{2,}", line.strip("▸ ").rstrip()) for line in out.splitlines() if " ms " in line]
    labels, steps = [line[0] for line in lines], [float(line[1].split()[0]) for line in lines if len(line) > 2]
    assert len(lines) >= 4
    assert len(set(labels)) == len(labels)
    assert steps[0] == min(steps)
    assert out.count("▸") == 1


def test_text_is_planned_and_simulated_in_tokens_and_images_in_images(run: Run) -> None:
    for model, unit, step in (("gpt", "tokens/s", "16 samples a step"), ("tiny-cnn", "images/s", "16 images a step")):
        _, planned, _ = run("plan", model, "--batch", "16", "--cluster", "titan-v-8")
        _, simulated, _ = run("simulate", model, "--batch", "16", "--cluster", "titan-v-8")
        assert unit in planned
        assert step in planned
        assert unit in simulated
        assert ("epoch" in simulated) == (model == "tiny-cnn")
