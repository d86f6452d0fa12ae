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
    """Called with groups of parameters, lr, weight_decay, the recipe's values named by `options`, and `defaults`."""
    states: int
    """How many numbers it keeps for each parameter; the check of memory before a launch counts them."""
    options: tuple[str, ...] = ()
    """Fields of the recipe that it takes beside the rate and the weight decay."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What it is always called with."""
    fast: Mapping[str, str] = field(default_factory=dict)
    """For a kind of device, cpu or cuda, the argument that is true there for speed."""


def _torch(name: str) -> Callable[..., Optimizer]:
    """An optimizer of torch.optim."""

    def make(groups: list[dict[str, Any]], **values: Any) -> Optimizer:
        import torch

        made: Optimizer = getattr(torch.optim, name)(groups, **values)
        return made

    return make


_BOTH = {"cuda": "fused", "cpu": "foreach"}
OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind(make=_torch("SGD"), states=1, options=("momentum",), fast=_BOTH),
    "adam": OptimizerKind(make=_torch("Adam"), states=2, fast=_BOTH),
    "adamw": OptimizerKind(make=_torch("AdamW"), states=2, fast=_BOTH),
    "rmsprop": OptimizerKind(make=_torch("RMSprop"), states=2, options=("momentum",), fast={"cpu": "foreach"}),
}
"""By the name that --optimizer and recipe files have for it; docs/extending.md adds one."""
