"""What stands in the graphs of stages besides the model's own computations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def count_rows(tensor: Tensor) -> int:
    """The rows of a tensor."""
    return tensor.size(0)


def times(rows: int, factor: int) -> int:
    """A number that is a multiple of the rows."""
    return rows * factor


def device_of(tensor: Tensor) -> torch.device:
    """The device that a stage runs on, from one of its inputs."""
    return tensor.device


def leaves_of(value: Any) -> list[Any]:
    """The parts of a nested value, in order."""
    return pytree.tree_leaves(value)


def pick(leaves: list[Any], index: int) -> Any:
    """One of the parts of a nested value."""
    return leaves[index]


def detached(tensor: Tensor) -> Tensor:
    """A tensor through which no gradient flows."""
    return tensor.detach()


def rate_in(rate: float, training: bool) -> float:
    """The rate of a dropout, which is none while evaluating."""
    return rate if training else 0.0


def count_batch(num_batches_tracked: Tensor, training: bool) -> Tensor:
    """Counts one more batch seen by a batch norm in training."""
    return num_batches_tracked.add_(1) if training else num_batches_tracked
