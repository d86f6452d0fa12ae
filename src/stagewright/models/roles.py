"""What each parameter of a model is for, as far as optimizers treat some apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import fx, nn
from torch.nn import functional as F

from stagewright.models.layered import Layered

Role = Literal["matrix", "embedding", "head", "other"]
_LOOKUPS = (F.embedding, torch.embedding, torch.ops.aten.embedding.default)


def parameter_roles(layered: Layered) -> Mapping[str, Role]:
    """The role of each parameter by its name in the model.

    embedding   rows are looked up in it, whatever else it does: a head that is tied to it is one
    head        two dimensions, one of them the scores that the model returns, in the last layer with weights
    matrix      two dimensions otherwise
    other       norms, biases, convolutions, experts in one tensor
    """
    embeddings, heads = _embeddings(layered), _heads(layered)
    return {name: _role(name, each, embeddings, heads) for name, each in layered.model.named_parameters()}


def _role(name: str, parameter: nn.Parameter, embeddings: set[int], heads: set[str]) -> Role:
    if id(parameter) in embeddings:
        return "embedding"
    if parameter.dim() != 2:
        return "other"
    return "head" if name in heads else "matrix"


def _embeddings(layered: Layered) -> set[int]:
    """The parameters in which rows are looked up."""
    found = [each for node in layered.order for each in _looked_up(layered, node)]
    inside = [each.weight for each in layered.model.modules() if isinstance(each, nn.Embedding)]
    return {id(parameter) for parameter in (*found, *inside) if isinstance(parameter, nn.Parameter)}


def _looked_up(layered: Layered, node: fx.Node) -> list[object]:
    """What a function looks rows up in, if it does; modules tell themselves."""
    if node.op != "call_function" or node.target not in _LOOKUPS:
        return []
    return [layered.traced.objects.get(str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"][:1]


def _heads(layered: Layered) -> set[str]:
    """The matrices of the last layer with weights that make the model's scores."""
    shape = layered.predictions[0].shape_per_row if layered.predictions else ()
    named = dict(layered.model.named_parameters())
    for layer in reversed(range(layered.num_layers)):
        names = [name for name in layered.parameter_names(layer, layer + 1) if named[name].dim() == 2]
        if names:
            return {name for name in names if shape and shape[-1] in named[name].shape}
    return set()
