"""The measured comparison: its file, its turns, and its table."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from stagewright.bench.baselines import make_rows, mean_loss
from stagewright.bench.contest import Clocked, Contest, Ours, Times, hosted_parameters, take_turns
from stagewright.bench.entrants import add, candidates, limit, on_first_hosts, title
from stagewright.bench.memory import FORKED_BYTES, free_memory, held_bytes, in_groups
from stagewright.bench.rehearsal_cases import RehearsalCase, RehearsalSuite, Wanted
from stagewright.bench.rounds import batches_for, close_ones, fastest, stale_steps, steady, steps_for
from stagewright.bench.speed import at_one_speed, drifts_of, middle_pass, predict, slowed
from stagewright.bench.verdict import BEGIN, END, CaseResult, Entry, Lead, section, table, write_results
from stagewright.profiling.pulse import BEAT, Timed

from stagewright.bench import contest as contests
from stagewright.bench import rehearsed
from stagewright.cluster import DeviceId, find_cluster
from stagewright.errors import UsageError
from stagewright.models import build_model
from stagewright.plan import Plan, Stage
from stagewright.profile import LayerProfile, Profile
from stagewright.rehearsal.measuring import Beats
from stagewright.rehearsal.slices import Slices, sliced_card
from stagewright.runtime.hosts import HostError
from stagewright.runtime.world import World
from stagewright.schedule import Kind
from stagewright.scheduling import make_schedule

SUITE = Path(__file__).parents[2] / "suites" / "rehearsal.yaml"


def two_workers(*, microbatches: int = 2, versions: int = 1) -> Plan:
    names = build_model("tiny-cnn", device="meta").names
    cut = names.index("fc1")
    body = Stage(layers=names[:cut], devices=(DeviceId(0, 0),), versions=versions)
    return Plan(
        model="tiny-cnn", stages=(body, Stage(layers=names[cut:], devices=(DeviceId(1, 0),))), batch=8,
        num_microbatches=microbatches,
    )  # fmt: skip


def test_the_suite_has_the_cases_of_the_comparison() -> None:
    cases = [case for each in RehearsalSuite.load(SUITE).cases for case in each.each_rate()]
    assert [case.name for case in cases] == [
        "alexnet-4-300mbit", "alexnet-4-1gbit", "alexnet-4-10gbit", "alexnet-8-300mbit", "alexnet-8-1gbit",
        "vgg16-8-1gbit", "resnet50-4-1gbit", "gpt-4-300mbit", "alexnet-4-mixed-1gbit",
    ]  # fmt: skip
    assert all(case.plans and len(case.hosts().hosts) in (4, 8) for case in cases)
    assert any(case.is_short for case in cases)


def test_the_comparison_on_slices_has_the_models_of_the_series_and_a_gpt() -> None:
    cases = [case for each in RehearsalSuite.load(SUITE.parent / "slices.yaml").cases for case in each.each_rate()]
    assert [case.model for case in cases] == ["alexnet", "vgg16", "resnet50", "gpt-tiny"]
    assert all(case.device == "cuda" and len(case.hosts().hosts) == 8 and len(case.plans) >= 3 for case in cases)
    assert all(limit(case)["kind"] == "each alone" for case in cases)


def test_a_case_is_on_hosts_or_on_slices() -> None:
    case = next(RehearsalSuite.load(SUITE).cases[0].each_rate())
    for wrong in ({"slices": 8}, {"cluster": None}, {"bits_per_s": ()}, {"cluster": None, "slices": 8}):
        with pytest.raises(UsageError, match="expected cluster and bits_per_s, or slices"):
            replace(case, **wrong)
    assert replace(case, cluster=None, bits_per_s=(), slices=8).device == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a card")
def test_slices_need_a_card() -> None:
    with pytest.raises(UsageError, match="no CUDA card was found"), sliced_card(8):
        pass


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_slices_are_measured_planned_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the card: here two processes on the CPU are the slices."""
    monkeypatch.setattr(rehearsed, "sliced_card", lambda slices: nullcontext(Slices(slices, {})))
    monkeypatch.setattr(RehearsalCase, "device", "cpu")
    plans = (Wanted(placement="0:0.1:0", cut=("fc1",), microbatches=count) for count in (1, 2, 4))
    case = RehearsalCase(name="small", model="tiny-cnn", batch=16, slices=2, batch_sizes=(4, 8, 16), plans=tuple(plans))
    result = rehearsed.Bench(tmp_path, rounds=2).run(case)
    assert {"single", "torch DDP"} < {entry.name for entry in result.entries}
    ours = [entry for entry in result.entries if entry.is_ours]
    assert len(ours) >= 4
    assert any(entry.is_chosen for entry in ours)
    assert all(len(entry.step_s) == 2 and entry.median_s > 0 for entry in result.entries)
    assert result.limit_s == result.named("single").median_s


def test_whoever_hangs_on_a_card_goes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nobody has a card: what the workers of a contest would leave is written down, up to the one that hangs."""
    hangs, asked = [1, 1, 0], []

    def launch(module: str, folder: Path, *_: object, **__: object) -> None:
        groups = json.loads((folder / "contest.json").read_text())["groups"]
        asked.append([told["name"] for group in groups for told in group])
        is_hung = bool(hangs.pop(0))
        through = asked[-1][:-1] if is_hung else asked[-1]
        if through:
            seen = {name: [1.0, 2.0] for name in through}
            (folder / "times.json").write_text(
                json.dumps({"step_s": seen, "when": dict.fromkeys(seen, [[0.0, 1.0]] * 2)})
            )
        if is_hung:
            raise HostError(0, 1, "a worker gave up")

    monkeypatch.setattr(rehearsed, "launch_in_hosts", launch)
    case = RehearsalCase(name="small", model="tiny-cnn", batch=16, slices=2, batch_sizes=(4, 8), plans=(Wanted(),) * 3)
    groups = [[{"kind": kind, "name": kind}] for kind in ("each alone", "plan", "ddp")]
    times = rehearsed.Bench(tmp_path, rounds=2).contest(case, Slices(2, {}), groups, tmp_path)
    assert asked == [["each alone", "plan", "ddp"], ["ddp"], ["ddp"]]
    assert times["step_s"] == {name: [1.0, 2.0] for name in ("each alone", "plan", "ddp")}
    assert times["when"].keys() == times["step_s"].keys()


@pytest.mark.slow
def test_contenders_take_turns_in_the_same_workers(tmp_path: Path) -> None:
    plans = {"exact": two_workers(), "stale": two_workers(versions=2)}
    contenders = [
        {"kind": "alone", "name": "single"},
        {"kind": "passes", "name": "passes", "rows": 4, "busy": [1], "counted": [1], "expected_s": 0.02},
        *({"kind": "plan", "name": name, "plan": plan.to_dict()} for name, plan in plans.items()),
        {"kind": "ddp", "name": "ddp"},
        {"kind": "each alone", "name": "each alone"},
        {"kind": "pipelining", "name": "1F1B of 2", "family": "1F1B", "cuts": [2], "microbatches": 2},
        {"kind": "pipelining", "name": "1F1B of 4", "family": "1F1B", "cuts": [2], "microbatches": 4},
    ]
    spec = {"model": "tiny-cnn", "options": {}, "batch": 8, "rounds": 2, "turn_s": 0.05, "cores": 1}
    (tmp_path / "contest.json").write_text(json.dumps({**spec, "groups": [contenders]}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    module = ["-m", "stagewright.bench.contest", str(tmp_path)]
    alone = subprocess.Popen([sys.executable, *module, "alone"], env=environment)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launcher, *module], env=environment, check=True, timeout=110, capture_output=True)
    assert alone.wait(30) == 0
    times = json.loads((tmp_path / "times.json").read_text())
    assert {"single", "exact", "stale", "ddp"} < set(times["step_s"])
    assert len(times["step_s"]) == 7, "of a family the fastest stays"
    assert all(len(values) == 2 and min(values) > 0 for values in times["step_s"].values())
    turns = sorted(turn for own in times["when"].values() for turn in own)
    assert all(start < stop for start, stop in turns)
    assert all(before[1] <= after[0] for before, after in pairwise(turns)), "one after the other"
    for name, own in times["when"].items():
        for seconds, (start, stop) in zip(times["step_s"][name], own):
            assert seconds <= stop - start + 1e-6, name


def test_as_many_contenders_are_in_memory_as_fit() -> None:
    """Two hosts and a model of 1 GB: the plan takes 3 GB, DDP 8, the single process its own 3."""
    plan = two_workers()
    profile = replace(chain_profile(plan), layers=tuple(
        replace(layer, parameter_bytes=int(1e9 / len(chain_profile(plan).layers)))
        for layer in chain_profile(plan).layers
    ))  # fmt: skip
    told = [
        {"kind": "alone", "name": "single"}, {"kind": "plan", "name": "plan", "plan": plan.to_dict()},
        {"kind": "ddp", "name": "ddp"},
    ]  # fmt: skip

    def split(free_bytes: float) -> list[int]:
        return [len(group) for group in in_groups(told, profile, 2, free_bytes)]

    assert split(math.inf) == [3]
    assert split(18e9) == [3]
    assert split(16e9) == [2, 1]
    assert split(1e9) == [1, 1, 1]
    pipes = [
        {"kind": "pipelining", "name": f"of {n}", "family": "pipe", "cuts": [1], "microbatches": n} for n in (2, 4)
    ]
    assert [len(group) for group in in_groups(pipes, profile, 2, 1e9)] == [2], "a family is not parted"
    ddp, alone = {"kind": "ddp"}, {"kind": "pipelining", "cuts": [1]}
    assert held_bytes(ddp, profile, 2) / 2 == pytest.approx(4e9, rel=1e-6), "weight, momentum, buckets, the next ones"
    assert held_bytes(alone, profile, 2) == pytest.approx(3e9, rel=1e-6)
    assert held_bytes({"kind": "passes", "busy": [0, 1]}, profile, 2) == pytest.approx(2e9, rel=1e-6), "gradients"
    stale = replace(plan, stages=(replace(plan.stages[0], versions=2), plan.stages[1]))
    exact, frozen = (held_bytes({"kind": "plan", "plan": each.to_dict()}, profile, 2) for each in (plan, stale))
    assert frozen - exact > 2 * FORKED_BYTES, "processes of its own, and one more version of its first stage"
    assert free_memory() > 0


def test_no_plan_of_a_contest_leaves_its_hooks_on_anothers_layers(tmp_path: Path) -> None:
    spec = {"model": "tiny-cnn", "options": {}, "batch": 8}
    contest, names = Contest(tmp_path, spec), build_model("tiny-cnn", device="meta").names
    whole = Stage(layers=names, devices=(DeviceId(0, 0),))
    plan = Plan(model="tiny-cnn", stages=(whole,), batch=8, num_microbatches=2)
    world = World(0, 1, torch.device("cpu"), timedelta(seconds=10))
    both = [Ours(plan, contest, world) for _ in range(2)]
    foldings = [each.worker.hosted[0].foldings[0] for each in both]
    parameters = [set(each.worker.hosted[0].weights.newest().parameters()) for each in both]
    for each in both:
        each.close()
    assert all(folding.layers for folding in foldings), "each folds, as it would alone"
    assert not parameters[0] & parameters[1]


class Told(Clocked):
    """A contender whose turns take what they are told to."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__(self.warm_up)
        self.left, self.steps, self.warmed_up = seconds, list[int](), 0

    def turn(self, steps: int, world: World) -> Timed:
        self.steps.append(steps)
        return Timed(self.left.pop(0), 0.0, 1.0)

    def warm_up(self, steps: int) -> None:
        self.warmed_up += steps


def test_a_long_first_step_of_a_peer_is_its_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a short peer is not, and what is expected of a plan says how many steps fill its turns."""
    made = {
        "long": Told([9.0, 8.0, 7.0]),
        "short": Told([5e-1, 1e-1, 1.0, 1.1, 1.2]),
        "known": Told([1.0, 2.0, 3.0]),
        "known and long": Told([5.0, 5.0, 5.0]),
        "hopeless": Told([20.0, 21.0, 22.0]),
    }
    monkeypatch.setattr(contests, "make_contender", lambda told, contest, world: made[told["name"]])
    spec = {"model": "tiny-cnn", "options": {}, "batch": 8, "rounds": 3, "turn_s": 2.0}
    told = [{"kind": "ddp", "name": "long"}, {"kind": "ddp", "name": "short"}, {"name": "known", "expected_s": 0.5}]
    told += [{"name": "known and long", "expected_s": 5.0}]
    told += [{"kind": "pipelining", "name": name, "family": "slow"} for name in ("hopeless", "not tried")]
    times = Times()
    world = World(0, 1, torch.device("cpu"), timedelta(seconds=10))
    take_turns(told, Contest(tmp_path, spec), world, times)
    assert times.step_s == {"long": [9.0, 8.0, 7.0], "short": [1.0, 1.1, 1.2], "known": [1.0, 2.0, 3.0]} | {
        "known and long": [5.0, 5.0, 5.0],
        "hopeless": [20.0, 21.0, 22.0],
    }
    assert (made["known"].warmed_up, made["known and long"].warmed_up) == (1, 0)
    assert made["long"].steps == [1, 1, 1]
    assert made["short"].steps == [1, 1, 20, 20, 20]
    assert made["known"].steps == [4, 4, 4]


def test_plans_close_to_the_choice_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two rounds the rival is a little slower, the far one by much, and the stale one is of another kind."""
    known = {"choice": [1.0, 1.0], "rival": [1.05, 1.05], "far": [1.07, 1.07], "stale": [1.0, 1.0]}
    told = [
        {"kind": "plan", "name": name, "is_chosen": name == "choice", "is_exact": name != "stale", "expected_s": 1.0}
        for name in known
    ]
    assert close_ones(told, known) == ["choice", "rival"]
    assert close_ones(told, known | {"rival": [2.0, 2.0]}) == []
    assert close_ones([{**each, "is_exact": not each["is_exact"]} for each in told], known) == []
    made = {name: Told([*seconds, 0.5, 0.5, 0.5]) for name, seconds in known.items()}
    monkeypatch.setattr(contests, "make_contender", lambda told, contest, world: made[told["name"]])
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(contests.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(contests, "RUN_ON_S", 30.0)
    spec = {"model": "tiny-cnn", "options": {}, "batch": 8, "rounds": 2, "turn_s": 2.0}
    world, times = World(0, 1, torch.device("cpu"), timedelta(seconds=10)), Times()
    take_turns(told, Contest(tmp_path, spec), world, times)
    assert {name: len(seconds) for name, seconds in times.step_s.items()} == {
        "choice": 4, "rival": 4, "far": 2, "stale": 2,
    }  # fmt: skip


def test_a_worker_of_a_plan_copies_what_it_hosts_alone(tmp_path: Path) -> None:
    plan = two_workers()
    contest = Contest(tmp_path, {"model": "tiny-cnn", "options": {}, "batch": 8})
    kept = dict(contest.kept.model.named_parameters())
    own = [hosted_parameters(plan, contest.kept, worker) for worker in (0, 1)]
    assert own[0] | own[1] == set(kept)
    assert not own[0] & own[1]
    made = dict(contest.new_model(own[1]).model.named_parameters())
    assert {name for name in kept if made[name] is not kept[name]} == own[1]


def test_everyone_minimises_the_same_loss() -> None:
    model = build_model("tiny-cnn")
    rows = make_rows(model, 8)
    whole = model.stage(0, model.num_layers)
    ours = whole(*rows.inputs, rows.labels)[0] / 8
    torch.testing.assert_close(ours, mean_loss(model.model(*rows.inputs), rows.labels))


def test_of_a_family_the_fastest_stays() -> None:
    told = [{"name": "a"}, {"name": "b of 2", "family": "b"}, {"name": "b of 4", "family": "b"}]
    assert fastest(told, {"a": 9.0, "b of 2": 2.0, "b of 4": 1.0}) == ["a", "b of 4"]


def test_a_turn_is_as_many_steps_as_fit() -> None:
    assert [steps_for(seconds, 2.0) for seconds in (10.0, 1.5, 1.0, 0.3, 1e-5)] == [1, 2, 2, 7, 20]


def test_a_stale_turn_counts_two_updates_at_least() -> None:
    assert [stale_steps(steps) for steps in (1, 2, 5)] == [2, 2, 5]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_without_a_flush_updates_count_while_forwards_go_on(stages: int, steps: int) -> None:
    """Where only backwards are left, updates follow one another faster than they do in a long run."""
    versions = tuple(range(stages, 0, -1))
    plan = Plan(model="any", batch=4, stages=tuple(
        Stage(layers=(f"layer{n}",), devices=(DeviceId(n, 0),), versions=version) for n, version in enumerate(versions)
    ))  # fmt: skip
    batches = batches_for(steps, stages)
    order = make_schedule(plan).unroll(0, batches, 0)
    kinds = "".join(action.kind.value for action in order if action.kind in (Kind.FORWARD, Kind.UPDATE))
    forwards = [1.0 * len(between) for between in kinds.split("U")[1:-1]]  # between one update and the next
    assert len(forwards) == batches - 1
    assert forwards == [1.0] * (stages - 1 + steps) + [0.0] * (stages - 1), "full, then it drains"
    numbered = [9.0, *map(float, range(batches - 1))]
    assert steady(numbered, steps, stages) == [float(stages - 1 + step) for step in range(steps)], "it filled before"


def test_equal_plans_are_in_the_table_once() -> None:
    found: dict[str, Plan] = {}
    first = add(found, two_workers())
    assert add(found, two_workers()) == first
    assert add(found, two_workers(microbatches=4)) != first
    assert len(found) == 2
    assert title(two_workers(versions=2)) == "1-1 cut at fc1, 2 × 1f1b, versions 2,1"


def test_runners_up_take_part_where_a_case_names_no_others() -> None:
    """A case that names as few plans as it may, all the same one, which may well be the planner's own."""
    wanted = Wanted(placement="0:0.1:0", cut=("fc1",), microbatches=2)
    case = RehearsalCase(
        name="small", model="tiny-cnn", batch=8, cluster="hosts-4", bits_per_s=(1e9,), batch_sizes=(4, 8),
        plans=(wanted,) * 2,
    )  # fmt: skip
    found, chosen, expected = candidates(case, chain_profile(two_workers()), find_cluster("hosts-4"))
    assert len(found) > 3
    assert len({title(plan) for plan in found.values() if plan.is_synchronous}) > 1
    assert set(chosen) <= found.keys() == expected.keys()


def test_idle_hosts_come_last() -> None:
    plan = two_workers()
    body, head = (replace(stage, devices=(DeviceId(host, 0),)) for stage, host in zip(plan.stages, (1, 3)))
    moved = on_first_hosts(replace(plan, stages=(body, head)), find_cluster("hosts-4"))
    assert moved.placement == "0:0.1:0"
    with pytest.raises(UsageError, match="leaves hosts idle"):
        on_first_hosts(replace(plan, stages=(body, head)), find_cluster("hosts-4-mixed"))


def test_a_slower_machine_is_predicted_to_take_as_many_times_as_long() -> None:
    """Compute alone: what crosses a wire takes as long as before."""
    plan, cluster = replace(two_workers(), num_microbatches=1), find_cluster("hosts-4")
    profile = chain_profile(plan)
    usual_s = predict(plan, profile, cluster)
    assert predict(plan, profile, cluster, 3.0) == pytest.approx(3 * usual_s, rel=1e-3)
    made = at_one_speed((60.0, 10.0, 40.0), (3.0, 1.0, 2.0), plan, profile, cluster)
    assert made == pytest.approx((20.0, 10.0, 20.0), rel=1e-3)
    assert slowed(profile, 3.0).model_s == (6.0,)
    assert slowed(profile, 3.0).layers[0].backward_s == (6.0,)


def test_passes_and_the_pulse_tell_the_drift_of_a_turn(tmp_path: Path) -> None:
    """A pass takes three beats in all turns: the profile's of two were beside beats that were too long to be true."""
    pulse = [(float(moment), 6.0 if moment < 40 else 8.0, 0) for moment in range(80)]
    file = tmp_path / rehearsed.PULSE
    file.write_bytes(b"".join(BEAT.pack(*beat) for beat in pulse))
    when = {"passes": [[0.0, 20.0], [20.0, 38.0], [50.0, 60.0]], "plan": [[0.0, 30.0], [60.0, 70.0]]}
    times = {"step_s": {"passes": [18.0, 18.0, 24.0], "plan": [1.0, 1.0]}, "when": when}
    assert drifts_of(times, file, Beats(6.0, (3.0, 3.0)))["plan"] == pytest.approx([1.0, 8 / 6])
    assert drifts_of(times, file, Beats(6.0, (2.0, 2.0)))["plan"] == pytest.approx([1.5, 2.0])
    assert drifts_of(times, tmp_path / "none", None)["plan"] == [1.0, 1.0]
    assert middle_pass(chain_profile(two_workers())) == (8, 2.0)


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


def result() -> CaseResult:
    entries = (
        Entry(name="single", step_s=(1.0, 1.0, 9.0)),
        Entry(name="torch DDP", step_s=(8.0,)),
        Entry(name="torch pipelining", step_s=(4.0,)),
        Entry(name="3-1", step_s=(2.5,), even_s=(1.25,), predicted_s=1.0, is_chosen=True),
        Entry(name="2-2", step_s=(2.0,), even_s=(1.0,), predicted_s=1.1),
    )
    return CaseResult(case="alexnet", batch=64, rounds=1, seconds=60.0, entries=entries)


def test_the_table_says_how_everyone_stands() -> None:
    made = table([result()])
    assert "| alexnet | **3-1** | 64.0 | 51.2 | −20.0 % | 25.6 | 3.20 | 1.60 | 40 % |" in made
    assert "| alexnet | torch DDP |  |  |  | 8.0 | 1.00 | 0.50 | 12 % |" in made
    assert "Predicted steps are 15.0% off on average and 20.0% at most (2 plans)." in made
    assert "reaches 80% or more of the best measured plan" in made
    assert "within 3% of it in 0 of 1, and may be for all that the rounds can tell (two standard errors) in 1." in made
    assert "never below 1.60 (alexnet)" in made
    assert "plain kernels" not in made
    assert "less time here than oneDNN's, in alexnet." in table([replace(result(), kernels="plain")])


def test_a_peer_that_hung_is_told_and_the_rest_counts() -> None:
    left = tuple(entry for entry in result().entries if not entry.name.startswith("torch"))
    made = table([replace(result(), entries=left)])
    assert "| alexnet | **3-1** | 64.0 | 51.2 | −20.0 % | 25.6 | – | – | 40 % |" in made
    assert "No peer came through in alexnet: it hung." in made


def test_plans_compare_round_by_round() -> None:
    """The machine becomes slower from round to round: medians of each alone would call them equal."""
    seconds, others, staler = (1.0, 2.0, 4.0), (2.0, 1.8, 3.6), (0.5, 0.5, 0.5)
    choice = Entry(name="choice", step_s=seconds, even_s=seconds, predicted_s=1.8, is_chosen=True)
    other = Entry(name="other", step_s=others, even_s=others, predicted_s=1.8)
    stale = Entry(name="stale", step_s=staler, even_s=staler, predicted_s=0.5, is_exact=False)
    assert choice.median_s == other.median_s
    assert choice.error == pytest.approx(-0.1)
    assert other.against(choice) == pytest.approx(0.9)
    made = replace(result(), entries=(choice, other, stale))
    lead = made.lead(is_exact=True)
    assert lead is not None
    assert lead.share == pytest.approx(0.9)
    assert (lead.is_near, lead.may_be_near) == (False, True), "2, 0.9 and 0.9: three rounds know little"
    assert not Lead(0.9, 0.03).may_be_near
    assert made.lead(is_exact=False) is None, "nothing was chosen of its kind"


def test_turns_that_go_on_are_taken_in_runs() -> None:
    """Every other update is 0.4 s late, and turns end there: three of five are long, and the step is 2 s."""
    bursts, steady, slow = (2.4, 1.6, 2.4, 1.6, 2.4), (2.1, 2.1, 2.1, 2.1, 2.1), (9.0, 2.0, 2.0, 2.0, 2.0)
    choice = Entry(
        name="choice", step_s=bursts, even_s=(1.2, 0.8, 1.2, 0.8, 1.2), predicted_s=1.1, is_chosen=True, is_exact=False,
        is_continued=True,
    )  # fmt: skip
    other = Entry(name="other", step_s=steady, even_s=steady, predicted_s=2.0, is_exact=False, is_continued=True)
    assert replace(choice, is_continued=False).median_s == 2.4
    assert choice.median_s == pytest.approx(2.0)
    assert choice.error == pytest.approx(0.1), "2 s here are 1 s at the speed of the profile"
    assert replace(choice, step_s=slow).median_s == pytest.approx(2.0), "one slow turn is no matter"
    made = replace(result(), entries=(result().named("single"), choice, other))
    lead = made.lead(is_exact=False)
    assert lead is not None
    assert lead.share == 1.0, "turn by turn the other would be ahead"
    assert other.against(choice) == pytest.approx(1.05)
    assert "means of turns in a row" in section([made], "make rehearsal")
    assert "in a row" not in section([result()], "make rehearsal")


def test_hosts_with_fewer_cores_have_a_lower_limit() -> None:
    made = CaseResult(**{**result().__dict__, "core_share": 0.5})
    assert made.limit_s == 2.0


def test_its_section_of_a_page_is_renewed_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("# Results\n\n## Before\n\ntext\n")
    write_results([result()], page)
    page.write_text(page.read_text() + "\n## After\n")
    write_results([result()], page)
    text = page.read_text()
    assert text.startswith("# Results\n\n## Before\n\ntext\n")
    assert text.count(BEGIN) == text.count(END) == text.count("## Rehearsal") == text.count("## After") == 1
