"""The optimizers: one entry each, with what makes it and how much it keeps; torch is loaded when one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


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


def _torch(name: str) -> Callable[..., Optimizer]:
    """An optimizer of torch.optim."""

    def make(groups: list[dict[str, Any]], **values: Any) -> Optimizer:
        import torch

        made: Optimizer = getattr(torch.optim, name)(groups, **values)
        return made

    return make


def _muon(groups: list[dict[str, Any]], **values: Any) -> Optimizer:
    """Muon for matrices that are no embedding or head, AdamW for the rest."""
    from stagewright.training.muon import Muon

    apart = {True: list[dict[str, Any]](), False: list[dict[str, Any]]()}
    for group in groups:
        apart[group["is_matrices"]].append({key: value for key, value in group.items() if key != "is_matrices"})
    adamw = {key: values.pop(key) for key in ["betas", "eps", "fused", "foreach"] if key in values}
    return Muon(apart[True], apart[False], adamw=adamw, **values)


_BOTH, _ADAM = {"cuda": "fused", "cpu": "foreach"}, ("beta1", "beta2", "eps")
OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind(make=_torch("SGD"), states=1, options=("momentum",), fast=_BOTH),
    "adam": OptimizerKind(make=_torch("Adam"), states=2, options=_ADAM, fast=_BOTH),
    "adamw": OptimizerKind(make=_torch("AdamW"), states=2, options=_ADAM, fast=_BOTH),
    "rmsprop": OptimizerKind(make=_torch("RMSprop"), states=2, options=("momentum", "eps"), fast={"cpu": "foreach"}),
    "muon": OptimizerKind(
        make=_muon, states=2, states_by_role={"matrix": 1}, splits=True, options=("momentum", *_ADAM), fast=_BOTH
    ),
    # Of a matrix it keeps a number a row and one a column.
    "adafactor": OptimizerKind(
        make=_torch("Adafactor"),
        states=1,
        states_by_role={"matrix": 0, "embedding": 0, "head": 0},
        fast={"cuda": "foreach"},
    ),
}
"""By the name that --optimizer and recipe files have for it; docs/extending.md adds one."""
