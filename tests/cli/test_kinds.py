"""A profile belongs to its kind of device: `plan` and `simulate` take it nowhere else unless they are told to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.cluster import Cluster, Device, find_cluster, make_cluster
from stagewright.errors import ProfileError
from stagewright.plan import Plan
from stagewright.planning.options import PlanOptions
from stagewright.planning.search import make_plan
from stagewright.profile import Profile
from stagewright.profiling.analytic import profile_for
from stagewright.profiling.detect import num_cores
from stagewright.profiling.kinds import DeviceKind, find_kind

from .conftest import Run

ASSUMED = "a profile of cpu, assumed to hold for titan-v"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """What `stagewright profile tiny-cnn --device cpu` leaves, in less time."""
    made = profile_for(make_cluster(1), "tiny-cnn", (8, 32), "fp32")
    return replace(made, source="measured").save(tmp_path / "cpu.profile.json")


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_a_profile_of_the_cpu_is_not_priced_on_other_cards(verb: str, profile: Path, run: Run) -> None:
    what = [profile] if verb == "plan" else ["tiny-cnn", "--profile", profile]
    status, out, err = run(verb, *what, "--cluster", "titan-v-8", "--batch", 32)
    assert (status, out) == (2, "")
    assert "the profile of tiny-cnn is of cpu devices, but the cluster titan-v-8 has titan-v" in err
    assert "--assume-kind titan-v" in err


def test_unless_it_is_said_and_then_it_is_told(profile: Path, tmp_path: Path, run: Run) -> None:
    words = ("--cluster", "titan-v-8", "--batch", 32, "--assume-kind", "TITAN V")
    told = ASSUMED.replace("titan-v", "TITAN V")
    status, out, err = run("plan", profile, *words, "-o", tmp_path / "plan.json")
    assert (status, err) == (0, "")
    assert told in out
    assert told in Plan.load(tmp_path / "plan.json").notes
    assert "--assume-kind 'TITAN V' --cluster titan-v-8" in out, "what comes next is on the same terms"

    status, out, _ = run("simulate", tmp_path / "plan.json", "--profile", profile, *words)
    assert status == 0
    assert told in out
    _, out, _ = run("simulate", tmp_path / "plan.json", "--profile", profile, *words, "--json")
    assert told in json.loads(out)["notes"]


def test_nothing_is_assumed_of_what_has_no_profile(run: Run) -> None:
    for verb in ("plan", "simulate"):
        status, _, err = run(verb, "tiny-cnn", "--batch", 8, "--assume-kind", "titan-v")
        assert status == 2
        assert err.startswith("error: --assume-kind titan-v goes with")


def test_the_cluster_is_this_machine_unless_another_is_named(
    profile: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagewright.profiling.detect.ask", lambda command: None)
    _, out, _ = run("simulate", "tiny-cnn", "--profile", profile, "--batch", 32, "--json")
    assert len(json.loads(out)["devices"]) == num_cores()
    status, out, _ = run("plan", profile, "--batch", 32)
    assert status == 0
    assert f"{num_cores()} × cpu" in out


def test_the_card_that_is_here_is_the_default_and_its_kind_counts(
    profile: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(make_cluster(2, device=Device(kind="NVIDIA TITAN V", memory_bytes=1 << 34)), name="local")
    monkeypatch.setattr("stagewright.profiling.detect.detect_cluster", lambda: here)
    status, _, err = run("plan", profile, "--batch", 32)
    assert status == 2
    assert "the cluster local has nvidia-titan-v" in err


def test_kinds_are_the_same_in_any_spelling(tmp_path: Path) -> None:
    made = profile_for(find_cluster("titan-v-8"), "tiny-cnn", (8, 32), "fp32")
    assert made.device == "titan-v"
    options = PlanOptions(batch=32)
    for kind in ("titan-v", "TITAN V", "Titan_V", " titan  v"):
        cluster = make_cluster(4, device=Device(kind=kind, memory_bytes=1 << 34))
        assert make_plan(made, cluster, options).best.step_s > 0
        assert find_kind(kind).name == "titan-v"
    with pytest.raises(ProfileError, match="is of titan-v devices, but the cluster local has rtx-9090"):
        make_plan(made, make_cluster(4, device=Device(kind="rtx-9090", memory_bytes=1 << 34)), options)


def test_other_kinds_may_be_there_where_the_file_says_how_fast_they_are(profile: Path, tmp_path: Path) -> None:
    made, own = Profile.load(profile), Device(kind="cpu", memory_bytes=1 << 34)
    options = PlanOptions(batch=32)

    def beside(other: Device) -> Cluster:
        cluster = make_cluster(2, name="mixed", device=own)
        return replace(cluster, hosts=(replace(cluster.hosts[0], devices=(own, other)),))

    with pytest.raises(ProfileError, match=r"the cluster mixed has v100 too\n.*against cpu: key speed"):
        make_plan(made, beside(Device(kind="v100", memory_bytes=1 << 34)), options)
    assert make_plan(made, beside(Device(kind="v100", memory_bytes=1 << 34, speed=9.5)), options).best.step_s > 0


@pytest.mark.parametrize("name", Cluster.ready_made())
def test_every_cluster_that_ships_has_kinds_that_can_be_profiled(name: str) -> None:
    assert set(find_cluster(name).kinds) <= set(DeviceKind.ready_made())


def test_a_model_on_cards_without_a_data_sheet_has_to_be_measured(tmp_path: Path, run: Run) -> None:
    device = Device(kind="rtx-9090", memory_bytes=1 << 34)
    file = make_cluster(2, name="mine", device=device).save(tmp_path / "mine.yaml")
    for verb in ("plan", "simulate"):
        status, _, err = run(verb, "tiny-cnn", "--batch", 8, "--cluster", file)
        assert status == 2
        assert "tiny-cnn has to be measured on rtx-9090, the devices of mine" in err
        assert "`stagewright profile tiny-cnn --batch ROWS -o FILE`" in err
