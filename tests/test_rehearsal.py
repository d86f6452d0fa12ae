"""The measured comparison: its file, its turns, and its table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import rehearsal
from benchmarks.baselines import make_rows, mean_loss
from benchmarks.rehearsal import Case, Contender, core_share, fastest, find_plans, on_card, read_cases, run_case, title
from benchmarks.rehearsal_table import BEGIN, END, section, write_results
from benchmarks.slices import Slices

from stagewright.cluster import DeviceId, find_cluster
from stagewright.errors import RunError, UsageError
from stagewright.models import build_model
from stagewright.plan import Plan, Stage
from stagewright.profile import LayerProfile, Profile

SUITE = Path(__file__).parents[1] / "suites" / "rehearsal.yaml"
CASE: dict[str, Any] = {"name": "small", "model": "tiny-cnn", "batch": 16, "batch_sizes": (4, 8, 16)}
TELLS = "import os, struct, sys, time\nwhile True: time.sleep(.01); os.write(1, struct.pack('d', time.perf_counter()))"


def two_workers(*, microbatches: int = 2, versions: int = 1) -> Plan:
    names = build_model("tiny-cnn", device="meta").names
    cut = names.index("fc1")
    body = Stage(layers=names[:cut], devices=(DeviceId(0, 0),), versions=versions)
    return Plan(
        model="tiny-cnn", stages=(body, Stage(layers=names[cut:], devices=(DeviceId(1, 0),))), batch=8,
        num_microbatches=microbatches,
    )  # fmt: skip


def chain_profile(plan: Plan) -> Profile:
    """A second forward and two backward for every layer of a plan."""
    layers = tuple(
        LayerProfile(name=name, forward_s=(1.0,), backward_s=(2.0,), output_bytes=8, saved_bytes=8, parameter_bytes=0)
        for stage in plan.stages
        for name in stage.layers
    )
    return Profile(
        model="tiny-cnn", device="cpu", source="analytic", batch_sizes=(plan.batch,), layers=layers, optimizer_s=1.0,
        model_s=(2.0,),
    )  # fmt: skip


def test_the_suite_has_the_cases_of_the_comparison() -> None:
    _, cases = read_cases(SUITE)
    assert [case.name for case in cases] == [
        "alexnet-4-300mbit", "alexnet-4-1gbit", "alexnet-4-10gbit", "alexnet-8-300mbit", "alexnet-8-1gbit",
        "vgg16-8-1gbit", "resnet50-4-1gbit", "gpt-4-300mbit", "alexnet-4-mixed-1gbit",
    ]  # fmt: skip
    assert all(case.plans and len(case.hosts().hosts) in (4, 8) for case in cases)
    assert [case.name for case in cases if case.is_short] == ["alexnet-4-300mbit"]
    assert {link.bytes_per_s for link in cases[0].hosts().links} == {300e6 / 8}


def test_the_comparison_on_slices_has_the_models_of_the_series_and_a_gpt() -> None:
    _, cases = read_cases(SUITE.parent / "slices.yaml")
    assert [case.model for case in cases] == ["alexnet", "vgg16", "resnet50", "gpt-tiny"]
    assert all(case.device == "cuda" and len(case.hosts().hosts) == 8 and len(case.plans) >= 3 for case in cases)


@pytest.mark.parametrize(
    "wrong", ["slices: 8, cluster: hosts-4, bits_per_s: [1.0e+9]", "cluster: hosts-4", "bits_per_s: [1.0e+9]", ""]
)
def test_a_case_is_on_hosts_or_on_slices(wrong: str, tmp_path: Path) -> None:
    told = "name: small, model: tiny-cnn, batch: 16, batch_sizes: [4], plans: []"
    (tmp_path / "suite.yaml").write_text(f"format: stagewright.rehearsal\nversion: 1\ncases:\n- {{{told}, {wrong}}}\n")
    with pytest.raises(UsageError, match="case small: expected cluster and bits_per_s, or slices"):
        read_cases(tmp_path / "suite.yaml")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_slices_are_measured_planned_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the card: here two processes on the CPU are the slices."""
    monkeypatch.setattr(rehearsal, "sliced_card", lambda slices: nullcontext(Slices(slices, {})))
    monkeypatch.setattr(Case, "device", "cpu")
    plans = [{"placement": "0:0.1:0", "cut": ["fc1"], "microbatches": count} for count in (1, 2)]
    case = Case(**CASE, slices=2, plans=(*plans, {**plans[0], "staleness": "ssp"}))
    result = run_case(case, tmp_path, rounds=2)
    entries = {entry["name"]: entry for entry in result["entries"]}
    assert {"single", "torch DDP"} < entries.keys()
    assert sum("predicted_s" in entry for entry in entries.values()) >= 3
    assert any(entry["is_chosen"] for entry in entries.values())
    assert any(entry.get("is_exact") is False for entry in entries.values())
    assert all(len(entry["step_s"]) == 2 and min(entry["step_s"]) > 0 for entry in entries.values())
    assert "| small | torch DDP |" in section([result])
    assert run_case(case, tmp_path, rounds=2) == result, "what is done is not run again"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_contenders_on_hosts_take_turns_and_of_a_family_the_fastest_stays(tmp_path: Path) -> None:
    """Processes on loopback stand for the hosts."""
    plan = two_workers()
    case = Case(**CASE, cluster="hosts-4", bits_per_s=1e9, plans=())
    peers = rehearsal.find_peers(case, chain_profile(plan), 2)
    common = {
        "model": "tiny-cnn", "options": {}, "batch": 16, "device": "cpu", "threads": 1, "hosts": [0, 1],
        "steps_a_word": 1,
    }  # fmt: skip
    specs = [{**common, **peer} for peer in peers]
    specs += [{**common, "kind": "plan", "name": "plan", "plan": plan.to_dict()}]
    specs += [{**common, "kind": "alone", "name": "single", "hosts": [0], "is_outside": True}]
    assert [spec["kind"] for spec in specs] == ["ddp", "pipelining", "pipelining", "plan", "alone"]
    turns_s = rehearsal.on_hosts(specs, Slices(2, {}), tmp_path, rounds=2)  # type: ignore[arg-type]
    assert len(turns_s) == 4, "one of two numbers of microbatches"
    assert {"torch DDP", "plan", "single"} < turns_s.keys()
    assert all(len(turns) == 2 and min(turns) > 0 for turns in turns_s.values())


@contextmanager
def telling(script: str = TELLS, *, spec: Any = None) -> Iterator[Contender]:
    """A contender that tells a word every 10 ms, or runs another script."""
    pipe, written = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", script], stdout=written)
    process.is_alive = lambda: process.poll() is None  # type: ignore[attr-defined]
    told = {"name": "any", "kind": "ddp", "device": "cpu", "steps_a_word": 1, "folder": "here", **(spec or {})}
    try:
        yield Contender(told, [process], pipe)
    finally:
        process.kill()
        process.wait()
        os.close(pipe)
        os.close(written)


def test_a_turn_does_not_count_the_time_that_a_contender_was_stopped() -> None:
    with telling() as one:
        time.sleep(3.0)
        while one.has_told(0.0):
            one.hear()
        assert time.perf_counter() - one.last_s > 2.0, "it worked while others had their turns"
        assert one.turn(2) < 1.0


def test_a_contender_that_ends_or_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "HANGS_S", {"cpu": 1.0})
    with pytest.raises(RunError, match="a worker of any ended"), telling("pass"):
        pass
    with pytest.raises(RunError, match="any hangs"), telling("import time; time.sleep(60)"):
        pass


def test_whoever_hangs_on_a_card_goes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    @contextmanager
    def started(spec: Any, *_: object) -> Iterator[Contender]:
        asked.append(spec["name"])
        if spec["name"] == "ddp" and asked.count("ddp") < spec["goes"]:
            raise RunError("ddp hangs")
        with telling(spec=spec) as one:
            yield one

    monkeypatch.setattr(rehearsal, "started", started)
    specs = [{"name": "plan"}, {"name": "ddp", "goes": 3}, {"name": "single"}]
    turns_s = on_card(specs, Slices(2, {}), tmp_path, rounds=2)
    assert asked == ["plan", "ddp", "ddp", "ddp", "single"]
    assert {name: len(turns) for name, turns in turns_s.items()} == {"plan": 2, "ddp": 2, "single": 2}
    asked.clear()
    turns_s = on_card([{"name": "ddp", "goes": 4}, {"name": "single"}], Slices(2, {}), tmp_path, rounds=1)
    assert set(turns_s) == {"single"}, "who never comes through is left out"


def test_of_a_family_the_fastest_stays_and_the_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[str] = []

    @contextmanager
    def started(spec: Any, *_: object) -> Iterator[Contender]:
        running.append(spec["name"])
        with telling(spec=spec) as one:
            one.step_s = spec["step_s"]
            yield one
        running.remove(spec["name"])

    monkeypatch.setattr(rehearsal, "started", started)
    family = [(n, {"name": f"of {n}", "step_s": step_s}) for n, step_s in enumerate((2.0, 3.0, 1.0))]
    with fastest(family, Slices(2, {}), tmp_path) as one:
        assert (one.name, running) == ("of 2", ["of 2"])
    assert not running


def test_no_more_contenders_are_in_memory_than_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 3 GB of 14; 4 stay free, and half as much again as one takes."""
    running: list[str] = []
    groups: list[list[str]] = []

    @contextmanager
    def started(spec: Any, *_: object) -> Iterator[Contender]:
        running.append(spec["name"])
        with telling(spec=spec) as one:
            yield one
        groups.append(list(running))
        running.remove(spec["name"])

    monkeypatch.setattr(rehearsal, "started", started)
    monkeypatch.setattr(rehearsal, "free_memory", lambda: 14e9 - 3e9 * len(running))
    turns_s = rehearsal.on_hosts([{"name": name} for name in "abc"], Slices(2, {}), tmp_path, rounds=2)  # type: ignore[arg-type]
    assert max(groups, key=len) == ["a", "b"]
    assert {name: len(turns) for name, turns in turns_s.items()} == {"a": 2, "b": 2, "c": 2}


def test_everyone_minimises_the_same_loss() -> None:
    model = build_model("tiny-cnn")
    rows = make_rows(model, 8)
    whole = model.stage(0, model.num_layers)
    ours = whole(*rows.inputs, rows.labels)[0] / 8
    torch.testing.assert_close(ours, mean_loss(model.model(*rows.inputs), rows.labels))


def test_equal_plans_are_in_the_table_once() -> None:
    wanted = {"placement": "0:0.1:0", "cut": ["fc1"], "microbatches": 2}
    moved = {**wanted, "placement": "1:0.2:0"}
    case = Case(**CASE, cluster="hosts-4", bits_per_s=1e9, plans=(wanted, dict(wanted), moved))
    found, chosen = find_plans(case, chain_profile(two_workers()), find_cluster("hosts-4"))
    named = [name for name in found if name.startswith("1-1 cut at fc1, 2 × 1f1b")]
    assert named == ["1-1 cut at fc1, 2 × 1f1b", "1-1 cut at fc1, 2 × 1f1b (1:0.2:0)"]
    assert chosen <= found.keys()
    assert {found[name].is_synchronous for name in chosen} <= {True, False}
    assert title(two_workers(versions=2)) == "1-1 cut at fc1, 2 × 1f1b, versions 2,1"


def test_hosts_with_fewer_cores_have_a_lower_limit() -> None:
    cluster = replace(find_cluster("hosts-4"), cores=4.0)
    half = replace(cluster, hosts=tuple(replace(host, cpu_share=0.5) for host in cluster.hosts))
    free = replace(cluster, hosts=tuple(replace(host, cpu_share=None) for host in cluster.hosts))
    assert (core_share(half), core_share(free)) == (0.5, 1.0)


def result(*names: str) -> dict[str, Any]:
    """Five contenders, or those of some names."""
    entries = [
        {"name": "single", "step_s": [1.0, 1.0, 9.0], "is_chosen": False},
        {"name": "torch DDP", "step_s": [8.0], "is_chosen": False},
        {"name": "torch pipelining", "step_s": [3.0, 4.0, 5.0], "is_chosen": False},
        {"name": "3-1", "step_s": [2.5], "predicted_s": 2.0, "is_exact": True, "is_chosen": True},
        {"name": "2-2", "step_s": [2.0], "predicted_s": 2.2, "is_exact": True, "is_chosen": False},
        {"name": "stale", "step_s": [1.5], "predicted_s": 1.5, "is_exact": False, "is_chosen": False},
    ]
    kept = [entry for entry in entries if not names or entry["name"] in names]
    return {"case": "alexnet", "batch": 64, "seconds": 60.0, "limit_s": 1.0, "entries": kept}


def test_the_table_says_how_everyone_stands() -> None:
    made = section([result()])
    assert "| alexnet | **3-1** | 32.0 | 25.6 | 0 % | −20.0 % | 3.20 | 1.60 | 40 % |" in made
    assert "| alexnet | torch DDP |  | 8.0 | 0 % |  | 1.00 | 0.50 | 12 % |" in made
    assert "| alexnet | torch pipelining |  | 16.0 | 50 % |  | 2.00 | 1.00 | 25 % |" in made
    assert "Predicted steps are 10.0% off on average and 20.0% at most (3 plans)." in made
    assert "reaches 80% or more of the best measured plan of its kind in every case" in made
    assert "within 3% of it in 0 of 1." in made
    assert "never below 1.60 (alexnet)" in made


def test_a_peer_that_hung_is_told_and_the_rest_counts() -> None:
    made = section([result("single", "3-1", "2-2")])
    assert "| alexnet | **3-1** | 32.0 | 25.6 | 0 % | −20.0 % | – | – | 40 % |" in made
    assert "No peer came through in alexnet: it hung." in made
    assert "Against the best peer" not in made


def test_its_section_of_a_page_is_renewed_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("# Results\n\n## Before\n\ntext\n")
    write_results([result()], page)
    page.write_text(page.read_text() + "\n## After\n")
    write_results([result()], page)
    text = page.read_text()
    assert text.startswith("# Results\n\n## Before\n\ntext\n")
    assert text.count(BEGIN) == text.count(END) == text.count("## Rehearsal") == text.count("## After") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("suites/rehearsal.yaml", "--case", "nobody"), "no case of suites/rehearsal.yaml is called ['nobody']"),
        (("suites/nowhere.yaml",), "suites/nowhere.yaml"),
    ],
)
def test_mistakes_are_told_in_words(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.rehearsal", *words, "--out", os.fspath(tmp_path)]
    done = subprocess.run(command, cwd=SUITE.parents[1], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
