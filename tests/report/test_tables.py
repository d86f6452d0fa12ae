"""Tables on the page, and in Markdown."""

from __future__ import annotations

import re
from dataclasses import replace

from stagewright.record import Point, Record
from stagewright.report import Failure
from stagewright.report.cases import Results, find_pairs, make_cases
from stagewright.report.figures import percent, rate, seconds, size, times
from stagewright.report.tables import (
    Table,
    case_table,
    markdown_table,
    markdown_text,
    pair_table,
    reach_table,
    scaling_table,
)

from .synthetic import dp, make_record


def results(*records: Record, failures: tuple[Failure, ...] = ()) -> Results:
    return Results(cases=make_cases(records), failures=failures)


def column(table: Table, title: str) -> list[str]:
    place = [column.title for column in table.columns].index(title)
    return [" ".join(filter(None, (row.cells[place].text, row.cells[place].note))) for row in table.rows]


def test_figures_read_as_people_write_them() -> None:
    told = [seconds(value) for value in (4.2e-5, 0.1492, 3.409, 853.4, 3599.9, 7501)]
    assert told == ["42.0 µs", "149.2 ms", "3.41 s", "14 min 13 s", "1 h 00 min", "2 h 05 min"]
    assert [size(7.4e9), size(812)] == ["6.9 GiB", "812 B"]
    assert [rate(1502.6), rate(48.21), rate(3.414)] == ["1,503", "48.2", "3.41"]
    assert [percent(-0.0042), percent(0.00001), percent(0.031)] == ["−0.4 %", "0.0 %", "+3.1 %"]
    assert times(2.12).replace("\u00a0", " ") == "2.1 ×"


def test_the_series_columns_are_there() -> None:
    titles = [column.title for column in case_table(results(make_record())).columns]
    assert titles[:2] == ["case", "samples/s"], "what is looked for first"
    assert {"type", "data", "stages", "schedule", "memory first / last stage", "epoch time", "log"} <= set(titles)
    titles = [column.title for column in scaling_table(results(make_record())).columns]
    assert {"hosts", "devices a host", "rows a device", "throughput", "speedup"} <= set(titles)


def test_a_case_with_three_repetitions_shows_three_epochs_and_their_samples() -> None:
    told = column(case_table(results(*(make_record(seed=seed) for seed in range(3)))), "epoch time")
    assert re.fullmatch(r"14 min \d\d s · 14 min \d\d s · 14 min \d\d s 1,281,167 samples", told[0])


def test_a_case_with_seven_shows_their_median_and_range() -> None:
    table = case_table(results(*(make_record(seed=seed) for seed in range(7))))
    assert re.fullmatch(
        r"14 min \d\d s 14 min \d\d s to 14 min \d\d s; 1,281,167 samples", column(table, "epoch time")[0]
    )
    assert re.fullmatch(r"1,48\d 1,4\d\d–1,4\d\d in 7 runs", column(table, "samples/s")[0])


def test_memory_of_first_and_last_stage_and_what_the_driver_showed() -> None:
    table = case_table(results(make_record(), dp("dp", 700, 8)))
    assert column(table, "memory first / last stage") == [
        "6.9 / 3.1 GiB driver 7.4 / 3.6 GiB",
        "7.0 GiB driver 7.5 GiB",
    ]


def test_rows_of_different_work_are_marked_and_the_marks_explained() -> None:
    table = case_table(results(make_record(), make_record("amp", precision="fp16"), dp("dp", 700, 8)))

    assert dict(zip(column(table, "case"), column(table, "work"))) == {"vgg16-7-1": "A", "dp": "A", "amp": "B"}
    assert "different work" in table.notes[0]
    assert "B: VGG16, 224 samples a step, synthetic data, fp16" in table.notes


def test_rows_of_the_same_work_are_said_to_be_so() -> None:
    (note,) = case_table(results(make_record(), dp("dp", 700, 8))).notes
    assert note.startswith("All rows do the same work: VGG16, 224 samples a step")


def test_source_is_a_mark_and_a_word() -> None:
    table = case_table(results(*(make_record(source=source) for source in ("measured", "rehearsed", "simulated"))))  # type: ignore[arg-type]
    assert column(table, "source") == ["● measured", "◐ rehearsed", "◇ simulated"]


def test_a_failed_case_is_a_row_with_its_reason() -> None:
    table = case_table(results(make_record(), failures=(Failure(name="broken", reason="worker 3 died"),)))
    assert table.rows[-1].kind == "failed"
    assert table.rows[-1].reason == "worker 3 died"
    assert re.search(r"\| broken \| – \| ✕ failed", markdown_table(table))
    assert "worker 3 died" in markdown_table(table)


def test_hosts_devices_rows_and_speedup() -> None:
    one = dp("one", 100, 1, batch=32)
    two_hosts = dp("sixteen", 1400, 16, batch=512, hosts=2)
    table = scaling_table(results(one, two_hosts))

    assert column(table, "hosts") == ["1", "2"]
    assert column(table, "devices a host") == ["1", "8"]
    assert column(table, "rows a device") == ["32 batch 32", "32 batch 512"]
    assert column(table, "speedup")[1].startswith(("13.", "14."))
    assert column(table, "against") == ["itself", "one batch 512 against 32, both 32 a device"]


def test_markdown_cannot_be_broken_by_names() -> None:
    name = "a|b\n<script>*[x](y)`"
    text = markdown_table(case_table(results(make_record(name))))

    assert len({line.count("|") - line.count("\\|") for line in text.splitlines()}) == 1
    assert "<script>" not in text
    assert markdown_text("[x](y)") == "\\[x\\](y)"


def test_predicted_stands_beside_measured_with_the_error() -> None:
    records = make_record(samples_per_s=1488), make_record(source="simulated", samples_per_s=1501)
    table = pair_table(find_pairs(make_cases(records)))

    assert column(table, "predicted")[0].startswith("1,501 samples/s")
    assert re.match(r"1,4\d\d samples/s", column(table, "found")[0])
    assert re.fullmatch(r"\+\d\.\d %", column(table, "error")[0])
    assert (column(table, "memory found"), column(table, "memory error")) == (["6.9 / 3.1 GiB"], ["0.0 %"])


def test_notes_on_where_the_time_goes_stay_out_of_the_row_and_others_do_not() -> None:
    notes = (
        "simulated, since it needs 8 cards and none is here",
        "critical path: compute 99%",
        "reduce among 0:0-7: 1 ms",
    )
    (case,) = make_cases([make_record(source="simulated", notes=notes)])

    row = case_table(Results(cases=(case,))).rows[0]

    assert row.cells[0].note == "simulated, since it needs 8 cards and none is here"


def test_what_was_seen_from_outside_stands_beneath_the_memory() -> None:
    record = make_record()
    seen = {0: (7 << 30, 0.6), 1: (5 << 30, 0.33)}
    devices = tuple(
        replace(use, driver_bytes=seen[use.stages[0]][0], driver_share=seen[use.stages[0]][1]) for use in record.devices
    )
    (case,) = make_cases([replace(record, devices=devices)])

    row = case_table(Results(cases=(case,))).rows[0]

    assert any(cell.note == "driver 7.0 / 5.0 GiB, 60% / 33% busy" for cell in row.cells)


def losing(name: str, versions: tuple[int, int], pace: float, samples_per_s: float, seed: int) -> Record:
    """A run of 100 steps whose loss falls along a line, by `pace` a step."""
    points = tuple(
        Point(name="validation_loss", step=step, epoch=0.0, value=5 - pace * step) for step in range(0, 101, 10)
    )
    record = make_record(name, versions=versions, samples_per_s=samples_per_s, seed=seed, with_spans=False)
    return replace(record, points=points, step_s=(224 / samples_per_s,))


def test_time_to_loss_is_that_of_the_steps_it_takes() -> None:
    """The exact runs end at 1, 1.1 and 0.9; the stale ones are twice as fast and take 80 and 100 steps to come to 1."""
    exact = [losing("exact", (1, 1), pace, 1000, seed) for seed, pace in enumerate((0.04, 0.039, 0.041))]
    stale = [losing("stale", (2, 1), pace, 2000, seed) for seed, pace in enumerate((0.05, 0.04))]
    never = losing("worse", (2, 1), 0.03, 3000, 0)
    table = reach_table(results(*exact, *stale, never))
    assert table is not None
    assert column(table, "final loss") == ["1.0000 0.9000 to 1.1000", "0.5000 0.0000 to 1.0000", "2.0000"]
    assert column(table, "time to the loss") == [
        "22.13 s 21.85 s to 22.40 s; 1 of 3 runs never come to it", "10.08 s 8.96 s to 11.20 s",
        "– 1 of 1 runs never come to it",
    ]  # fmt: skip
    assert column(table, "against")[1].startswith("0.46")
    assert reach_table(results(stale[0])) is None, "nothing exact to compare with"


def test_rates_have_the_unit_that_all_cases_share() -> None:
    pictures, text = (
        replace(make_record(), sample_name="images"),
        replace(make_record(), name="text", sample_tokens=128),
    )
    samples, tokens = rate(pictures.samples_per_s), rate(text.samples_per_s * 128)
    for records, title, figures in (
        ([pictures], "images/s", [samples]), ([text], "tokens/s", [tokens]),
        ([pictures, text], "samples/s", [samples] * 2),
    ):  # fmt: skip
        assert [each.split()[0] for each in column(case_table(results(*records)), title)] == figures
