"""Suites: matrices and inheritance are written out, and every mistake is found before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagewright.bench.suite import SuiteFile, load_suite, make_suite
from stagewright.errors import FileError, StagewrightError, UsageError
from stagewright.schema import _load_yaml

HEAD = {"format": "stagewright.suite", "version": 1, "name": "s"}


def suite_of(*cases: dict[str, Any], **keys: Any) -> Any:
    return make_suite({**HEAD, **keys, "cases": list(cases)})


def test_a_matrix_is_written_out_in_order_without_what_is_left_out() -> None:
    text = """
    name: '{model}-{ratio}-{schedule}'
    like: [vgg, split]
    matrix:
      ratio: [3:1, 10:1]
      schedule: [1f1b, dynamic]
    without: [{ratio: 10:1, schedule: dynamic}]
    """
    settings = {"vgg": {"model": "vgg16", "batch": 14}, "split": {"placement": "0:0-6.0:7", "staleness": "ssp"}}

    cases = suite_of(_load_yaml(text), settings=settings).cases  # type: ignore[arg-type]

    assert [case.name for case in cases] == ["vgg16-3-1-1f1b", "vgg16-3-1-dynamic", "vgg16-10-1-1f1b"]
    assert {case.plan.placement for case in cases} == {"0:0-6.0:7"}
    assert [case.plan.ratio for case in cases] == ["3:1", "3:1", "10:1"]


def test_a_case_wins_over_what_it_is_like_and_that_over_the_defaults() -> None:
    settings = {
        "base": {"model": "mlp", "batch": 8, "steps": 30},
        "more": {"like": "base", "steps": 40},
    }
    case = {"name": "a", "like": "more", "warm_up": 7}
    (made,) = suite_of(case, settings=settings, defaults={"steps": 10, "batch": 4, "precision": "fp16"}).cases

    assert (made.model, made.plan.batch, made.steps, made.warm_up, made.precision) == ("mlp", 8, 40, 7, "fp16")


def test_the_settings_that_a_matrix_names_come_after_the_cases_own() -> None:
    settings = {"small": {"batch": 8}, "large": {"batch": 16}, "mlp": {"model": "mlp", "batch": 4}}
    cases = suite_of({"name": "a-{batch}", "like": "mlp", "matrix": {"like": ["small", "large"]}}, settings=settings)

    assert [(case.name, case.plan.batch) for case in cases.cases] == [("a-8", 8), ("a-16", 16)]


def test_a_value_of_a_matrix_may_be_several_keys_under_a_name() -> None:
    places = [{"name": 1, "devices": 1}, {"name": "2x8", "hosts": 2, "devices": 8}]
    cases = suite_of({"name": "dp-{place}", "model": "mlp", "batch": 32, "matrix": {"place": places}}).cases

    assert [(case.name, case.placement, case.num_hosts) for case in cases] == [
        ("dp-1", "0:0", 1),
        ("dp-2x8", "0:0-7,1:0-7", 2),
    ]


def test_a_matrix_that_the_name_does_not_mention_is_appended_to_it() -> None:
    cases = suite_of({"name": "a", "model": "mlp", "matrix": {"batch": [8, 16], "devices": [1, 2]}}).cases
    assert [case.name for case in cases] == ["a-8-1", "a-8-2", "a-16-1", "a-16-2"]


GOOD = {"name": "a", "model": "mlp", "batch": 8}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"cases": []}, "key cases is"),
    ({"cases": [{"model": "mlp"}]}, "case number 1 has no name"),
    ({"cases": [GOOD, GOOD]}, "two cases are named 'a'"),
    ({"cases": [GOOD, {**GOOD, "name": "A"}]}, "two cases are named 'a'"),
    ({"cases": [{**GOOD, "name": "../a"}]}, "key name is '../a'"),
    ({"cases": [{**GOOD, "model": "vg16"}]}, "case a: no model is called 'vg16'"),
    ({"cases": [{**GOOD, "bach": 8}]}, "case a: key bach is unknown"),
    ({"cases": [{**GOOD, "steps": "ten"}]}, "case a: key steps is 'ten'"),
    ({"cases": [{**GOOD, "batch": "8"}]}, "case a: key batch is '8'"),
    ({"cases": [{**GOOD, "steps": 4, "warm_up": 3}]}, "warm_up is 3 of 4 steps"),
    ({"cases": [{**GOOD, "run": "dream"}]}, "key run is 'dream'"),
    ({"cases": [{**GOOD, "precision": "fp8"}]}, "key precision is 'fp8'"),
    ({"cases": [{**GOOD, "placement": "0:0-"}]}, "case a: placement part '0:0-'"),
    ({"cases": [{**GOOD, "placement": "0:0.0:1", "devices": 2}]}, "devices and placement are both given"),
    ({"cases": [{**GOOD, "placement": "0:0.1:0", "hosts": 3}]}, "hosts is 3, but the placement 0:0.1:0 needs 2"),
    ({"cases": [{**GOOD, "placement": "0:0.0:1", "ratio": "1:2:3"}]}, "--ratio 1:2:3 makes 3 stages"),
    ({"cases": [{**GOOD, "placement": "0:0.0:1", "cut": "fc9"}]}, "fc9"),
    ({"cases": [{**GOOD, "batch_per_device": 8}]}, "--batch and --batch-per-device are both given"),
    ({"cases": [{"name": "a", "model": "mlp"}]}, "case a: the batch is not given"),
    ({"cases": [{**GOOD, "staleness": "old"}]}, "old"),
    ({"cases": [{**GOOD, "schedule": "2f2b"}]}, "case a: key schedule is '2f2b'"),
    ({"cases": [{**GOOD, "microbatches": 9}]}, "--microbatches is 9, but the batch has 8 rows"),
    ({"cases": [{**GOOD, "like": "b"}]}, "no setting is named 'b'"),
    ({"cases": [{**GOOD, "like": "b"}], "settings": {"b": {"like": "c"}, "c": {"like": "b"}}}, "b → c → b"),
    ({"cases": [{**GOOD, "like": [1]}]}, "key like is"),
    ({"cases": [{**GOOD, "matrix": {"batch": [1]}}]}, "key batch is given and is in the matrix"),
    ({"cases": [{**GOOD, "matrix": {"steps": 9}}]}, "key matrix.steps is 9"),
    ({"cases": [{**GOOD, "matrix": [1]}]}, "key matrix is"),
    ({"cases": [{**GOOD, "matrix": {"steps": [9]}, "without": [{"data": "x"}]}]}, "key without holds"),
    ({"cases": [{**GOOD, "name": "a-{what}"}]}, "no key of it"),
    ({"cases": [GOOD], "cluster": "moon"}, "no cluster is named 'moon'"),
    ({"cases": [GOOD], "repetitions": 0}, "key repetitions is 0"),
    ({"cases": [GOOD], "colour": "red"}, "key colour is unknown"),
    ({"cases": [GOOD], "version": 2}, "version 2 of stagewright.suite is newer"),
    ({"cases": [GOOD], "format": "stagewright.plan"}, "key format is 'stagewright.plan'"),
]


@pytest.mark.parametrize(("keys", "told"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_a_mistake_is_found_and_named(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(StagewrightError, match=told) as caught:
        make_suite({**HEAD, **keys}, where="s.yaml")
    assert caught.value.what.startswith("s.yaml: ")


def test_the_SuiteFile_are_right_and_have_the_series_rows() -> None:
    assert {"dp-vs-ssp", "resnet50-amp", "pipedream"} <= SuiteFile.ready_made().keys()
    names = {case.name for case in load_suite("dp-vs-ssp").cases}
    for model in ("alexnet-of", "vgg16", "resnet50"):
        for data in ("synthetic", "records"):
            assert {f"{model}-dp-{place}-{data}" for place in ("1", "8", "2x8")} <= names
        ratios = ("3-1", "10-1", "15-1", "11-7")
        orders = ("1f1b-synthetic", "dynamic-synthetic", "1f1b-records")
        assert {f"{model}-ssp-{ratio}-{order}" for ratio in ratios for order in orders} <= names
    amp = load_suite("resnet50-amp").cases
    assert {len(case.make_plan().devices) for case in amp} == {1, 8, 16, 32}
    assert {case.precision for case in amp} == {"fp16"}
    assert {case.plan.staleness for case in load_suite("pipedream").cases} == {None, "ssp", "0"}


def test_a_suite_that_is_not_there_says_which_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no suite is named 'nothing'; ready-made: dp-vs-ssp"):
        load_suite("nothing")
    with pytest.raises(FileError, match="No such file"):
        load_suite(str(tmp_path / "nothing.yaml"))
