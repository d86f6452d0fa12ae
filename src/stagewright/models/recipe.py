"""What the zoo knows of one of its models: the module, how its layers are called, and its examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stagewright.models.loss import Loss, cross_entropy_sum, token_cross_entropy_sum


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A module, the layer that each of its submodules starts, and one row of inputs and targets."""

    module: nn.Module
    layers: Mapping[str, str]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Loss

    def on(self, device: torch.device) -> Recipe:
        """The same on another device; weights are drawn on the CPU, so they do not depend on it."""
        inputs, targets = (tuple(each.to(device) for each in some) for some in (self.inputs, self.targets))
        return replace(self, module=self.module.to(device), inputs=inputs, targets=targets)


def image_recipe(module: nn.Module, layers: Mapping[str, str], image_size: int, label_smoothing: float) -> Recipe:
    """A classifier of square images with three channels."""
    return Recipe(
        module=module,
        layers=layers,
        inputs=(torch.zeros(1, 3, image_size, image_size),),
        targets=(torch.zeros(1, dtype=torch.int64),),
        loss=cross_entropy_sum(label_smoothing),
    )


def token_recipe(module: nn.Module, layers: Mapping[str, str], context: int) -> Recipe:
    """A language model over rows of `context` tokens, with the next tokens as targets."""
    tokens = torch.zeros(1, context, dtype=torch.int64)
    return Recipe(module=module, layers=layers, inputs=(tokens,), targets=(tokens,), loss=token_cross_entropy_sum())
