"""Recipes: the files that come with the package, what overrides them, and what they do to rates, weights and loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stagewright.cluster import parse_devices
from stagewright.errors import FileError, ModelError, UsageError
from stagewright.models import build_model
from stagewright.models.loss import mean_loss, smoothed
from stagewright.plan import Plan, Stage
from stagewright.scheduling import make_schedule
from stagewright.training.config import make_config
from stagewright.training.recipes import (
    Recipe,
    RecipeFile,
    optimizer_maker,
    rate_at,
)
from stagewright.training.start import train

PER_EPOCH = 100


# Files


def test_resnet50_is_that_of_the_benchmark_series() -> None:
    recipe = RecipeFile.find("resnet50")
    assert (recipe.precision, recipe.batch_per_device, recipe.optimizer) == ("fp16", 256, "sgd")
    assert (recipe.momentum, recipe.weight_decay, recipe.decay_all) == (0.875, 2**-15, False)
    assert (recipe.decay, recipe.warm_up_epochs, recipe.label_smoothing) == ("cosine", 5, 0.1)


def test_the_files_are_named_as_their_models_and_live_through_saving(tmp_path: Path) -> None:
    assert set(RecipeFile.ready_made()) == {"alexnet", "vgg16", "resnet50"}
    for name in RecipeFile.ready_made():
        recipe = RecipeFile.find(name)
        assert recipe.name == name
        assert RecipeFile.load(recipe.save(tmp_path / f"{name}.yaml")) == recipe
        assert recipe.in_steps(batch=256, per_epoch=PER_EPOCH, total_steps=500).learning_rate == recipe.learning_rate


def test_a_mistake_in_a_file_is_named_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("format: stagewright.recipe\nversion: 1\nmomentum: 1.5\n")
    with pytest.raises(FileError, match=r"mine\.yaml: key momentum is 1\.5: expected less than 1"):
        RecipeFile.find(str(file))
    with pytest.raises(UsageError, match=r"no recipe is named 'resnet51'; ready-made: alexnet, resnet50, vgg16"):
        RecipeFile.find("resnet51")


# What overrides what


def with_options(name: str, **layers: dict[str, object]) -> RecipeFile:
    """The recipe of that name with what options say in its place."""
    recipe = {"like": name, **layers.pop("recipe", {})}
    return make_config({"model": {"name": "tiny-cnn"}, "recipe": recipe, **layers}).recipe


def test_options_take_the_place_of_keys() -> None:
    recipe = with_options("resnet50", recipe={"momentum": 0.9, "precision": "fp32"})
    assert (recipe.momentum, recipe.precision, recipe.epochs, recipe.label_smoothing) == (0.9, "fp32", 50, 0.1)


def test_the_rate_of_a_file_grows_with_the_batch_and_one_that_is_given_does_not() -> None:
    assert with_options("resnet50").rate(2048) == pytest.approx(8 * 0.256)
    assert with_options("resnet50", recipe={"learning_rate": 0.5}).rate(2048) == 0.5


def test_steps_without_epochs_are_the_whole_length() -> None:
    assert with_options("resnet50", job={"steps": 100}).epochs is None
    assert with_options("resnet50", job={"steps": 100}, recipe={"epochs": 4}).epochs == 4


# Rates


def in_steps(**values: object) -> Recipe:
    return RecipeFile(learning_rate=1.0, **values).in_steps(batch=8, per_epoch=PER_EPOCH, total_steps=1000)  # type: ignore[arg-type]


def test_warm_up_is_linear_and_cosine_follows() -> None:
    recipe = in_steps(warm_up_epochs=2, decay="cosine")
    assert [rate_at(recipe, step) for step in (0, 99, 199)] == [1 / 200, 0.5, 1.0]
    assert [rate_at(recipe, step) for step in (200, 600, 1000)] == pytest.approx([1.0, 0.5, 0.0])


def test_step_decay_counts_epochs() -> None:
    recipe = in_steps(decay="step", decay_epochs=(3, 6))
    assert [rate_at(recipe, step) for step in (299, 300, 599, 600)] == pytest.approx([1.0, 0.1, 0.1, 0.01])


def test_polynomial_and_exponential_end_with_the_run() -> None:
    assert rate_at(in_steps(decay="polynomial", decay_power=2.0), 500) == pytest.approx(0.25)
    assert rate_at(in_steps(decay="exponential", decay_rate=0.01), 500) == pytest.approx(0.1)


def test_step_decay_without_steps_is_refused() -> None:
    with pytest.raises(UsageError, match="--decay step does not say when the rate falls"):
        in_steps(decay="step")


# Weights


EVERYTHING = {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.parametrize(("decay_all", "decayed"), [(True, EVERYTHING), (False, {"0.weight"})])
def test_norms_and_biases_can_be_spared_from_weight_decay(decay_all: bool, decayed: set[str]) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    recipe = Recipe(learning_rate=1.0, momentum=0.0, weight_decay=0.1, decay_all=decay_all)
    optimizer = optimizer_maker(recipe)(module.parameters())
    before = {name: parameter.detach().clone().fill_(1.0) for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.data, parameter.grad = before[name].clone(), torch.zeros_like(parameter)
    optimizer.step()
    assert {name for name, now in module.named_parameters() if not torch.equal(now, before[name])} == decayed


# Loss


@pytest.mark.parametrize("name", ["tiny-cnn", "gpt-tiny"])
def test_label_smoothing_reaches_the_loss(name: str) -> None:
    model = build_model(name, label_smoothing=0.2)
    whole = model.stage(0, model.num_layers)
    rows = [torch.zeros(2, *spec.shape_per_row, dtype=spec.dtype) for spec in (*model.inputs, *model.targets)]
    with torch.no_grad():
        loss, logits = whole(*rows)
    labels = rows[-1].reshape(-1)
    expected = F.cross_entropy(logits.reshape(len(labels), -1), labels, label_smoothing=0.2, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_recipe_and_a_loss_that_disagree_are_refused() -> None:
    model = build_model("tiny-cnn")
    plan = Plan(model="tiny-cnn", stages=(Stage(layers=model.names, devices=parse_devices("0:0")),), batch=4)
    with pytest.raises(UsageError, match=r"smooths labels by 0\.1, but the model's loss by 0"):
        train(make_schedule(plan), model, recipe=Recipe(label_smoothing=0.1))
    with pytest.raises(ModelError, match="needs a cross entropy"):
        smoothed(mean_loss(F.mse_loss), 0.1)
