"""How large a model is: parameters and floating-point operations, layer by layer, from shapes alone."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from stagewright.models.layered import Layered
from stagewright.models.values import run_on_shapes


def parameter_counts(layered: Layered) -> tuple[int, ...]:
    """The parameters of each layer; one that several layers share counts in the first."""
    sizes = {name: parameter.numel() for name, parameter in layered.model.named_parameters()}
    counts = []
    for layer in range(layered.num_layers):
        counts.append(sum(sizes.pop(name, 0) for name in layered.parameter_names(layer, layer + 1)))
    return tuple(counts)


def num_parameters(layered: Layered) -> int:
    """The parameters of the model, shared ones once."""
    return sum(parameter.numel() for parameter in layered.model.parameters())


def forward_flops(layered: Layered) -> tuple[int, ...]:
    """The floating-point operations of each layer's forward pass on one row (a multiply-add is two)."""
    totals: dict[fx.Node, int] = {}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run_on_shapes(
            layered.traced,
            1,
            after=lambda node: totals.update({node: counter.get_total_flops()}),
            training=False,  # batch norm in training refuses a single row
        )
    reached = [0, *(totals[node] for node in layered.order)]
    starts = [*(layer.start for layer in layered.layers), len(layered.order)]
    return tuple(reached[end] - reached[start] for start, end in pairwise(starts))
