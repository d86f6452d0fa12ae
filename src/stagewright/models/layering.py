"""Decides which nodes of a graph form a layer, and where the graph may be cut.

    node    wte  arange  wpe  add  h.0.ln_1  h.0.attn …  h.1.ln_1 …
    layer   wte ───────▶ wpe ────▶ h.0 ────────────────▶ h.1 ─────▶

A layer is a module of the model. A module that holds a list of others is opened into those, unless every
cut inside it would carry more tensors than the cuts around it: a residual block stays one layer.
What has no parameters (activations, pooling, reshapes) belongs to the layer before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx, nn

from stagewright.models.tracing import Traced, is_chain
from stagewright.models.values import Fact, Stuck

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The nodes that compute something, in order, and how long each value is needed."""

    order: tuple[fx.Node, ...]
    facts: Mapping[fx.Node, Fact]
    last_use: Mapping[fx.Node, int]
    made_at: Mapping[fx.Node, int]

    def crossing(self, position: int) -> list[fx.Node]:
        """The values that are made before a position and needed at or after it."""
        return [n for n, made in self.made_at.items() if made < position <= self.last_use.get(n, -1)]

    def stuck(self, position: int) -> list[tuple[fx.Node, Stuck]]:
        """The values that cannot be carried across a position."""
        crossing = self.crossing(position)
        return [(n, part) for n in crossing for part in self.facts[n].parts if isinstance(part, Stuck)]

    def widths(self) -> list[int]:
        """The number of tensors that cross each position."""
        change = [0] * (len(self.order) + 2)
        for node, made in self.made_at.items():
            if self.last_use.get(node, -1) > made:
                change[made + 1] += len(self.facts[node].parts)
                change[self.last_use[node] + 1] -= len(self.facts[node].parts)
        return list(accumulate(change))


def computing(traced: Traced) -> tuple[fx.Node, ...]:
    """The nodes that compute something, in order."""
    return tuple(n for n in traced.graph.nodes if n.op not in ("placeholder", "get_attr", "output"))


def find_flow(traced: Traced, facts: Mapping[fx.Node, Fact]) -> Flow:
    """The order of a graph's nodes, with the values that need carrying; inputs are made at -1."""
    order = computing(traced)
    position = {node: index for index, node in enumerate(order)}
    output = next(node for node in traced.graph.nodes if node.op == "output")
    last_use: dict[fx.Node, int] = {}
    for index, user in enumerate((*order, output)):
        if user is output or not (facts[user].free or facts[user].is_constant):
            last_use.update(dict.fromkeys(user.all_input_nodes, index))
    carried = [n for n in facts if n.op != "get_attr" and not (facts[n].free or facts[n].is_constant)]
    made_at = {node: position.get(node, -1) for node in carried}
    return Flow(order=order, facts=facts, last_use=last_use, made_at=made_at)


@dataclass(frozen=True)
class Layer:
    """The name of a layer and the position of its first node."""

    name: str
    start: int


def named_layers(traced: Traced, named: Mapping[str, str]) -> tuple[Layer, ...]:
    """The layers of a graph by the path of the module that starts each."""
    order = computing(traced)
    return _layers(order, [_named(node, named) for node in order])


def found_layers(flow: Flow, model: nn.Module, whole: Collection[str] = ()) -> tuple[Layer, ...]:
    """The layers of a graph by its modules; where no cut is possible, two become one."""
    units: list[str | None]
    if whole:
        units = [str(node.target) if node.target in whole else None for node in flow.order]
    elif is_chain(model):
        units = [next(iter(_paths(node)), None) for node in flow.order]
    else:
        open_paths = _opened(flow, model)
        units = [_unit(node, open_paths, model) for node in flow.order]
    layers = _layers(flow.order, units)
    return _distinct([layer for layer in layers if layer.start == 0 or not flow.stuck(layer.start)])


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The norms and modules with parameters around a model's blocks, and these: each is kept whole as a layer.

    Models of transformers say what their blocks are; for others there are none.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [path for path, module in model.named_modules() if type(module).__name__ in kinds]
    around = {"", *(path[:at] for path in blocks for at in range(len(path)) if path[at] == ".")}
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules() if blocks else ():
        is_inside = path not in around and path.rpartition(".")[0] in around
        if is_inside and ("Norm" in type(module).__name__ or next(module.parameters(), None) is not None):
            found[path] = module
    return found


def _layers(order: Sequence[fx.Node], units: Sequence[str | None]) -> tuple[Layer, ...]:
    """One layer for each run of nodes of one unit; a node without one belongs to the layer before."""
    layers: list[Layer] = []
    for index, (node, found) in enumerate(zip(order, units)):
        unit = node.meta.get("layer", found)
        if unit is not None and (not layers or layers[-1].name != unit):
            layers.append(Layer(unit, index if layers else 0))
    return tuple(layers)


def _named(node: fx.Node, named: Mapping[str, str]) -> str | None:
    return next((named[path] for path in _paths(node) if path in named), None)


def _paths(node: fx.Node) -> tuple[str, ...]:
    paths: tuple[str, ...] = node.meta.get("path", ())
    return paths


def _unit(node: fx.Node, open_paths: set[str], model: nn.Module) -> str | None:
    """The outermost module around a node that is not opened, if it has parameters."""
    path = next((path for path in _paths(node) if path not in open_paths), None)
    if path is None or next(_module(model, path).parameters(), None) is None:
        return None
    return path


def _module(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path.partition("@")[0])  # torch.export marks the second call a.b@1


def _opened(flow: Flow, model: nn.Module) -> set[str]:
    """The modules that are cut inside."""
    widths, spans = flow.widths(), _spans(flow.order)
    listed = {path: span[0] for path, span in spans.items() if _is_listed(model, path)}
    return {path for path, span in spans.items() if _opens(path, span, listed, widths)}


def _spans(order: Sequence[fx.Node]) -> dict[str, tuple[int, int]]:
    """The first position and the position after the last of each module."""
    spans: dict[str, tuple[int, int]] = {}
    for index, node in enumerate(order):
        for path in _paths(node):
            spans[path] = (spans.get(path, (index, 0))[0], index + 1)
    return spans


def _is_listed(model: nn.Module, path: str) -> bool:
    owner = path.partition("@")[0].rpartition(".")[0]
    return isinstance(model.get_submodule(owner), _CONTAINERS)


def _opens(path: str, span: tuple[int, int], listed: Mapping[str, int], widths: Sequence[int]) -> bool:
    first, last = span
    inside = [at for inner, at in listed.items() if inner.startswith(f"{path}.") and first < at < last]
    return bool(inside) and min(widths[at] for at in inside) <= max(widths[first], widths[last])


def _distinct(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The same layers with `@2`, `@3` … after a name that comes again."""
    seen: dict[str, int] = {}
    result = []
    for layer in layers:
        name = layer.name.partition("@")[0]
        seen[name] = seen.get(name, 0) + 1
        result.append(Layer(name if seen[name] == 1 else f"{name}@{seen[name]}", layer.start))
    return tuple(result)
