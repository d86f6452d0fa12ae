"""How large a model is, layer by layer, from shapes alone; and what each parameter is for, as far as optimizers ask."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from stagewright.models.layered import Layered
from stagewright.models.values import run_on_shapes

Role = Literal["matrix", "embedding", "head", "other"]
_LOOKUPS = (F.embedding, torch.embedding, torch.ops.aten.embedding.default)


def parameter_counts(layered: Layered) -> tuple[int, ...]:
    """The parameters of each layer; one that several layers share counts in the first."""
    sizes = {name: parameter.numel() for name, parameter in layered.model.named_parameters()}
    names = (layered.parameter_names(layer, layer + 1) for layer in range(layered.num_layers))
    return tuple(sum(sizes.pop(name, 0) for name in of_layer) for of_layer in names)


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


def parameter_roles(layered: Layered) -> Mapping[str, Role]:
    """The role of each parameter by its name in the model.

    embedding   rows are looked up in it, whatever else it does: a head that is tied to it is one
    head        two dimensions, one of them the scores that the model returns, in the last layer with weights
    matrix      two dimensions otherwise
    other       norms, biases, convolutions, experts in one tensor
    """
    embeddings, heads = _embeddings(layered), _heads(layered)

    def role(name: str, parameter: nn.Parameter) -> Role:
        if id(parameter) in embeddings:
            return "embedding"
        if parameter.dim() != 2:
            return "other"
        return "head" if name in heads else "matrix"

    return {name: role(name, each) for name, each in layered.model.named_parameters()}


def _embeddings(layered: Layered) -> set[int]:
    """The parameters in which functions or modules look rows up."""
    found: list[object] = [each.weight for each in layered.model.modules() if isinstance(each, nn.Embedding)]
    for node in layered.order:
        if node.op == "call_function" and node.target in _LOOKUPS:
            read = (each for each in node.all_input_nodes if each.op == "get_attr")
            found += [layered.traced.objects.get(str(each.target)) for each in read][:1]
    return {id(parameter) for parameter in found if isinstance(parameter, nn.Parameter)}


def _heads(layered: Layered) -> set[str]:
    """The matrices of the last layer with weights that make the model's scores."""
    shape = layered.predictions[0].shape_per_row if layered.predictions else ()
    named = dict(layered.model.named_parameters())
    for layer in reversed(range(layered.num_layers)):
        names = [name for name in layered.parameter_names(layer, layer + 1) if named[name].dim() == 2]
        if names:
            return {name for name in names if shape and shape[-1] in named[name].shape}
    return set()
