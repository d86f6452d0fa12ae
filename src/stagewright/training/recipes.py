"""Recipes: how a model is trained, in steps, and as files that count in epochs and rows a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from stagewright.errors import StagewrightError, UsageError
from stagewright.profile import Precision
from stagewright.schema import Saved, schema
from stagewright.training.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def _known_optimizer(name: str) -> str:
    if name not in OPTIMIZERS:
        raise ValueError(f"expected one of {', '.join(OPTIMIZERS)}")
    return name


@schema(error=UsageError)
class Optimization:
    """Optimizer, learning rate and loss, as far as they need no count of steps or epochs."""

    optimizer: Annotated[str, AfterValidator(_known_optimizer)] = "sgd"
    """sgd, adam, adamw or rmsprop"""
    learning_rate: float = Field(default=0.01, ge=0)
    """the learning rate after warm-up"""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """of sgd and rmsprop"""
    weight_decay: float = Field(default=0.0, ge=0)
    """how strongly weights are drawn to 0"""
    decay_all: bool = True
    """weight decay of norms and biases too"""
    decay: Literal["none", "cosine", "step", "polynomial", "exponential"] = "none"
    """how the rate falls"""
    decay_rate: float = Field(default=0.1, gt=0)
    """what step multiplies with, and exponential over the run"""
    decay_power: float = Field(default=1.0, gt=0)
    """of polynomial"""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """share of a label that goes to all classes, in the loss that the model was built with"""


@schema(error=UsageError)
class Recipe(Optimization):
    """What turns gradients into weights, step by step."""

    warm_up_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from near 0."""
    decay_steps: tuple[int, ...] = ()
    """The steps after which a `step` decay multiplies the rate by `decay_rate`."""
    total_steps: int | None = Field(default=None, ge=1)
    """When `cosine`, `polynomial` and `exponential` end."""

    def __post_init__(self) -> None:
        if self.decay in ("cosine", "polynomial", "exponential") and self.total_steps is None:
            raise UsageError(f"decay {self.decay} needs total_steps, the step at which it ends")
        if self.decay == "step" and not self.decay_steps:
            raise UsageError("decay step needs decay_steps, the steps after which the rate falls")

    def in_words(self) -> str:
        """The optimizer and whatever is not as it is by default; when a decay ends, only where there is one."""
        plain = vars(type(self)())
        told = {key: value for key, value in vars(self).items() if key in plain and value != plain[key]}
        if self.decay == "none":
            told.pop("total_steps", None)
        return ", ".join([self.optimizer, *(f"{key} {value}" for key, value in told.items() if key != "optimizer")])


def optimizer_maker(recipe: Recipe, device: str = "cpu") -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """A function from a stage's parameters to their optimizer."""
    kind = OPTIMIZERS[recipe.optimizer]
    given: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay, **kind.defaults}
    given |= {name: getattr(recipe, name) for name in kind.options}
    if device in kind.fast:
        given[kind.fast[device]] = True
    return lambda parameters: kind.make(_decay_groups(list(parameters), recipe), **given)


def _decay_groups(parameters: list[nn.Parameter], recipe: Recipe) -> list[dict[str, Any]]:
    """One group, or two where norms and biases (one dimension or none) are spared from weight decay."""
    if recipe.decay_all or recipe.weight_decay == 0:
        return [{"params": parameters}]
    decayed = [each for each in parameters if each.dim() > 1]
    spared = [each for each in parameters if each.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate of a step.

    warm-up:      rate · (step + 1) / warm_up_steps
    cosine:       rate · (1 + cos(π · t)) / 2                t: share of the steps after the warm-up
    polynomial:   rate · (1 − t)^power
    exponential:  rate · decay_rate^t
    step:         rate · decay_rate^(number of decay_steps passed)
    """
    if step < recipe.warm_up_steps:
        return recipe.learning_rate * (step + 1) / recipe.warm_up_steps
    if recipe.decay == "none":
        return recipe.learning_rate
    if recipe.decay == "step":
        return recipe.learning_rate * recipe.decay_rate ** sum(step >= limit for limit in recipe.decay_steps)
    left = max(1, (recipe.total_steps or 1) - recipe.warm_up_steps)
    share = min(1.0, (step - recipe.warm_up_steps) / left)
    if recipe.decay == "cosine":
        return recipe.learning_rate * (1 + math.cos(math.pi * share)) / 2
    if recipe.decay == "polynomial":
        return float(recipe.learning_rate * (1 - share) ** recipe.decay_power)
    return float(recipe.learning_rate * recipe.decay_rate**share)


@schema(error=UsageError)
class RecipeFile(Optimization, Saved):
    """A recipe in epochs; every option of `stagewright train` of the same name takes the place of a key."""

    FORMAT: ClassVar[str] = "stagewright.recipe"
    ERROR: ClassVar[type[StagewrightError]] = UsageError

    name: str = "plain"
    about: str = ""
    epochs: int | None = Field(default=None, ge=1)
    """passes over the data"""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Epochs between evaluations, where there are any."""
    batch_per_device: int | None = Field(default=None, ge=1)
    """Where no batch is given."""
    precision: Precision = "fp32"
    """what stages compute in; fp16 has a dynamic loss scale"""
    clip_norm: float | None = Field(default=None, gt=0)
    """largest norm of all gradients together"""
    rate_batch: int | None = Field(default=None, ge=1)
    """The batch that the learning rate is meant for; with another one the rate changes in proportion."""
    warm_up_epochs: float = Field(default=0.0, ge=0)
    """epochs over which the learning rate rises from near 0"""
    warm_up_steps: int | None = Field(default=None, ge=0)
    """the same in steps, instead"""
    decay_epochs: tuple[int, ...] = ()
    """when --decay step multiplies, such as 30,60,80"""
    decay_steps: tuple[int, ...] = ()
    """the same in steps, instead, such as 1000,2000"""
    crop_area: float = Field(default=0.08, gt=0, le=1)
    """smallest share of an image that a random crop keeps"""

    @property
    def needs_epochs(self) -> bool:
        """Whether anything is counted in epochs."""
        return bool(self.epochs or self.warm_up_epochs or self.decay_epochs)

    def rate(self, batch: int) -> float:
        """The learning rate for a batch.

        rate · batch / rate_batch        Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.1
        """
        return self.learning_rate * batch / (self.rate_batch or batch)

    def in_steps(self, *, batch: int, per_epoch: int | None, total_steps: int) -> Recipe:
        """The same recipe for a run of so many steps; `per_epoch` is how many make an epoch."""
        values = {field.name: getattr(self, field.name) for field in fields(Optimization)}
        rising = round(self.warm_up_epochs * (per_epoch or 0))
        falling = tuple(epoch * (per_epoch or 0) for epoch in self.decay_epochs)
        values |= {
            "learning_rate": self.rate(batch),
            "warm_up_steps": rising if self.warm_up_steps is None else self.warm_up_steps,
            "decay_steps": self.decay_steps or falling,
        }
        return Recipe(**values, total_steps=total_steps)


def ready_made_recipes() -> dict[str, Path]:
    """The recipe files that come with the package, by name."""
    package = Path(__file__).parents[1]
    folders = (package / "recipes", package.parents[1] / "recipes")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name_or_file: str) -> RecipeFile:
    """The recipe in a file, or the ready-made one of that name."""
    known = ready_made_recipes()
    if name_or_file in known:
        return RecipeFile.load(known[name_or_file])
    if Path(name_or_file).suffix in (".yaml", ".yml", ".json"):
        return RecipeFile.load(name_or_file)
    raise UsageError(
        f"no recipe is named {name_or_file!r}; ready-made: {', '.join(known) or 'none'}",
        "give one of these names, or a .yaml or .json file",
    )
