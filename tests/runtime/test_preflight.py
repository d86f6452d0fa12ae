"""Before the launch: everything that is wrong, all at once; and commands for other hosts that arrive as they are."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stagewright as sw
from stagewright.cluster import parse_placement
from stagewright.errors import UsageError
from stagewright.memory import StageBytes
from stagewright.models import Layered, build_model
from stagewright.plan import Plan, Stage
from stagewright.runtime.launch.ssh import OverSsh
from stagewright.runtime.safety import preflight
from stagewright.runtime.safety.preflight import (
    _facts,
    _Machine,
    _memory_of,
    _too_little_memory,
    check_before_launch,
    check_hosts,
    device_of,
    needed_bytes,
)
from stagewright.runtime.settings import Settings
from stagewright.scheduling import make_schedule
from tests.runtime.cases import Case, layered_tower, plan_of

FAKE_SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
shift; echo "$1" >> {log}; shift
exec sh -c "$1"
"""


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that runs what it is given right here, through a shell, as the real one does there."""
    path, log = tmp_path / "bin" / "ssh", tmp_path / "hosts.log"
    path.parent.mkdir()
    path.write_text(FAKE_SSH.format(log=log))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    return log


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layered = layered_tower()
    schedule = make_schedule(plan_of(Case("3-1"), layered.names))
    broken = replace(schedule, orders=(schedule.orders[0][1:], *schedule.orders[1:]))
    monkeypatch.setattr(preflight, "_available_memory", lambda: 100)
    with pytest.raises(UsageError) as told:
        check_before_launch(broken, layered, Settings(), tmp_path / "missing" / "..", states=lambda role: 2, keep=None)
    lines = str(told.value).splitlines()
    assert lines[0] == "the run cannot start: 3 things must be put right first"
    assert [line[:2] for line in lines[1:]] == ["1.", "2.", "3."]
    assert "the workers together need" in lines[2]
    assert "the fullest worker holds framework" in lines[2]
    assert "cannot be written to" in lines[3]


GIB = 1 << 30
ON_CARDS = Settings(device="cuda")


@pytest.mark.parametrize(
    ("placement", "machines", "short"),
    [
        ("0:0-1", {"here": ((16, 8), [0])}, ["0:1 need 10.0 GiB", "card 1 of here has 8.0 GiB"]),
        ("0:0-3", {"here": ((40, 39), [0])}, []),
        ("0:0-3", {"here": ((19, 20), [0])}, ["0:0,0:2 need 20.0 GiB", "card 0 of here has 19.0 GiB"]),
        ("0:0-7,1:0-7", {"a": ((16,) * 8, [0]), "b": ((16,) * 8, [1])}, []),
        ("0:0-7,1:0-7", {"a": ((16,) * 8, [0]), "b": ((*(16,) * 7, 9), [1])}, ["1:7 need", "card 7 of b has 9.0 GiB"]),
    ],
)
def test_each_card_is_judged_by_its_own_memory_and_the_workers_on_it(
    placement: str, machines: dict[str, tuple[tuple[int, ...], list[int]]], short: list[str]
) -> None:
    plan = Plan(model="any", stages=(Stage(layers=("l",), devices=parse_placement(placement)[0]),), batch=64)
    known = {
        name: (_Machine(GIB, tuple(GIB * card for card in cards)), hosts) for name, (cards, hosts) in machines.items()
    }
    held = StageBytes(*[10 * GIB, *[0] * 8])
    found = _too_little_memory(plan, [held] * len(plan.devices), ON_CARDS, known)
    assert len(found) == bool(short)
    assert all(words in found[0] for words in short)


def needed(plan: Plan, layered: Layered, states: Callable[[str], float]) -> list[StageBytes]:
    """What each worker of a plan holds."""
    return needed_bytes(plan, layered, Settings(), states=states, scratch=0.0, device=device_of(Settings()))


def test_on_cpus_each_host_holds_its_own_workers() -> None:
    plan = Plan(model="any", stages=(Stage(layers=("l",), devices=parse_placement("0:0-1,1:0-1")[0]),), batch=8)
    needed = [StageBytes(*[3 * GIB, *[0] * 8])] * 4
    apart = {host: (_Machine(7 * GIB, ()), [number]) for number, host in enumerate("ab")}
    assert not _too_little_memory(plan, needed, Settings(), apart)
    (word,) = _too_little_memory(plan, needed, Settings(), {"here": (_Machine(7 * GIB, ()), [0, 1])})
    assert "together need 12.0 GiB" in word
    assert "here has 7.0 GiB" in word


@pytest.mark.parametrize(("recompute", "held"), [(False, 2), (True, 1)])
def test_activations_count(recompute: bool, held: int) -> None:
    layered = layered_tower()
    few, many = (
        needed(plan_of(Case("2-2", batch=rows, recompute=recompute), layered.names), layered, lambda role: 1)
        for rows in (8, 808)
    )
    memory = _memory_of(layered, Settings(), lambda role: 1, 0.0)
    assert memory is not None
    cut = plan_of(Case("2-2"), layered.names).edges[1]
    # 800 rows more are 100 more for each of two replicas in each of four microbatches
    more = 100 * memory.held_bytes(0, cut, held, recompute)
    for before, after in zip(few[:2], many[:2]):
        assert more * 0.5 < after.activations - before.activations <= more + 100 * memory.held_bytes(0, cut, 2, True)


def test_counting_activations_leaves_the_model_as_it_is() -> None:
    layered = build_model("tiny-cnn", seed=1)
    before = {name: tensor.clone() for name, tensor in layered.model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    memory = _memory_of(layered, Settings(), lambda role: 1, 0.0)
    assert memory is not None
    assert memory.saved_bytes(0, layered.num_layers) > 0
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layered.model.state_dict().items())
    assert all(parameter.grad is None for parameter in layered.model.parameters())


def test_one_device_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layered = layered_tower()
    monkeypatch.setattr(preflight, "_available_memory", lambda: 100)
    with pytest.raises(UsageError, match="the workers together need"):
        sw.train(make_schedule(plan_of(Case("1"), layered.names)), layered, folder=tmp_path / "run")


def test_the_disk_must_hold_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layered = layered_tower()
    schedule = make_schedule(plan_of(Case("3-1"), layered.names))
    check_before_launch(schedule, layered, Settings(), tmp_path, states=lambda role: 1, keep=3)
    with pytest.raises(UsageError, match=r"1000000000000 checkpoints and the one being written take .* has .* left"):
        check_before_launch(schedule, layered, Settings(), tmp_path, states=lambda role: 1, keep=10**12)


def asked(port: int, *paths: str, **other: object) -> list[str]:
    """Commands that answer as hosts do; `other` changes what the second one says."""
    code = (
        "import json, sys; from stagewright.runtime.safety.preflight import _facts; "
        f"print(json.dumps({{**_facts(sys.argv[2:], int(sys.argv[1]) or None), **{other!r}}}))"
    )
    return [sys.executable, "-c", code]


class Asked(OverSsh):
    """Hosts that answer here; what the second one says is changed, and the third cannot be reached."""

    def reach(self, host: int, command: Sequence[str]) -> list[str]:
        if self.names[host] == "three":
            return ["sh", "-c", "echo 'No route to host' >&2; exit 255"]
        return [*asked(0, **({} if host == 0 else {"torch": "1.0", "time": 0.0})), *command[3:]]


class Agreeing(OverSsh):
    """Hosts that answer here, and alike."""

    def reach(self, host: int, command: Sequence[str]) -> list[str]:
        return [*asked(0), *command[3:]]


def check(hosts: OverSsh, paths: list[str], port: int, states: float = 1) -> None:
    """Checks hosts of which each but the third has a worker."""
    layered = layered_tower()
    stage = Stage(layers=layered.names, devices=parse_placement("0:0,1:0")[0])
    check_hosts(
        hosts, paths, Plan(model="any", stages=(stage,), batch=8), layered, Settings(), states=lambda role: states,
        port=port,
    )  # fmt: skip


def test_hosts_that_agree_may_start(tmp_path: Path) -> None:
    check(Agreeing(("one", "two")), [str(tmp_path)], 29_417)


def test_what_hosts_disagree_on_is_told_at_once(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as told:
            check(Asked(("one", "two", "three")), [str(tmp_path), "/no/such/data"], port, states=1e12)
    text = str(told.value)
    assert "host three cannot be asked: No route to host" in text
    assert "torch is not the same everywhere" in text
    assert "1.0 on two" in text
    assert "the clocks are apart" in text
    assert "host two has no /no/such/data" in text
    assert f"port {port} of host one is taken" in text
    assert "GiB, one has" in text
    assert "GiB, two has" in text


def test_facts_are_plain() -> None:
    told = json.loads(json.dumps(_facts(["/", "/no/such/folder"], None)))
    assert told["missing"] == ["/no/such/folder"]
    assert told["port_is_free"]


NASTY = ["a b", "$(touch hacked)", "`id`", "; rm -rf x", "it's", '"q"', "*", "\\", "&& true", "-x", "ü\n2"]


def test_what_the_user_typed_arrives_as_it_is(fake_ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's a $HOME; folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    python = fake_ssh.parent / "bin" / "its own python"
    python.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getcwd(), *sys.argv]))\n")
    python.chmod(0o755)
    before = ["env", "KEY=a'b c"]
    first, _ = OverSsh(("me@one", "two"), str(python)).commands(NASTY, [1, 1], before=before, port=1)
    done = subprocess.run(first, capture_output=True, text=True, check=True, timeout=30)
    cwd, *words = json.loads(done.stdout)
    assert cwd == str(folder)
    assert words[:3] == [str(python), "-m", "torch.distributed.run"]
    assert words[6:] == ["--master-addr=one", "--master-port=1", *NASTY]
    assert list(folder.iterdir()) == []
    assert fake_ssh.read_text() == "me@one\n"


@pytest.mark.parametrize("host", ["-oProxyCommand=true", "a b", "", "host;true", "$(x)", "a\nb", "@", "me@-x"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="is no name of a host"):
        OverSsh((host,))


@pytest.mark.parametrize("host", ["one", "me@one.local", "10.0.0.7", "[fe80::1]", "node-3_a"])
def test_hosts(host: str) -> None:
    assert OverSsh((host,)).names == (host,)


def test_states_count_by_role_and_frozen_parameters_have_none() -> None:
    layered = layered_tower()
    plan = plan_of(Case("1", batch=8), layered.names)
    matrices = sum(each.numel() for each in layered.model.parameters() if each.dim() == 2)
    one, more = (needed(plan, layered, count)[0] for count in (lambda role: 1, lambda role: 2))
    whole = sum(each.nbytes for each in layered.model.parameters())
    assert more.optimizer - one.optimizer == whole
    less = needed(plan, layered, lambda role: 0 if role == "matrix" else 1)[0]
    assert one.optimizer - less.optimizer == 8 * (matrices - 6 * 4)  # the last, of six inputs and four scores: the head
    for each in layered.model.parameters():
        each.requires_grad_(False)
    assert needed(plan, layered, lambda role: 1)[0].optimizer == 0


def test_a_cpu_worker_holds_the_whole_model_that_it_builds_and_none_that_it_reads_from_a_file() -> None:
    built = build_model("gpt-tiny", num_blocks=2)
    whole = sum(each.nbytes for each in built.model.parameters())
    plan = plan_of(Case("1-1"), built.names)
    assert [each.weights >= whole for each in needed(plan, built, lambda role: 1)] == [True, True]
    shapes = build_model("gpt-tiny", num_blocks=2, device="meta")
    assert sum(each.weights for each in needed(plan, shapes, lambda role: 1)) < 1.5 * whole
