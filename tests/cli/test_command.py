"""The command as a person meets it: help with examples that work, errors of one or two lines, completion, speed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

import stagewright.cli
from stagewright.cli import VERBS, main
from stagewright.errors import StagewrightError

from .conftest import Run

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"


def process(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own."""
    return subprocess.run([sys.executable, "-m", "stagewright", *words], capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


def example_of(verb: str) -> str:
    """The example in a verb's help."""
    lines = (getattr(import_module(f"stagewright.cli.{verb}"), verb).__doc__ or "").split("Example: ")
    assert len(lines) == 2, f"the docstring of `{verb}` has no line `Example: stagewright {verb} …`"
    return " ".join(lines[1].split())


# Help


def test_every_file_is_a_verb_and_every_verb_a_file() -> None:
    folder = Path(stagewright.cli.__file__).parent
    assert {file.stem for file in folder.glob("*.py")} - {"__init__", "options", "show"} == set(VERBS)


def test_help_names_every_verb(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    for verb, purpose in VERBS.items():
        assert f" {verb} " in out
        assert purpose.split()[0] in out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str, run: Run) -> None:
    status, out, err = run(verb, "--help")
    assert (status, err) == (0, "")
    assert f"Example: stagewright {verb}" in " ".join(out.split())
    assert example_of(verb).startswith(f"stagewright {verb} ")


def test_nothing_is_help(run: Run) -> None:
    status, out, err = run()
    assert "Usage: stagewright" in out + err
    assert status in (0, 2)


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"stagewright {stagewright.__version__}\n", "")
    assert process("--version").stdout == f"stagewright {stagewright.__version__}\n"


ORDER = ("models", "profile", "plan", "schedule", "simulate", "bench", "report", "cluster")
"""The plan's example reads the file that the profile's wrote."""


@pytest.mark.timeout(300)
def test_examples_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.chdir(tmp_path)
    have_reference = REFERENCE.is_dir()
    if have_reference:
        (tmp_path / "topo.txt").write_bytes((REFERENCE / "topo-v100-sxm2-8.txt").read_bytes())
    run(*shlex.split("simulate mlp --cluster titan-v-8 --batch 64 -o results/mlp.record.json"))
    for verb in ORDER if have_reference else ORDER[:-1]:
        status, out, err = run(*shlex.split(example_of(verb))[1:])
        assert status == 0, f"{example_of(verb)}\n{out}\n{err}"
        assert out.strip()
    assert {"vgg16.profile.json", "plan.json"} <= {path.name for path in tmp_path.iterdir()}


# Models


def test_models_lists_the_counts(run: Run) -> None:
    status, out, _ = run("models", "--json")
    found = {model["name"]: model for model in json.loads(out)}
    assert status == 0
    counts = {"alexnet": 61_100_840, "vgg16": 138_357_544, "resnet50": 25_557_032}
    assert {name: found[name]["parameters"] for name in counts} == counts
    assert found["vgg16"]["forward_flops"] == 30_940_528_640


def test_models_shows_layers_by_name(run: Run) -> None:
    status, out, _ = run("models", "vgg16", "--layers")
    lines = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert status == 0
    assert lines[2:5] == ["conv1_1", "conv1_2", "conv2_1"]
    assert lines[-6:-2] == ["fc1", "fc2", "fc3", "loss"]


def test_the_file_of_counts_is_that_of_the_models() -> None:
    """`python scripts/count_models.py` writes it anew."""
    from stagewright.cli.models import read_models
    from stagewright.models import MODELS, build_model, forward_flops, parameter_counts

    known = read_models()
    assert list(known) == list(MODELS)
    for name, model in known.items():
        built = build_model(name, device="meta")
        assert tuple(layer.name for layer in model.layers) == built.names
        assert tuple(layer.parameters for layer in model.layers) == parameter_counts(built)
        assert tuple(layer.forward_flops for layer in model.layers) == forward_flops(built)
        assert (model.sample_shape, model.about) == (built.inputs[0].shape_per_row, MODELS[name].about)


# Mistakes


def test_debug_shows_the_traceback_from_anywhere_on_the_line() -> None:
    for words in (("--debug", "models", "vg16"), ("models", "vg16", "--debug")):
        with pytest.raises(StagewrightError, match="no model is called"):
            main(words)


def test_a_fault_of_the_program_is_no_traceback_either(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.cli.models.read_models", lambda: 1 // 0)
    status, _, err = run("models")
    assert status == 1
    assert err.startswith("error: ZeroDivisionError")
    assert "--debug" in err


def test_a_file_that_cannot_be_written_is_an_error(run: Run) -> None:
    status, _, err = run("schedule", "--replicas", "3,1", "-o", "/proc/none/schedule.json")
    assert status == 2
    assert err.startswith("error: -o /proc/none")


def test_a_reader_that_goes_away_is_no_error() -> None:
    line = f"{sys.executable} -m stagewright models --json | head -n 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[\n", "")


def test_ctrl_c_is_quiet_and_status_130(tmp_path: Path) -> None:
    """A verb that waits for input from a pipe nobody writes to is interrupted."""
    pipe = tmp_path / "plan.json"
    os.mkfifo(pipe)
    running = subprocess.Popen(
        [sys.executable, "-m", "stagewright", "schedule", str(pipe)], stderr=subprocess.PIPE, text=True
    )
    with pipe.open("w"):  # returns once the verb has opened its end
        time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=30)
    assert (running.returncode, err) == (130, "")


# Completion and speed


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("stagewright mo", ["models"]),
        ("stagewright models res", ["resnet18", "resnet50", "resnet101"]),
        ("stagewright schedule --re", ["--replicas"]),
    ],
)
def test_the_shell_completes(line: str, completions: Sequence[str]) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_STAGEWRIGHT_COMPLETE": "complete_bash"}
    assert process(env=os.environ | words).stdout.split() == list(completions)


def test_completion_can_be_installed(tmp_path: Path) -> None:
    # Typer looks for the shell among the parent processes, which under make is one without completion: name it.
    named = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = process("--install-completion", "bash", env=os.environ | named)
    assert done.returncode == 0, done.stderr
    assert any("stagewright" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("words", "most", "without"), [(("--help",), 450, {"pydantic", "yaml"}), (("models",), 500, set())]
)
def test_it_starts_in_a_blink(words: tuple[str, ...], most: int, without: set[str]) -> None:
    """Imports are what a start takes; they are counted, for seconds are those of the machine that day."""
    check = (
        "import sys; from stagewright.cli import main\n"
        f"try: main({list(words)})\nexcept SystemExit: pass\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    loaded = done.stderr.split()
    assert (without | {"torch", "numpy", "scipy", "pandas", "matplotlib"}).isdisjoint(loaded)
    assert len(loaded) < most


@pytest.mark.parametrize("verb", ["models", "schedule", "simulate", "plan", "report", "train", "bench"])
def test_help_needs_no_torch(verb: str) -> None:
    check = (
        "import sys; from stagewright.cli import main\n"
        f"try: main(['{verb}', '--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)
