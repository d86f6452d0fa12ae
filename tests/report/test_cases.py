"""Records become cases, cases become comparisons, and nothing unlike is averaged or compared in silence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stagewright.errors import FileError, UsageError
from stagewright.record import Record
from stagewright.report.cases import (
    Case,
    Failure,
    Results,
    differences,
    find_base,
    find_pairs,
    make_cases,
    read_results,
    strategy,
)
from stagewright.report.summary import sentences

from .synthetic import dp, make_plan, make_record, save_all


def only_case(*records: Record) -> Case:
    (case,) = make_cases(records)
    return case


def test_repetitions_of_one_name_are_one_case_with_their_median() -> None:
    case = only_case(*(make_record(samples_per_s=rate, seed=1, with_spans=False) for rate in (1400, 1500, 1300)))

    assert len(case.records) == 3
    assert case.samples_per_s == sorted(case.rates)[1] == case.record.samples_per_s


def test_text_is_told_in_tokens() -> None:
    images, text = only_case(make_record()), only_case(dataclasses.replace(make_record(), sample_tokens=128))
    assert images.speed(10.0) == "10.0 samples/s"
    assert (text.speed(10.0), text.samples_per_s) == ("1,280 tokens/s", images.samples_per_s)
    assert text.speed().endswith(" tokens/s")
    assert f"at {text.speed()}" in " ".join(sentences(Results(cases=make_cases([text.record]))))


@pytest.mark.parametrize(
    "change",
    [{"batch": 448}, {"data": "imagenet"}, {"precision": "fp16"}, {"cluster": "other"}, {"policy": "gpipe"}],
    ids=str,
)
def test_records_of_one_name_that_differ_in_work_plan_or_cluster_are_never_averaged(change: dict[str, object]) -> None:
    assert len(make_cases([make_record(), make_record(**change)])) == 2  # type: ignore[arg-type]


def test_a_folder_is_read_at_any_depth_with_failures_clusters_and_logs(tmp_path: Path) -> None:
    record = make_record()
    record.save(tmp_path / "deep" / "down" / "a.1.record.json")
    (tmp_path / "deep" / "down" / "a.1.log").write_text("log")
    Failure(name="b", reason="out of memory").save(tmp_path / "b.failure.json")

    results = read_results(tmp_path)

    assert results.cases[0].record == record
    assert results.cases[0].log == tmp_path / "deep" / "down" / "a.1.log"
    assert [failure.reason for failure in results.failures] == ["out of memory"]


def test_a_folder_without_records_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \*\.record\.json") as caught:
        read_results(tmp_path)
    assert "stagewright bench" in str(caught.value.todo)
    with pytest.raises(FileError, match="no such folder"):
        read_results(tmp_path / "nowhere")


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.record.json").write_text("{")
    with pytest.raises(FileError, match=r"x\.record\.json: not JSON"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("replicas", "versions", "told"),
    [
        ((1,), None, "one device"),
        ((8,), None, "data parallel"),
        ((7, 1), (1, 1), "pipeline"),
        ((7, 1), (2, 1), "ssp"),
        ((5, 2, 1), (2, 2, 2), "2bw"),
        ((5, 2, 1), (4, 1, 1), "stale 4,1,1"),
    ],
)
def test_the_type_of_a_plan(replicas: tuple[int, ...], versions: tuple[int, ...] | None, told: str) -> None:
    assert strategy(make_plan(replicas, versions=versions)) == told


def test_what_differs_between_two_works_is_said() -> None:
    small, large = only_case(dp("a", 189, 1, batch=32)), only_case(dp("b", 1400, 8, batch=256))

    assert differences(large, small) == ("batch 256 against 32, both 32 a device",)
    assert differences(large, only_case(dp("c", 700, 8, batch=224))) == ("batch 256 against 224",)
    assert differences(small, small) == ()


def test_a_speedup_is_told_against_the_smallest_run_of_the_same_source() -> None:
    one, eight = dp("one", 189, 1, batch=32), dp("eight", 1400, 8, batch=256)
    predicted = dp("predicted", 1500, 8, batch=256, source="simulated")
    cases = make_cases([eight, one, predicted])

    bases = [find_base(case, cases) for case in cases]

    assert [base.name if base else None for base in bases] == ["one", "one", None]


def test_predictions_find_what_they_predicted_by_plan_or_by_name_and_never_across_works() -> None:
    measured, predicted = make_record(), make_record("another name", "simulated", samples_per_s=1501)
    other_work = make_record("vgg16-7-1", "simulated", samples_per_s=3000, precision="fp16")

    (pair,) = find_pairs(make_cases([measured, predicted, other_work]))

    assert pair.predicted.name == "another name"
    assert pair.rate_error == pytest.approx(1501 / measured.samples_per_s - 1)


def test_cases_of_one_name_stand_together_with_the_strongest_evidence_first() -> None:
    records = [make_record(source="simulated"), dp("dp", 700, 8), make_record(), make_record(source="rehearsed")]

    told = [(case.name, case.source) for case in make_cases(records)]

    assert told == [
        ("vgg16-7-1", "measured"),
        ("vgg16-7-1", "rehearsed"),
        ("vgg16-7-1", "simulated"),
        ("dp", "measured"),
    ]


class TestTheSentence:
    def told(self, *records: Record) -> str:
        text = sentences(Results(cases=make_cases(records)))[0]
        return text.replace("\u00a0", " ")

    def test_names_plan_gain_figures_repetitions_and_prediction(self) -> None:
        fast = [make_record(samples_per_s=1488, seed=seed) for seed in range(7)]
        slow = [dp("dp", 702, 8, seed=seed) for seed in range(7)]

        predicted = [make_record(source="simulated", samples_per_s=1501), dp("dp", 700, 8, source="simulated")]
        text = self.told(*fast, *slow, *predicted)

        assert text.startswith("VGG16 over 7 + 1 devices trains 2.1 × as fast as data parallelism (1,4")
        assert text.endswith(" samples/s, median of 7), as predicted (2.1 ×: 1,501 against 700).")

    def told_with(self, fast: float, slow: float, *, predicted: tuple[float, float]) -> str:
        """The sentence on two measured rates and what was predicted for them."""
        return self.told(
            make_record(samples_per_s=fast), dp("dp", slow, 8),
            make_record(source="simulated", samples_per_s=predicted[0]), dp("dp", predicted[1], 8, source="simulated"),
        )  # fmt: skip

    def test_a_prediction_of_the_opposite_order_is_called_one_though_the_rate_came_true(self) -> None:
        """The first rate is predicted to 1 %, and yet the claim, that it is the faster one, was not."""
        text = self.told_with(1090, 1000, predicted=(1095, 1180))
        assert text.endswith("; the opposite was predicted (0.93 ×: 1,095 against 1,180).")
        assert ", as predicted" not in text

    def test_a_gain_of_another_size_was_not_predicted(self) -> None:
        assert self.told_with(2000, 1000, predicted=(2000, 1600)).endswith(
            "; predicted were 1.3 ×: 2,000 against 1,600."
        )

    def test_a_gain_that_came_true_was_though_both_rates_were_off(self) -> None:
        text = self.told_with(2000, 1000, predicted=(2400, 1200))
        assert text.endswith(", as predicted (2.0 ×: 2,400 against 1,200).")

    def test_a_tie_was_predicted_where_a_tie_was(self) -> None:
        hero = [make_record(samples_per_s=rate, with_spans=False) for rate in (1000, 1100)]
        rival = [dp("dp", rate, 8) for rate in (1050, 950)]
        for predicted, told in ((1020, ", as predicted (1.02 ×"), (1400, "; predicted were 1.4 ×")):
            first, second = (
                make_record(source="simulated", samples_per_s=predicted),
                dp("dp", 1000, 8, source="simulated"),
            )
            assert told in self.told(*hero, *rival, first, second)

    def test_where_only_one_of_two_was_predicted_only_that_is_said(self) -> None:
        measured = make_record(samples_per_s=1488), dp("dp", 702, 8)
        good, bad = (make_record(source="simulated", samples_per_s=rate) for rate in (1501, 1800))
        assert self.told(*measured, good).endswith(", the former as predicted (1,501).")
        assert "; the former was to be 1,800 (+2" in self.told(*measured, bad)

    def test_a_prediction_that_failed_is_called_one(self) -> None:
        text = self.told(make_record(), make_record(source="simulated", samples_per_s=1800))
        assert "; predicted were 1,800 (+2" in text

    def test_a_prediction_for_another_cluster_is_not_mentioned(self) -> None:
        text = self.told(make_record(), make_record(source="simulated", samples_per_s=1490, cluster="other"))
        assert "predicted" not in text

    def test_a_simulation_does_not_claim_to_have_trained(self) -> None:
        text = self.told(make_record(source="simulated"), dp("dp", 700, 8, source="simulated"))
        assert "would train, by simulation, 2.1 × as fast" in text

    def test_runs_within_their_spread_are_not_told_apart(self) -> None:
        hero = [make_record(samples_per_s=rate, with_spans=False) for rate in (1000, 1100)]
        rival = [dp("dp", rate, 8) for rate in (1050, 950)]
        assert "as fast as data parallelism to within the spread" in self.told(*hero, *rival)

    def test_different_work_is_admitted(self) -> None:
        assert "not the same work: batch 224 against 256" in self.told(make_record(), dp("dp", 700, 8, batch=256))

    def test_a_measured_run_is_never_set_against_a_simulated_one(self) -> None:
        assert "as fast as" not in self.told(make_record(), dp("dp", 700, 8, source="simulated"))

    def test_failures_alone_are_said_to_be_all(self) -> None:
        only = Results(cases=(), failures=(Failure(name="a", reason="x"),))
        assert sentences(only) == ("1 case failed, and none gave a result.",)


def test_real_files_survive_the_round_trip(tmp_path: Path) -> None:
    records = [make_record(seed=seed) for seed in range(3)]
    save_all(records, tmp_path)

    (case,) = read_results(tmp_path).cases

    assert list(case.records) == records


def test_files_are_read_in_natural_order(tmp_path: Path) -> None:
    for devices in (16, 8, 1):
        dp(f"amp-{devices}", 100.0 * devices, devices).save(
            tmp_path / f"amp-{devices}" / f"amp-{devices}.1.record.json"
        )

    assert [case.name for case in read_results(tmp_path).cases] == ["amp-1", "amp-8", "amp-16"]


def test_several_families_of_one_model_are_told_apart() -> None:
    records = [make_record(), make_record("b", data="records", samples_per_s=900)]
    told = sentences(Results(cases=make_cases(records)))

    assert told[0].startswith("VGG16 (fp32, synthetic data) over 7 + 1 devices")
    assert told[1].startswith("VGG16 (fp32, records data) over 7 + 1 devices")


def save_run(record: Record, folder: Path) -> None:
    """What `train -o folder` leaves there."""
    dataclasses.replace(record, name=record.plan.model).save(folder / "record.json")
    (folder / "events.jsonl").write_text("{}\n")


def test_runs_are_read_from_their_own_folders_and_called_by_them(tmp_path: Path) -> None:
    save_run(make_record("a", samples_per_s=100.0), tmp_path / "first")
    save_run(make_record("b", samples_per_s=200.0), tmp_path / "deep" / "second")
    make_record("c", samples_per_s=300.0).save(tmp_path / "c.1.record.json")
    found = {case.name: case for case in read_results(tmp_path).cases}
    assert sorted(found) == ["c", "deep/second", "first"]
    assert found["first"].log == tmp_path / "first" / "events.jsonl"
    assert [case.name for case in read_results(tmp_path / "first").cases] == ["first"]


def test_a_run_that_was_saved_again_under_a_name_counts_once(tmp_path: Path) -> None:
    """As a suite does with every run, which keeps its folder beside it."""
    record = make_record("vgg16-dp", samples_per_s=100.0)
    save_run(record, tmp_path / "vgg16-dp" / "vgg16-dp.1")
    dataclasses.replace(record, command="a suite's").save(tmp_path / "vgg16-dp" / "vgg16-dp.1.record.json")
    (case,) = read_results(tmp_path).cases
    assert (case.name, len(case.records)) == ("vgg16-dp", 1)


def test_a_run_that_had_no_step_left_to_do_is_no_case(tmp_path: Path) -> None:
    save_run(dataclasses.replace(make_record("a"), step_s=(), spans=()), tmp_path / "nothing")
    save_run(make_record("b"), tmp_path / "something")
    found = read_results(tmp_path)
    assert [case.name for case in found.cases] == ["something"]
    assert [(failure.name, failure.reason) for failure in found.failures] == [
        ("nothing", "it was resumed after its last step: nothing was trained")
    ]
