"""`stagewright launch`: what it writes is what schedulers take, and run as they would it trains on uneven hosts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagewright.record import Record

from .conftest import Run

ROOT = Path(__file__).parents[2]
TRAIN = "tiny-cnn --device cpu --batch 12 --placement 0:0-1.1:0 --ratio 2:1 --steps 4 --threads 1 --timeout 60.0"
CARDS = "launch tiny-cnn --batch 64 --placement 0:0-6.1:0 --cut fc1"
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def launched(run: Run, tmp_path: Path) -> Any:
    """What is written for the small run, whose folder is `run`."""

    def written(form: str, *more: object) -> str:
        status, out, err = run("launch", *TRAIN.split(), "-o", tmp_path / "run", *more, "--print", form)
        assert (status, err) == (0, "")
        return out

    return written


def start(script: str, **environment: str) -> subprocess.Popen[str]:
    """A script as a scheduler starts it."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        ["bash", "-c", script], cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def check_trained(folder: Path, *runs: subprocess.Popen[str]) -> None:
    """All ended well, and three workers on two hosts have trained four steps."""
    try:
        said = [run.communicate(timeout=150)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0] * len(runs), said
    (file,) = folder.glob("*record.json")
    record = Record.load(file)
    assert (record.plan.placement, record.plan.host_workers(2)) == ("0:0-1.1:0", (2, 1))
    assert sum(point.name == "loss" for point in record.points) == 4


@pytest.fixture
def here() -> list[str]:
    """An address of loopback and a free port, as torchrun's words have them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return ["--master-addr=127.0.0.1", f"--master-port={server.getsockname()[1]}"]


def test_slurm_asks_every_host_for_the_cards_of_the_largest(run: Run) -> None:
    words = f"{CARDS} --nodes big,small --print slurm"
    script = run(*words.split())[1]
    assert {"gpus-per-node=7", "nodelist=big,small"} <= set(re.findall(r"^#SBATCH --(.*)$", script, re.MULTILINE))
    assert "\nhosts=(big small)\n" in script
    assert "workers=(7 1)" in script
    assert script.endswith("train tiny-cnn --batch 64 --placement 0:0-6.1:0 --cut fc1\n")


def test_kubernetes_takes_the_manifest_and_its_commands_train(launched: Any, here: list[str], tmp_path: Path) -> None:
    schema = yaml.safe_load((Path(__file__).parent / "jobset.yaml").read_text())
    text = launched("kubernetes", "--volume", "disk", "--max-restarts", "2", "--nodes", "a,b")
    made = yaml.safe_load(text)
    check(made, "JOBSET", schema)
    assert "'2:1'" in text, "or it is a number to readers of YAML 1.1"
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 2}
    jobs = made["spec"]["replicatedJobs"]
    pods = [job["template"]["spec"]["template"]["spec"] for job in jobs]
    assert [pod["nodeSelector"]["kubernetes.io/hostname"] for pod in pods] == ["a", "b"]
    words = [pod["containers"][0]["command"] for pod in pods]
    assert all(f"--master-addr=tiny-cnn-{jobs[0]['name']}-0-0.tiny-cnn" in each for each in words)
    assert all(each[-2:] == ["--resume", "auto"] for each in words)
    check_trained(
        tmp_path / "run", *(start(" ".join([sys.executable, *each[1:6], *here, *each[8:]])) for each in words)
    )


def test_kubernetes_asks_for_each_hosts_own_cards(run: Run) -> None:
    words = f"{CARDS} --volume disk --print kubernetes"
    jobs = yaml.safe_load(run(*words.split())[1])["spec"]["replicatedJobs"]
    cards = [job["template"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] for job in jobs]
    assert cards == [{"nvidia.com/gpu": 7}, {"nvidia.com/gpu": 1}]


def check(plain: Any, kind: Any, schema: dict[str, Any], where: list[str] = "") -> None:
    """Refuses what the schema does not know, what it misses, and values of another type."""
    kind = schema[kind] if isinstance(kind, str) and kind.isupper() else kind
    if isinstance(kind, list):
        assert isinstance(plain, list), where
        for number, each in enumerate(plain):
            check(each, kind[0], schema, f"{where}[{number}]")
    elif isinstance(kind, dict):
        known = {name.rstrip("!"): value for name, value in kind.items()}
        assert set(plain) <= set(known), f"{where} has {set(plain) - set(known)}"
        assert {name[:-1] for name in kind if name.endswith("!")} <= set(plain), where
        for name, value in plain.items():
            check(value, known[name], schema, f"{where}.{name}")
    elif kind == "label":
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", plain), f"{where} is {plain}"
    else:
        assert type(plain) is {"string": str, "integer": int}[kind], f"{where} is {plain!r}"


def test_skypilot_runs_its_part_on_each_host(launched: Any, tmp_path: Path) -> None:
    task = yaml.safe_load(launched("skypilot", "--volume", "disk"))
    assert set(task) == {"name", "num_nodes", "resources", "volumes", "setup", "run"}
    assert (task["num_nodes"], task["resources"], task["volumes"]) == (2, {"cpus": "2+"}, {"/work": "disk"})
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    script, path = task["run"].replace("cd /work\n", ""), f"{tmp_path}:{os.environ['PATH']}"
    for number, workers in enumerate((2, 1)):
        run = start(script, SKYPILOT_NODE_RANK=str(number), SKYPILOT_NODE_IPS="10.0.0.7\n10.0.0.8", PATH=path)
        words = run.communicate(timeout=30)[0].split()
        assert {f"--node-rank={number}", f"--nproc-per-node={workers}", "--master-addr=10.0.0.7"} <= set(words)
        assert sorted(words[words.index("train") + 1 :]) == sorted([*TRAIN.split(), "--out", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("words", "what", "todo"),
    [
        ("--print slurm", "on which devices it is to run is not given", "add --plan FILE"),
        ("--devices 2 --print ssh", "the hosts are not named", "add --nodes host1,host2"),
        ("--devices 2 --print ssh --nodes a,b", "--nodes a,b names 2 hosts, but the plan uses 1", "name 1 host"),
        ("--devices 2 --print sge", "--print is 'sge': expected one of slurm, kubernetes, ssh, skypilot", ""),
        ("--placement 0:0,1:0 --print kubernetes", "several hosts need a volume", "name it with --volume"),
        ("--devices 2 --print skypilot", "what kind of cards", "add --accelerator H100"),
        ("--placement 0:0.0:1 --cut fc9 --print slurm", "--cut fc9: the model has no such layer", "layers: fc1, fc2"),
        ("--devices 2", "--print is missing", ""),
    ],
)
def test_mistakes_are_told_before_anything_is_written(words: str, what: str, todo: str, run: Run) -> None:
    status, out, err = run("launch", "tiny-cnn", "--batch", "8", *words.split())
    assert (status, out) == (2, "")
    assert what in err
    assert todo in err
