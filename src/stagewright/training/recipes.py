"""Optimizers, decays and recipes: how a model is trained, in steps, and as files that count in epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from stagewright.errors import StagewrightError, UsageError
from stagewright.profile import Precision
from stagewright.schema import Saved, schema

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from stagewright.models.counts import Role


@schema(error=UsageError)
class Adapters:
    """What is trained of a model: all of it, or low-rank adapters in it."""

    lora: int | None = Field(default=None, ge=1)
    """freeze the model, and train low-rank adapters of this rank in it (needs peft)"""
    lora_targets: tuple[str, ...] = ()
    """the linear layers that get them, such as q_proj,v_proj, or all-linear; by default those usual for the model"""
    lora_alpha: float | None = Field(default=None, gt=0)
    """adapters count alpha / rank times; twice the rank by default"""

    def __post_init__(self) -> None:
        if self.lora is None and (self.lora_targets or self.lora_alpha is not None):
            option = "--lora-targets" if self.lora_targets else "--lora-alpha"
            raise UsageError(f"{option} is given, but no --lora", "add --lora RANK")


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """An optimizer that recipes can name."""

    make: Callable[..., Optimizer]
    """Called with groups of parameters, lr, weight_decay, the recipe's values named by `options`, and `defaults`.

    A group's `is_matrices` says whether its parameters are matrices that are no embedding or head; it is there where
    `splits`.
    """
    states: int
    """How many numbers it keeps for each number of a parameter; planner, simulator and checks of memory count them."""
    states_by_role: Mapping[str, float] = field(default_factory=dict)
    """The same for parameters of some roles (see models/counts.py), where these are others."""
    scratch: Mapping[str, float] = field(default_factory=dict)
    """For a kind of device how many numbers a step takes for itself for each number of a parameter; 0 left out."""
    splits: bool = False
    """Whether it treats matrices apart."""
    options: tuple[str, ...] = ()
    """Fields of the recipe that it takes beside the rate and the weight decay; beta1 and beta2 come as `betas`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What it is always called with."""
    fast: Mapping[str, str] = field(default_factory=dict)
    """For a kind of device, cpu or cuda, the argument that is true there for speed."""

    def states_of(self, role: str) -> float:
        """How many numbers it keeps for each number of a parameter of a role."""
        return self.states_by_role.get(role, self.states)

    def scratch_on(self, device: str) -> float:
        """How many numbers a step takes for itself, for each number of a parameter, on a kind of device."""
        return self.scratch.get("cpu" if device == "cpu" else "cuda", 0.0)


def _lazily(module: str, name: str) -> Callable[..., Optimizer]:
    """The optimizer of this name; its module is loaded when one is made."""

    def make(groups: list[dict[str, Any]], **values: Any) -> Optimizer:
        made: Optimizer = getattr(import_module(module), name)(groups, **values)
        return made

    return make


_torch = partial(_lazily, "torch.optim")
_BOTH, _ADAM = {"cuda": "fused", "cpu": "foreach"}, ("beta1", "beta2", "eps")
OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind(make=_torch("SGD"), states=1, options=("momentum",), fast=_BOTH),
    "adam": OptimizerKind(make=_torch("Adam"), states=2, scratch={"cpu": 1}, options=_ADAM, fast=_BOTH),
    "adamw": OptimizerKind(make=_torch("AdamW"), states=2, scratch={"cpu": 1}, options=_ADAM, fast=_BOTH),
    "rmsprop": OptimizerKind(
        make=_torch("RMSprop"), states=2, scratch={"cpu": 1, "cuda": 1}, options=("momentum", "eps"),
        fast={"cpu": "foreach"}
    ),
    "muon": OptimizerKind(
        make=_lazily("stagewright.training.muon", "Muon"), states=2, states_by_role={"matrix": 1}, splits=True,
        options=("momentum", *_ADAM), fast=_BOTH
    ),
    # Of a matrix it keeps a number a row and one a column.
    "adafactor": OptimizerKind(
        make=_torch("Adafactor"), states=1, states_by_role={"matrix": 0, "embedding": 0, "head": 0},
        scratch={"cuda": 2}, fast={"cuda": "foreach"}
    ),
}  # fmt: skip
"""By the name that --optimizer and recipe files have for it; docs/extending.md adds one."""


def _known_optimizer(name: str) -> str:
    if name not in OPTIMIZERS:
        raise ValueError(f"expected one of {', '.join(OPTIMIZERS)}")
    return name


OptimizerName = Annotated[str, AfterValidator(_known_optimizer)]


@schema(error=UsageError)
class Optimization:
    """Optimizer, learning rate and loss, as far as they need no count of steps or epochs."""

    optimizer: OptimizerName = "sgd"
    """sgd, adam, adamw, rmsprop, adafactor, or muon: for matrices but embeddings and heads, adamw for the rest"""
    learning_rate: float = Field(default=0.01, ge=0)
    """the learning rate after warm-up"""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """of sgd, rmsprop and muon"""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """how much of the mean of gradients adam and adamw keep a step"""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """the same of the mean of their squares"""
    eps: float = Field(default=1e-8, ge=0)
    """what adam, adamw and rmsprop add before they divide"""
    weight_decay: float = Field(default=0.0, ge=0)
    """how strongly weights are drawn to 0"""
    decay_all: bool | None = None
    """weight decay of norms, biases and embeddings too; by default unless the model has embeddings"""
    decay: Literal["none", "cosine", "linear", "step", "polynomial", "exponential", "wsd"] = "none"
    """how the rate falls; wsd (warm-up, stable, decay) falls in a line at the end"""
    decay_floor: float = Field(default=0.0, ge=0, le=1)
    """the share of the rate at which cosine, linear, polynomial and wsd end"""
    decay_share: float = Field(default=0.2, gt=0, le=1)
    """the share of all steps in which wsd falls, the last ones"""
    decay_rate: float = Field(default=0.1, gt=0)
    """what step multiplies with, and exponential over the run"""
    decay_power: float = Field(default=1.0, gt=0)
    """of polynomial"""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """share of a label that goes to all classes, in the loss that the model was built with"""


_UNENDING = ("none", "step")
"""The decays that need not know when the run ends."""


@schema(error=UsageError)
class Recipe(Optimization):
    """What turns gradients into weights, step by step."""

    warm_up_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from near 0."""
    decay_steps: tuple[int, ...] = ()
    """The steps after which a `step` decay multiplies the rate by `decay_rate`."""
    total_steps: int | None = Field(default=None, ge=1)
    """When every decay ends but `step`."""

    def __post_init__(self) -> None:
        if self.decay not in _UNENDING and self.total_steps is None:
            raise UsageError(f"decay {self.decay} needs total_steps, the step at which it ends")
        if self.decay == "step" and not self.decay_steps:
            raise UsageError(
                "--decay step does not say when the rate falls", "add --decay-epochs 30,60 or --decay-steps 1000,2000"
            )

    def in_words(self) -> str:
        """The optimizer and whatever is not as it is by default; when a decay ends, only where there is one."""
        plain = vars(type(self)())
        told = {key: value for key, value in vars(self).items() if key in plain and value != plain[key]}
        if self.decay == "none":
            told.pop("total_steps", None)
        return ", ".join([self.optimizer, *(f"{key} {value}" for key, value in told.items() if key != "optimizer")])


def optimizer_maker(
    recipe: Recipe, device: str = "cpu", roles: Mapping[str, Role] | None = None
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """A function from a stage's parameters to their optimizer; `roles` are those of the model's parameters."""
    kind, roles = OPTIMIZERS[recipe.optimizer], roles or {}
    given: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay, **kind.defaults}
    given |= {name: getattr(recipe, name) for name in kind.options}
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    if device in kind.fast:
        given[kind.fast[device]] = True
    decays_all = "embedding" not in roles.values() if recipe.decay_all is None else recipe.decay_all
    spares = recipe.weight_decay > 0 and not decays_all
    return lambda parameters: kind.make(_groups(list(parameters), roles, spares, kind.splits), **given)


def _groups(
    parameters: Iterable[nn.Parameter], roles: Mapping[str, Role], spares: bool, splits: bool
) -> list[dict[str, Any]]:
    """The parameters in up to four groups: matrices apart where an optimizer splits, without decay where it spares."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for each in parameters:
        role = roles.get(getattr(each, "stagewright_name", ""), "matrix" if each.dim() == 2 else "other")
        is_spared = spares and (each.dim() <= 1 or role == "embedding")
        groups.setdefault((splits and role == "matrix", is_spared), []).append(each)
    return [
        {"params": members} | ({"weight_decay": 0.0} if is_spared else {}) | ({"is_matrices": apart} if splits else {})
        for (apart, is_spared), members in groups.items()
    ]


def rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate of a step: a line up to `warm_up_steps`, then what the decay leaves of it."""
    if step < recipe.warm_up_steps:
        return recipe.learning_rate * (step + 1) / recipe.warm_up_steps
    end, first = recipe.total_steps or 1, float(recipe.warm_up_steps)
    if recipe.decay == "wsd":
        first = max(first, end - recipe.decay_share * end)
    passed = min(1.0, max(0.0, step - first) / max(1, end - first))
    return float(recipe.learning_rate * _DECAYS[recipe.decay](recipe, step, passed))


def _to_floor(recipe: Recipe, left: float) -> float:
    return recipe.decay_floor + (1 - recipe.decay_floor) * left


_DECAYS: Mapping[str, Callable[[Recipe, int, float], float]] = {
    "none": lambda recipe, step, t: 1.0,
    "cosine": lambda recipe, step, t: _to_floor(recipe, (1 + math.cos(math.pi * t)) / 2),
    "linear": lambda recipe, step, t: _to_floor(recipe, 1 - t),
    "wsd": lambda recipe, step, t: _to_floor(recipe, 1 - t),
    "polynomial": lambda recipe, step, t: _to_floor(recipe, (1 - t) ** recipe.decay_power),
    "exponential": lambda recipe, step, t: recipe.decay_rate**t,
    "step": lambda recipe, step, t: recipe.decay_rate ** sum(step >= limit for limit in recipe.decay_steps),
}
"""The share of the rate at a step; t: the share of the steps after the warm-up, or of wsd's last ones, that is over."""


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
    def states(self) -> Callable[[str], float]:
        """How many numbers its optimizer keeps for each number of a parameter, by its role."""
        return OPTIMIZERS[self.optimizer].states_of

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
