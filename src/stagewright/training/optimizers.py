"""Optimizers by name, and learning rates over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Literal, get_args

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from stagewright.errors import UsageError
from stagewright.schema import schema

_OptimizerName = Literal["sgd", "adam", "adamw", "rmsprop"]
_Decay = Literal["none", "cosine", "step", "polynomial", "exponential"]
_OPTIMIZERS: tuple[_OptimizerName, ...] = get_args(_OptimizerName)
_DECAYS: tuple[_Decay, ...] = get_args(_Decay)


@schema(error=UsageError)
class Optimization:
    """Optimizer, learning rate and loss, as far as they need no count of steps or epochs."""

    optimizer: _OptimizerName = "sgd"
    learning_rate: float = Field(default=0.01, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    decay_all: bool = True
    """Whether weight decay holds for norms and biases too."""
    decay: _Decay = "none"
    decay_rate: float = Field(default=0.1, gt=0)
    """What `step` multiplies with, and `exponential` over the whole run."""
    decay_power: float = Field(default=1.0, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Of the loss that the model was built with."""


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
        plain = fields(type(self))
        told = {
            each.name: getattr(self, each.name) for each in plain if getattr(self, each.name) != _DEFAULTS[each.name]
        }
        if self.decay == "none":
            told.pop("total_steps", None)
        return ", ".join([self.optimizer, *(f"{key} {value}" for key, value in told.items() if key != "optimizer")])


_DEFAULTS = {each.name: getattr(Recipe(), each.name) for each in fields(Recipe)}


def optimizer_maker(recipe: Recipe, device: str = "cpu") -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """A function from a stage's parameters to their optimizer."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        groups = _decay_groups(list(parameters), recipe)
        common: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
        if recipe.optimizer in ("sgd", "adam", "adamw") and device == "cuda":
            common["fused"] = True
        elif device == "cpu":
            common["foreach"] = True
        if recipe.optimizer == "sgd":
            return torch.optim.SGD(groups, momentum=recipe.momentum, **common)
        if recipe.optimizer == "rmsprop":
            return torch.optim.RMSprop(groups, momentum=recipe.momentum, **common)
        kind = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
        return kind(groups, **common)

    return make


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
