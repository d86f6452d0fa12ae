"""After a plain install, without the extras, every verb works or says what it needs before it does anything else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from stagewright.cli import VERBS

MISSING = (
    "PIL",
    "simplejpeg",
    "google",
    "pynvml",
    "transformers",
    "peft",
    "diffusers",
    "plotly",
    "tensorboard",
    "wandb",
    "mlflow",
)
PILLOW = "needs Pillow, which is not installed\n       pip install 'stagewright[data]'"
PROTOBUF = "needs protobuf, which is not installed\n       pip install 'stagewright[data]'"
LINES = {
    "models": "",
    "cluster titan-v-8": "",
    "profile tiny-cnn --device cpu --batch 4 --repeats 1 -o tiny.profile.json": "",
    "plan tiny.profile.json --cluster local-cpu --batch 16 -o plan.json": "",
    "schedule plan.json": "",
    "simulate plan.json --profile tiny.profile.json --cluster local-cpu -o results/s.record.json": "",
    "data make shapes --images 4": f"`stagewright data make` {PILLOW}",
    "data convert classes parts": f"--format ofrecord {PROTOBUF}",
    "data convert classes shards --format tar": "",
    "data convert given other --format tar": f"given, which holds OFRecord parts, {PROTOBUF}",
    "data inspect classes": f"`stagewright data inspect` {PILLOW}",
    "rehearse tiny-cnn --cluster hosts-4 --batch 16 --data classes": f"--data classes {PILLOW}",
    "train tiny-cnn --device cpu --batch 4 --steps 2 --checkpoint-every 1 -o results/run": "",
    "train tiny-cnn --device cpu --batch 4 --data classes -o no": f"--data classes {PILLOW}",
    "train tiny-cnn --device cpu --batch 4 --evaluation-data classes -o no": f"--evaluation-data classes {PILLOW}",
    "train hf:classes --device cpu --batch 4 -o no": (
        "hf:classes needs transformers, which is not installed\n       pip install 'stagewright[hf]'"
    ),
    "train mlp --device cpu --batch 4 --lora 2 --lora-targets fc -o no": "adapters need the package peft",
    "train tiny-cnn --device cpu --batch 4 --tensorboard -o no": "--tensorboard needs the package tensorboard",
    "train tiny-cnn --device cpu --batch 4 --wandb -o no": "--wandb needs the package wandb",
    "bench pipedream --simulate --only alexnet-of-dp -o results/bench": "",
    "export results/run -o model.safetensors": "",
    "doctor results/bench": "results/bench is no folder of a run",
    "checkpoints list results/run": "",
    "launch tiny-cnn --batch 16 --nodes a,b --placement 0:0,1:0 --print ssh": "",
    "report results": "",
}
"""What is typed, and what is said of what is missing; nothing where it works."""

HOOK = f"""
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MISSING!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuses())
"""
ALL = """
import contextlib, io, json, shlex, sys
from stagewright.cli import main

for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["stagewright", *shlex.split(line)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        print(json.dumps([line, ended.code or 0, out.getvalue(), err.getvalue()]), flush=True)
"""


class Ran(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything is run: beside a set of images and parts of records."""
    made = tmp_path_factory.mktemp("plain")
    (made / "hook").mkdir()
    (made / "hook" / "sitecustomize.py").write_text(HOOK)
    (made / "classes" / "cat").mkdir(parents=True)
    (made / "classes" / "cat" / "0.jpg").write_bytes(bytes.fromhex("ffd8ffe0"))
    (made / "given").mkdir()
    (made / "given" / "part-00000").write_bytes(b"")
    return made


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Ran]:
    """What came of every line, in a process that cannot import what an extra brings."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "hook"), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", ALL], cwd=folder, env=environment, input=json.dumps(list(LINES)), capture_output=True,
        text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {line: Ran(*result) for line, *result in map(json.loads, done.stdout.splitlines())}


def test_every_verb_is_tried() -> None:
    assert {line.split()[0] for line in LINES} == set(VERBS)


@pytest.mark.parametrize("line", LINES)
def test_it_works_or_says_what_to_install(line: str, ran: dict[str, Ran]) -> None:
    found, told = ran[line], LINES[line]
    if not told:
        assert found.status == 0, found.err
        assert found.out
        return
    assert found.status == 2
    assert found.err.startswith(f"error: {told}")
    assert found.out == ""


def test_nothing_was_done_before_it_was_said(ran: dict[str, Ran], folder: Path) -> None:
    assert not [name for name in ("shapes", "parts", "other", "no") if (folder / name).exists()]
