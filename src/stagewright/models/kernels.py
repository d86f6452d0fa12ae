"""What a traced graph says operator by operator, and torch has one kernel for.

transformers gives attention no mask where every token sees those before it, but while it is traced it writes the mask
down, which kernels then read for every head and row. Its norms are six operators, which on a card are six passes over
the rows, and twice as many backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

_aten = torch.ops.aten
ATTENTION = _aten.scaled_dot_product_attention.default
_ROWS = (2, 3)
"""Numbers of rows for which a mask is looked at: it may depend on the rows' number, not on what is in them."""


def use_kernels(graph: fx.Graph, objects: Mapping[str, Any]) -> None:
    """Puts torch's own kernels where the graph spells them out."""
    _drop_causal_masks(graph, objects)
    _fuse_norms(graph)


def _fuse_norms(graph: fx.Graph) -> None:
    """x · rsqrt(mean(x²) + eps), which is a norm by the root of the mean square, becomes one function."""
    for node in graph.nodes:
        if node.target is _aten.mul.Tensor:
            for x, root in (node.args, node.args[::-1]):
                chain = _norm_of(x, root)
                if chain:
                    node.target, node.args = normalized, (x, chain[1].args[1])
                    for unused in chain:
                        graph.erase_node(unused)
                    break


def _norm_of(x: Any, root: Any) -> list[fx.Node]:
    """The nodes of `root` where it is rsqrt(mean(x²) + eps) over the last dimension and nothing else needs it."""
    chain = (_aten.rsqrt.default, _aten.add.Tensor, _aten.mean.dim, _aten.pow.Tensor_Scalar)
    seen: list[fx.Node] = []
    at = root
    for target in chain:
        if not isinstance(at, fx.Node) or at.target is not target or len(at.users) > 1 or at.kwargs:
            return []
        seen.append(at)
        at = at.args[0]
    _, add, mean, power = seen
    fits = at is x and power.args[1] == 2 and mean.args[1:] == ([-1], True)
    return seen if fits and isinstance(add.args[1], float) else []


def normalized(rows: Tensor, eps: float) -> Tensor:
    """Rows by the root of their mean square: one kernel on cards, and elsewhere the operators, bit for bit."""
    if rows.is_cuda:
        return F.rms_norm(rows, rows.shape[-1:], None, eps)
    return rows * torch.rsqrt(rows.pow(2).mean(-1, True) + eps)


def _drop_causal_masks(graph: fx.Graph, objects: Mapping[str, Any]) -> None:
    """Lets attention be causal by itself wherever its mask follows from no input and says just that."""
    masks: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        mask = _argument(node, 3, "attn_mask") if node.target is ATTENTION else None
        if isinstance(mask, fx.Node):
            masks.setdefault(mask, []).append(node)
    for mask, users in masks.items():
        if all(_is_causal(_value(mask, objects, rows)) for rows in _ROWS):
            for user in users:
                rate = _argument(user, 4, "dropout_p")
                user.args = (*user.args[:3], None, 0.0 if rate is None else rate, True)
                user.kwargs = {key: each for key, each in user.kwargs.items() if key in ("scale", "enable_gqa")}


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _value(wanted: fx.Node, objects: Mapping[str, Any], rows: int) -> Tensor | None:
    """What a node holds for a number of rows, whatever is in them; None where that cannot be said."""
    made: dict[fx.Node, Any] = {}

    def run(node: fx.Node) -> Any:
        if node.op == "get_attr" and isinstance(objects.get(str(node.target)), Tensor):
            return objects[str(node.target)]
        if node.op != "call_function":
            raise _UnknownError
        if node.target is _aten.sym_size.int and node.args[1] == 0:
            return rows
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: made[each])
        here = {"device": torch.device("cpu")} if "device" in kwargs else {}  # models without weights are nowhere
        return node.target(*args, **{**kwargs, **here})  # type: ignore[operator]

    try:
        with torch.no_grad():
            for node in _behind(wanted):
                made[node] = run(node)
    except (_UnknownError, RuntimeError, NotImplementedError):
        return None
    found = made[wanted]
    return found if isinstance(found, Tensor) and not found.is_meta else None


class _UnknownError(Exception):
    """A value follows from what is in the rows."""


def _behind(wanted: fx.Node) -> list[fx.Node]:
    """The nodes that a node follows from, in their order, and itself; sizes of rows are where this ends."""
    found, to_do = {wanted}, [wanted]
    while to_do:
        node = to_do.pop()
        if node.target is _aten.sym_size.int:
            continue
        new = set(node.all_input_nodes) - found
        found |= new
        to_do += new
    return [node for node in wanted.graph.nodes if node in found]


def _is_causal(mask: Tensor | None) -> bool:
    """Whether a mask lets every token see itself and those before it, and no other."""
    if mask is None or mask.dim() < 2 or mask.size(-1) != mask.size(-2):
        return False
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and bool((mask[~seen] > torch.finfo(mask.dtype).min / 2).any()):
        return False
    before = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return bool((seen == before).all())
