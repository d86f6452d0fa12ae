"""One configuration: a file, the command line and Python fill the same tree."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from stagewright.cli.bench import bench
from stagewright.cli.launch import launch
from stagewright.cli.options import _PANELS
from stagewright.cli.plan import plan
from stagewright.cli.rehearse import rehearse
from stagewright.cli.simulate import simulate
from stagewright.cli.train import USUAL, train
from stagewright.errors import StagewrightError
from stagewright.planning.options import PlanOptions
from stagewright.record import Record
from stagewright.runtime.settings import Computing
from stagewright.training.config import CONFIG_FILE, NO_OPTION, SECTIONS, Config, ModelOptions, PlanChoice, make_config
from stagewright.training.sections import section_keys

from .conftest import Run

EVERYTHING = (
    "train", "tiny-cnn", "--image-size", 32, "--data", "synthetic", "--epoch-images", 640, "--batch", 64,
    "--placement", "0:0-1.0:2", "--cut", "fc1", "--microbatches", 2, "--schedule", "gpipe", "--staleness", "0",
    "--recipe", "resnet50", "--learning-rate", 0.5, "--precision", "fp32", "--decay-epochs", "3,6",
    "--steps", 3, "--seed", 7, "--timeout", 60, "--no-self-check", "--tensorboard", "--wandb", "--keep", 5,
    "--device", "cpu", "--no-save-final", "-o", "somewhere",
)  # fmt: skip


def test_what_is_printed_is_read_back_to_the_same_run(tmp_path: Path, run: Run) -> None:
    status, text, err = run(*EVERYTHING, "--print-config")
    assert (status, err) == (0, "")
    (tmp_path / "run.yaml").write_text(text)
    assert run("train", "--config", tmp_path / "run.yaml", "--print-config") == (0, text, "")
    config = Config.load(tmp_path / "run.yaml")
    assert config.plan.cut == ("fc1",)
    assert (config.recipe.learning_rate, config.recipe.rate_batch, config.recipe.momentum) == (0.5, None, 0.875)
    assert (config.recipe.decay_epochs, config.recipe.epochs, config.job.steps) == ((3, 6), None, 3)
    assert config.job.sinks == ("tensorboard", "wandb")
    assert config.settings == Computing(seed=7, timeout_s=60.0, self_check=False)
    assert config.where.out == Path("somewhere")
    for ending in ("yaml", "json"):
        assert Config.load(config.save(tmp_path / f"again.{ending}")) == config


def test_options_override_the_file_and_the_file_the_recipe(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "format: stagewright.config\nversion: 1\nmodel: {name: mlp}\n"
        "plan: {batch_per_device: 8, cut: fc1, staleness: 0}\njob: {steps: 9}\n"
        "recipe: {like: resnet50, momentum: 0.7}\n"
    )

    def printed(*words: object) -> Config:
        (tmp_path / "made.yaml").write_text(run("train", *words, "--config", file, "--print-config")[1])
        return Config.load(tmp_path / "made.yaml")

    made = printed("--batch", 128, "--ratio", "3:1")
    assert made.model.name == "mlp"
    assert made.plan == PlanChoice(batch=128, ratio="3:1", staleness="0")
    assert (made.recipe.momentum, made.recipe.weight_decay) == (0.7, 3.0517578125e-05)
    assert (made.job.steps, made.recipe.epochs) == (9, None)
    made = printed("tiny-cnn", "--recipe", "vgg16")
    assert (made.model.name, made.recipe.name) == ("tiny-cnn", "vgg16")
    assert made.recipe.momentum != 0.7, "another recipe takes the place of the file's"


MISTAKES = {
    "plan: {schedule: 1f2b}": "key plan.schedule is '1f2b': expected one of gpipe, 1f1b",
    "plan: {batch: many}": "key plan.batch is 'many': expected a valid integer",
    "plan: {policy: gpipe}": "key plan.policy is unknown",
    "job: {steps: 0}": "key job.steps is 0: expected 1 or more",
    "job: {step: 3}": "key job.step is unknown",
    "job: 3": "key job is 3: expected its keys and values",
    "settings: {timeout: long}": "key settings.timeout is 'long': expected a valid number",
    "settings: {precision: fp16}": "key settings.precision is unknown",
    "recipe: {optimizer: sdg}": "key recipe.optimizer is 'sdg': expected one of sgd, adam, adamw, rmsprop",
    "recipe: {decay_steps: [1, x]}": "key recipe.decay_steps[1] is 'x': expected a valid integer",
    "runs: {steps: 3}": "key runs is unknown: expected one of model, data, plan",
}


@pytest.mark.parametrize(("line", "told"), MISTAKES.items(), ids=list(MISTAKES))
def test_a_mistake_in_the_file_names_file_key_value_and_what_is_expected(
    line: str, told: str, tmp_path: Path, run: Run
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"format: stagewright.config\nversion: 1\n{line}\n")
    status, out, err = run("train", "tiny-cnn", "--config", file, "--dry-run")
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {file}: {told}")
    assert len(err.splitlines()) <= 2


def test_the_run_keeps_its_configuration_and_its_workers_read_it(tmp_path: Path, run: Run) -> None:
    words = ("train", "tiny-cnn", "--device", "cpu", "--batch", 12, "--devices", 2, "--steps", 3, "--no-save-final")
    given = yaml.safe_load(run(*words, "-o", tmp_path / "run", "--print-config")[1])
    # The own words of this process are pytest's: workers that parsed them again would not train.
    assert run(*words, "-o", tmp_path / "run")[0] == 0
    assert yaml.safe_load((tmp_path / "run" / CONFIG_FILE).read_text()) == given
    first = Record.load(tmp_path / "run" / "record.json")
    given["where"]["out"] = str(tmp_path / "again")
    (tmp_path / "again.json").write_text(json.dumps(given))
    assert run("train", "--config", tmp_path / "again.json")[0] == 0
    again = Record.load(tmp_path / "again" / "record.json")
    assert [point.value for point in again.points] == [point.value for point in first.points]


def test_python_fills_the_same_tree() -> None:
    config = Config(model=ModelOptions(name="mlp"), plan=PlanChoice(batch=8))
    assert config == make_config({"model": {"name": "mlp"}, "plan": {"batch": 8}})
    with pytest.raises(StagewrightError, match="--batch is 0: expected 1 or more"):
        make_config({"model": {"name": "mlp"}, "plan": {"batch": 0}})


def options_of(verb: Any) -> dict[str, Any]:
    """The options of a verb by their longest name."""
    app = typer.Typer(add_completion=False)
    app.command()(verb)
    return {max(each.opts, key=len): each for each in get_command(app).params if each.opts[0].startswith("-")}


def test_every_field_has_a_help_text_and_an_option_or_a_place_in_the_file() -> None:
    for name, cls in SECTIONS.items():
        for key in section_keys(cls):
            assert key.about or f"{name}.{key.key}" in NO_OPTION, key


def test_an_option_has_the_same_form_in_every_verb() -> None:
    known = options_of(train)
    for verb in (plan, simulate, rehearse):
        shared = [key.option for key in section_keys(PlanOptions)]
        own = options_of(verb)
        for name in set(shared) & set(own) - ({"--batch"} if verb is simulate else set()):
            for part in ("opts", "secondary_opts", "multiple", "nargs", "is_flag", "help", "default"):
                assert getattr(own[name], part) == getattr(known[name], part), (name, part)
        assert {"--cut", "--schedule", "--recompute"} <= set(own)
    assert options_of(bench)["--nodes"].multiple is False


def test_help_shows_the_usual_options_in_groups_and_the_rest_on_demand(run: Run) -> None:
    told = {}
    for option in ("--help", "--help-all"):
        _, out, _ = run("train", option)
        told[option] = set(re.findall(r"^  (?:-\w, )?(--[^ ]+)", out, re.MULTILINE))
        titles = re.findall(r"^([A-Z][\w ]+):(?: |$)", out, re.MULTILINE)[1:]
        if option == "--help":
            assert titles == ["Arguments", *USUAL, "Help"]
            left = re.search(r"(\d+) more options: stagewright train --help-all", out)
            assert len(out.splitlines()) <= 90
        else:
            assert set(titles) == {"Arguments", "Options", *(_PANELS[name] for name in SECTIONS if name != "rehearsal")}
    usual, everything = told.values()
    assert usual < everything
    assert left is not None
    assert len(everything) - len(usual) == int(left[1])
    assert {"--[no-]save-final", "--overwrite"} <= everything
    assert not usual & {"--lora", "--[no-]self-check"}


def test_the_usual_options_are_options() -> None:
    for verb in (train, rehearse, launch):
        names = set(inspect.signature(verb).parameters)
        chosen = {name for group in verb.usual.values() for name in group}  # type: ignore[attr-defined]
        assert chosen - names <= (set() if verb is train else {"nodes", "devices", "dry_run", "print_config", "json"})
