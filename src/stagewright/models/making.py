"""From a module to its layers: traced by the first of the ways that changes neither its outputs nor its gradients.

    node    wte  arange  wpe  add  h.0.ln_1  h.0.attn …  h.1.ln_1 …
    layer   wte ───────▶ wpe ────▶ h.0 ────────────────▶ h.1 ─────▶

A layer is a module of the model. A module that holds a list of others is opened into those, unless every
cut inside it would carry more tensors than the cuts around it: a residual block stays one layer.
What has no parameters (activations, pooling, reshapes) belongs to the layer before it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from stagewright.errors import ModelError
from stagewright.models.checking import checked
from stagewright.models.exporting import trace_exported
from stagewright.models.layered import Layer, Layered
from stagewright.models.loss import LOSS_PATH, Loss, LossModule
from stagewright.models.running import name_places
from stagewright.models.tracing import Sample, Traced, is_chain, trace_sequential, trace_symbolic
from stagewright.models.values import FEW, Flow, find_facts, find_flow

_LOSS = "loss"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def make_layered(
    model: nn.Module, sample: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, loss: Loss | None = None,
    targets: tuple[Tensor, ...] = (), names: Mapping[str, str] | None = None, check: bool = True,
    by_blocks: bool = False,
) -> Layered:  # fmt: skip
    """A model as ordered layers; `sample` and `targets` are examples with any number of rows.

    `loss(*outputs, *targets)` returns the sum over the rows. `names` maps the path of the module that starts a layer to
    the layer's name; without it, the layers are found and carry the modules' paths. Where `check` is on, the layers are
    compared with the model itself, gradients included, and a model that they change is refused. `by_blocks` keeps what
    transformers calls a block whole: it runs its own code.
    """
    model, kwargs = _unwrapped(model, kwargs or {})
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(
                f"'{name}' makes sparse gradients, which replicas cannot add up", "build it with sparse=False"
            )
    make = partial(_make, model, loss=loss, names=names, check=check, by_blocks=by_blocks)
    return _repeatable(make, Sample(args=sample, kwargs=kwargs, targets=targets))


def _repeatable(
    make: Callable[[Sample], Layered], example: Sample, change: Callable[[Tensor], Tensor] | None = None
) -> Layered:
    """The layers found with an example, or with its tensors changed, which can be found anew with others."""
    example = example if change is None else example.map(change)
    return make(example).changed(again=partial(_repeatable, make, example))


def _unwrapped(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The module that computes, and its arguments: peft's adapters are inside their base model, caches are not kept."""
    base = getattr(model, "get_base_model", None)
    model = base() if callable(base) and hasattr(model, "peft_config") else model
    taken = inspect.signature(model.forward).parameters
    if kwargs.get("labels") is not None and "labels" in taken:
        raise ModelError(
            "labels are among the model's arguments, so that its loss would be a mean over each microbatch",
            "leave them out, and give a loss and targets: loss=sw.token_cross_entropy_sum(), targets=(labels,)",
        )
    if "use_cache" in taken and hasattr(model, "config"):
        kwargs = {"use_cache": False, **kwargs}
    if kwargs.get("use_cache"):
        raise ModelError("use_cache=True keeps keys and values that no training step reads", "leave use_cache out")
    return model, dict(kwargs)


def _make(
    model: nn.Module, example: Sample, *, loss: Loss | None, names: Mapping[str, str] | None, check: bool,
    by_blocks: bool,
) -> Layered:  # fmt: skip
    """The layers by the first way that changes nothing."""
    few = example.with_rows(FEW)
    if names is not None:
        traced = _with_loss(trace_symbolic(model, few, list(names)), loss, example.targets)
        units = [next((names[path] for path in _paths(node) if path in names), None) for node in traced.computing]
        layers = _layers(traced.computing, units)
        return Layered(model=model, traced=traced, layers=layers)
    ways: tuple[Callable[[nn.Module, Sample], Traced], ...] = (trace_symbolic, trace_exported)
    whole = _blocks_of(model) if by_blocks else {}
    if whole:
        ways = (partial(trace_exported, whole=whole),)
    elif is_chain(model):
        ways = (lambda _, few: trace_sequential(model, few),)
    for trace in ways:
        is_last = trace is ways[-1]
        try:
            layered = _found(model, trace(model, few), loss, example.targets, whole)
            fault, evaluates = checked(layered, example) if check else (None, True)
            if fault is None and (evaluates or is_last):
                return layered.changed(evaluates=evaluates)
            raise ModelError(
                f"{type(model).__name__} cannot be cut: {fault}",
                "put what a trace does not see (numbers from outside torch, state, hooks on tensors) into a module "
                "without children, which is kept whole, or outside of the model",
            )
        except Exception:  # whatever a model's own code raises when it is handed a proxy, or what the check found
            if is_last:
                raise
    raise AssertionError("the last way returns or raises")


def _found(
    model: nn.Module, traced: Traced, loss: Loss | None, targets: tuple[Tensor, ...], whole: Collection[str]
) -> Layered:
    """The layers of a traced model by its modules; where no cut is possible, two become one."""
    traced = _with_loss(traced, loss, targets)
    flow = find_flow(traced, find_facts(traced))
    seen: Counter[str] = Counter()
    layers: list[Layer] = []
    for each in _layers(flow.order, _units(flow, model, whole)):
        if each.start and flow.stuck(each.start):
            continue
        name = each.name.partition("@")[0]  # `@2`, `@3` … comes after one that comes again
        seen[name] += 1
        layers.append(Layer(name if seen[name] == 1 else f"{name}@{seen[name]}", each.start))
    if loss is not None and layers[-1].name != _LOSS:
        raise flow.stuck_at(_LOSS, len(flow.order) - 1)
    layered = Layered(model=model, traced=traced, layers=tuple(layers))
    vars(layered)["flow"] = flow
    return layered


def _with_loss(traced: Traced, loss: Loss | None, targets: tuple[Tensor, ...]) -> Traced:
    """The graph with the targets as further inputs, and `(loss, *outputs)` as its output."""
    name_places(traced.graph, traced.objects)
    if loss is None:
        return traced
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ModelError("the loss has parameters", "make them part of the model")
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.inputs:
        copies[node] = graph.node_copy(node)
    names = ["target"] if len(targets) == 1 else [f"target{index}" for index in range(len(targets))]
    made = [graph.placeholder(name) for name in names]
    for node in traced.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [copies[node] for node in traced.results]
    total = graph.call_module(LOSS_PATH, (tuple(outputs), tuple(made)))
    total.meta["layer"] = _LOSS
    graph.output((total, *outputs))
    objects = {**traced.objects, LOSS_PATH: LossModule(loss)}
    tensors = (*traced.tensors, *targets)
    return replace(traced, graph=graph, objects=objects, tensors=tensors, num_targets=len(targets))


# Which nodes form a layer


def _layers(order: Sequence[fx.Node], units: Sequence[str | None]) -> tuple[Layer, ...]:
    """One layer for each run of nodes of one unit; a node without one belongs to the layer before."""
    layers: list[Layer] = []
    for index, (node, found) in enumerate(zip(order, units)):
        unit = node.meta.get("layer", found)
        if unit is not None and (not layers or layers[-1].name != unit):
            layers.append(Layer(unit, index if layers else 0))
    return tuple(layers)


def _paths(node: fx.Node) -> tuple[str, ...]:
    paths: tuple[str, ...] = node.meta.get("path", ())
    return paths


def _units(flow: Flow, model: nn.Module, whole: Collection[str]) -> list[str | None]:
    """For each node the module that is its layer, if one is."""
    if whole:
        return [str(node.target) if node.target in whole else None for node in flow.order]
    if is_chain(model):
        return [next(iter(_paths(node)), None) for node in flow.order]
    opened = _opened(flow, model)
    outermost = [next((path for path in _paths(node) if path not in opened), None) for node in flow.order]
    modules = dict(model.named_modules(remove_duplicate=False))
    has_weights = {path for path, module in modules.items() if next(module.parameters(), None) is not None}
    # torch.export marks the second call a.b@1
    return [path if path is not None and path.partition("@")[0] in has_weights else None for path in outermost]


def _opened(flow: Flow, model: nn.Module) -> set[str]:
    """The modules that are cut inside."""
    widths = flow.widths()
    spans: dict[str, tuple[int, int]] = {}  # the first position and the position after the last of each module
    for index, node in enumerate(flow.order):
        for path in _paths(node):
            spans[path] = (spans.get(path, (index, 0))[0], index + 1)
    owners = {path: model.get_submodule(path.partition("@")[0].rpartition(".")[0]) for path in spans}
    listed = {path: first for path, (first, _) in spans.items() if isinstance(owners[path], _CONTAINERS)}

    def opens(path: str, first: int, last: int) -> bool:
        inside = [at for inner, at in listed.items() if inner.startswith(f"{path}.") and first < at < last]
        return bool(inside) and min(widths[at] for at in inside) <= max(widths[first], widths[last])

    return {path for path, span in spans.items() if opens(path, *span)}


def _blocks_of(model: nn.Module) -> dict[str, nn.Module]:
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
