"""The harness with real processes: each repetition counted once, whatever is killed; failures are rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stagewright.bench.harness import Session, _locked, rows_of, run_suite
from stagewright.bench.machine import Here, _descendants, capture
from stagewright.bench.suite import make_suite
from stagewright.bench.task import Choices, Task, make_tasks
from stagewright.errors import UsageError
from stagewright.record import Record
from stagewright.report import make_report
from stagewright.report.cases import Failure, read_results

ROOT = Path(__file__).parents[2]
HERE = Here(num_cards=0, is_root=False)
PRETEND = (sys.executable, "-m", "tests.bench.pretend")
FACTS = {"host": "h", "cpu": "c", "commit": "1"}


def tasks_of(*models: str, choices: Choices | None = None, here: Here = HERE, **keys: Any) -> tuple[Task, ...]:
    cases = [
        {"name": f"case-{model}", "model": model, "batch": 8, "devices": 1, "device": "cpu", **keys} for model in models
    ]
    plain = {"format": "stagewright.suite", "version": 1, "name": "small", "cluster": "titan-v-8", "cases": cases}
    return make_tasks(make_suite(plain), choices or Choices(), here, lambda words: None)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Runs that pretend, and tell in `begun` what they did."""
    monkeypatch.setenv("PRETEND_LOG", str(tmp_path / "begun"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "src"), str(ROOT))))
    return Session(facts=FACTS, program=PRETEND)


def begun(folder: Path) -> list[str]:
    path = folder / "begun"
    return (
        [line.split()[1] for line in path.read_text().splitlines() if line.startswith("begin")] if path.exists() else []
    )


def test_repetitions_are_interleaved_and_counted_and_kept(tmp_path: Path, session: Session) -> None:
    tasks = tasks_of("mlp", "alexnet")

    progress = list(run_suite("small", tasks, tmp_path / "out", 3, session))

    assert begun(tmp_path) == [f"case-{model}.{number}" for number in (1, 2, 3) for model in ("mlp", "alexnet")]
    assert [(one.num_done, one.num_runs) for one in progress] == [(number, 6) for number in range(1, 7)]
    assert progress[0].left_s is not None
    rows = rows_of(tasks, tmp_path / "out")
    assert [(row.name, row.repetitions, row.reason) for row in rows] == [("case-mlp", 3, ""), ("case-alexnet", 3, "")]
    low, middle, high = rows[0].low, rows[0].images_per_s, rows[0].high
    assert low is not None
    assert middle is not None
    assert high is not None
    assert low < middle < high
    names = zipfile.ZipFile(tmp_path / "out" / "case-mlp" / "case-mlp.zip").namelist()
    ends = (".record.json", ".log", ".environment.json", ".samples.csv")
    assert {f"case-mlp/case-mlp.{number}{end}" for number in (1, 2, 3) for end in ends} <= set(names)


def test_a_record_has_the_cases_name_command_environment_and_what_was_seen_from_outside(
    tmp_path: Path, session: Session
) -> None:
    (task,) = tasks_of("mlp", steps=7)
    (progress,) = run_suite("small", (task,), tmp_path / "out", 1, session)

    record = progress.result
    assert isinstance(record, Record)
    assert record.name == "case-mlp"
    assert record.command == (
        "stagewright train mlp --batch 8 --placement 0:0 --precision fp32 --data synthetic --steps 7 --warm-up 5 "
        "--no-save-final --device cpu"
    )
    assert record.environment == {"cpu": "c", "commit": "1"}
    assert record.devices[0].driver_bytes is not None
    assert record.devices[0].driver_bytes > 1 << 20
    log = (tmp_path / "out" / "case-mlp" / "case-mlp.1.log").read_text()
    assert log.startswith(f"$ {record.command}\n")


def test_failures_are_rows_with_their_reasons_and_the_suite_goes_on(tmp_path: Path, session: Session) -> None:
    tasks = (*tasks_of("resnet18", "vgg16", "resnet101", "mlp"), *tasks_of("gpt2-small", limit_s=1.0))

    list(run_suite("small", tasks, tmp_path / "out", 2, session))

    reasons = {row.model: row.reason for row in rows_of(tasks, tmp_path / "out")}
    assert reasons == {
        "resnet18": "the loss of step 1 is nan; lower the learning rate",
        "vgg16": "signal 9 ended it",
        "resnet101": "it ended well but left no record.json: with --nodes its folder must be one that all hosts share",
        "gpt2-small": "it did not end within 1 s (limit_s)",
        "mlp": "",
    }
    # what has only failed is not tried again; what is ended early may not have got as far as to say that it began
    names = [name for name in begun(tmp_path) if "gpt2" not in name]
    assert Counter(names) == Counter([f"case-{model}.1" for model in reasons if "gpt2" not in model] + ["case-mlp.2"])
    results = read_results(tmp_path / "out")
    assert {failure.name for failure in results.failures} == {f"case-{m}" for m in reasons if m != "mlp"}
    page = make_report(tmp_path / "out", tmp_path / "page").markdown.read_text()
    assert "the loss of step 1 is nan" in page


RUNNER = """
import sys
from pathlib import Path
from tests.bench.test_harness import FACTS, PRETEND, Session, run_suite, tasks_of
tasks = tasks_of("mlp", "alexnet", "resnet50", "resnet18")
for one in run_suite("small", tasks, Path(sys.argv[1]), 5, Session(facts=FACTS, program=PRETEND)):
    print(one.task.case.name, one.number, flush=True)
"""


@pytest.mark.timeout(240)
def test_a_suite_that_is_killed_twice_counts_every_repetition_once(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the whole process group, in the middle of a run; then of the harness alone."""
    monkeypatch.setenv("PRETEND_S", "0.15")
    out = tmp_path / "out"

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", RUNNER, str(out)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(runs: int) -> None:
        deadline = time.monotonic() + 60
        while len(begun(tmp_path)) < runs:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    first = start()
    wait_for(4)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=30)
    second = start()
    wait_for(len(begun(tmp_path)) + 3)
    os.kill(second.pid, signal.SIGKILL)
    second.communicate(timeout=30)
    third = start()
    told, _ = third.communicate(timeout=120)

    assert third.returncode == 0
    cases = read_results(out).cases
    assert {case.name: len(case.records) for case in cases} == {f"case-{m}": 5 for m in ("mlp", "alexnet", "resnet50")}
    assert len(told.splitlines()) < 16
    again = Counter(begun(tmp_path))
    # each kill cost one run at most, which was begun again
    assert sum(again.values()) - len(again) <= 2
    assert len(again) == 16
    fourth = start()
    assert fourth.communicate(timeout=30)[0] == ""


def test_a_run_does_not_outlive_a_harness_that_is_killed(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETEND_S", "60")
    running = subprocess.Popen([sys.executable, "-c", RUNNER, str(tmp_path / "out")], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not begun(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    family = _descendants(running.pid)
    running.kill()
    running.wait(timeout=10)

    assert len(family) >= 2  # the fork server, the run
    while any(Path(f"/proc/{each}/exe").exists() for each in family):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.timeout(120)
def test_real_runs_are_forked_and_every_worker_is_seen(tmp_path: Path) -> None:
    """Two runs of two workers each: each worker has figures of its own."""
    keys = {"devices": 2, "steps": 300, "warm_up": 5}
    tasks = tasks_of("mlp", **keys)

    progress = list(run_suite("small", tasks, tmp_path / "out", 2, Session(facts=FACTS)))

    records = [one.result for one in progress]
    assert all(isinstance(record, Record) for record in records), records
    for record in records:
        assert isinstance(record, Record)
        assert [use.driver_bytes is not None and use.driver_bytes > 1 << 20 for use in record.devices] == [True, True]
    logs = [(tmp_path / "out" / "case-mlp" / f"case-mlp.{number}.log").read_text() for number in (1, 2)]
    assert all('"images_per_s"' in log for log in logs)


def test_results_of_another_suite_setting_machine_or_commit_are_not_added_to(tmp_path: Path, session: Session) -> None:
    out = tmp_path / "out"
    list(run_suite("small", tasks_of("mlp"), out, 1, session))

    def told(suite: str = "small", facts: dict[str, str] = FACTS, **keys: Any) -> str:
        with pytest.raises(UsageError) as caught:
            list(run_suite(suite, tasks_of("mlp", **keys), out, 1, Session(facts=facts, program=PRETEND)))
        return caught.value.what

    assert told("large").endswith("holds results of the suite small, not of large")
    assert told(facts={**FACTS, "commit": "2"}).endswith("was begun with commit 1, and here it is 2")
    assert "which is now `stagewright train mlp --batch 8 --placement 0:0 --precision fp16" in told(precision="fp16")
    assert begun(tmp_path) == ["case-mlp.1"]


def test_more_repetitions_and_more_cases_may_be_added(tmp_path: Path, session: Session) -> None:
    out = tmp_path / "out"
    list(run_suite("small", tasks_of("mlp"), out, 1, session))
    list(run_suite("small", tasks_of("mlp", "alexnet"), out, 2, session))

    assert begun(tmp_path) == ["case-mlp.1", "case-alexnet.1", "case-mlp.2", "case-alexnet.2"]


def test_what_failed_is_run_again_only_when_that_is_asked_for(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, barred, able = tmp_path / "out", tasks_of("alexnet", data="records"), tasks_of("alexnet", data="/somewhere")
    list(run_suite("small", barred, out, 2, session))

    assert list(run_suite("small", able, out, 2, session)) == []
    assert [one.number for one in run_suite("small", able, out, 2, session, retry=True)] == [1, 2]
    assert read_results(out).failures == ()


def test_two_at_once_in_one_folder_are_refused(tmp_path: Path, session: Session) -> None:
    with _locked(tmp_path / "out"), pytest.raises(UsageError, match="another `stagewright bench` is at work"):
        list(run_suite("small", tasks_of("mlp"), tmp_path / "out", 1, session))


def test_simulated_cases_say_so_run_once_and_bring_their_cluster(tmp_path: Path, session: Session) -> None:
    tasks = tasks_of("mlp", device="cuda", devices=2, hosts=2)

    (progress,) = run_suite("small", tasks, tmp_path / "out", 7, session)

    record = progress.result
    assert isinstance(record, Record)
    assert record.source == "simulated"
    assert record.notes[0] == "simulated, since it needs 2 hosts and --nodes names none"
    assert "its first one 2 times" in record.notes[1]
    results = read_results(tmp_path / "out")
    assert [cluster.name for cluster in results.clusters] == ["titan-v-8-x2"] == [record.cluster]
    assert begun(tmp_path) == []


def test_a_simulation_that_no_device_could_hold_says_so(tmp_path: Path, session: Session) -> None:
    tasks = tasks_of("vgg16", choices=Choices(simulate=True), batch=512)
    (progress,) = run_suite("small", tasks, tmp_path / "out", 1, session)

    assert isinstance(progress.result, Record)
    assert any(note.startswith("does not fit: ") and "and has 11.8 GiB" in note for note in progress.result.notes)


def test_what_cannot_run_here_is_a_row_with_the_reason(tmp_path: Path, session: Session) -> None:
    tasks = (
        *tasks_of("mlp", run="rehearse"),
        *tasks_of("alexnet", data="records"),
        *tasks_of("vgg16", choices=Choices(simulate=True), devices=9, batch=9),
    )
    list(run_suite("small", tasks, tmp_path / "out", 3, session))

    reasons = [row.reason for row in rows_of(tasks, tmp_path / "out")]
    assert reasons[0] == "emulated hosts need root: run the suite with sudo"
    assert reasons[1] == "its records are not here: name their folder with --data FOLDER"
    assert reasons[2].startswith("it does not fit titan-v-8: ")
    failures = {failure.name: failure for failure in read_results(tmp_path / "out").failures}
    assert failures["case-mlp"].source == "rehearsed"
    assert isinstance(failures["case-alexnet"], Failure)


def test_a_rehearsal_needs_root_and_is_the_same_command_otherwise() -> None:
    able = Here(num_cards=0, is_root=True)
    (task,) = tasks_of("mlp", run="rehearse", here=able)
    (barred,) = tasks_of("mlp", run="rehearse", here=Here(num_cards=0, is_root=False))

    (large,) = tasks_of("mlp", run="rehearse", here=able, devices=9, batch=9)

    assert large.skipped.startswith("it does not fit titan-v-8: ")
    assert task.command.startswith("stagewright rehearse mlp --batch 8 --placement 0:0 ")
    assert task.command.endswith(" --cluster titan-v-8")
    assert barred.skipped == "emulated hosts need root: run the suite with sudo"


def test_cards_that_are_shared_are_enough_and_are_told_of() -> None:
    one_card = Here(num_cards=1, is_root=False)
    (alone,) = tasks_of("mlp", device="cuda", here=one_card)
    (eight,) = tasks_of("mlp", device="cuda", devices=8, here=one_card, choices=Choices(share=8))
    (lacking,) = tasks_of("mlp", device="cuda", devices=8, here=one_card)

    assert (alone.mode, alone.notes) == ("train", ())
    assert eight.command.endswith("--device cuda --share 8")
    assert eight.notes == ("8 workers share 1 card: speeds and memory are not those of 8",)
    assert (lacking.mode, lacking.notes) == ("simulate", ("simulated, since it needs 8 cards and 1 is here",))


def test_the_environment_names_what_matters_and_nothing_else() -> None:
    answers = {
        "--query-gpu=name,memory.total": "TITAN V, 12066 MiB\nTITAN V, 12066 MiB\n",
        "--query-gpu=driver_version": "440.33\n440.33\n",
        "topo": "        GPU0 GPU1\nGPU0     X   PIX\n",
        "rev-parse": "abc123\n",
        "status": " M src/x.py\n",
    }

    def ask(words: Any) -> str | None:
        return next((text for key, text in answers.items() if key in words), None)

    facts = capture(ask, {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "AWS_SECRET": "no", "HOME": "/root"})

    assert facts["gpu"] == "2 × TITAN V, 12066 MiB"
    assert facts["driver"] == "440.33"
    assert "PIX" in facts["topology"]
    assert facts["commit"] == "abc123 with changes"
    assert facts["variables"] == "NCCL_DEBUG=INFO OMP_NUM_THREADS=1"
    assert {"cpu", "python", "torch", "stagewright"} <= facts.keys()
    assert json.dumps(facts)


def test_fewer_steps_leave_most_of_them_to_measure() -> None:
    (task,) = tasks_of("mlp", steps=30, warm_up=10, choices=Choices(steps=12))
    assert (task.case.steps, task.case.warm_up) == (12, 4)
