"""From a module to its layers: traced by the first of the ways that changes neither its outputs nor its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from stagewright.errors import ModelError
from stagewright.models.checking import checked
from stagewright.models.exporting import trace_exported
from stagewright.models.layered import Layered, outputs_of, stuck_at
from stagewright.models.layering import blocks_of, find_flow, found_layers, named_layers
from stagewright.models.loss import LOSS, LOSS_PATH, Loss, LossModule
from stagewright.models.modes import name_places
from stagewright.models.tracing import TRACED_ROWS, Sample, Traced, is_chain, trace_sequential, trace_symbolic
from stagewright.models.values import find_facts

_Way = Callable[[nn.Module, Sample], Traced]


def make_layered(
    model: nn.Module,
    sample: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    targets: tuple[Tensor, ...] = (),
    names: Mapping[str, str] | None = None,
    check: bool = True,
    by_blocks: bool = False,
) -> Layered:
    """A model as ordered layers; `sample` and `targets` are examples with any number of rows.

    `loss(*outputs, *targets)` returns the sum over the rows. `names` maps the path of the module that starts a layer to
    the layer's name; without it, the layers are found and carry the modules' paths. Where `check` is on, the layers are
    compared with the model itself, gradients included, and a model that they change is refused. `by_blocks` keeps what
    transformers calls a block whole: it runs its own code.
    """
    model, kwargs = _unwrapped(model, kwargs or {})
    _check_modules(model)
    given: dict[str, Any] = {"loss": loss, "names": names, "check": check, "by_blocks": by_blocks}
    made = _made(model, Sample(args=sample, kwargs=kwargs), targets=targets, **given)
    vars(made)["again"] = partial(_made_again, model, sample, kwargs, targets, given)
    return made


def _made_again(
    model: nn.Module, sample: Any, kwargs: Any, targets: Any, given: Mapping[str, Any],
    changed: Callable[[Tensor], Tensor],
) -> Layered:  # fmt: skip
    """The layers of a model, found with its example tensors changed."""
    args, named, goals = pytree.tree_map_only(Tensor, changed, (sample, dict(kwargs), targets))
    return make_layered(model, args, named, targets=goals, **given)


def _made(
    model: nn.Module, example: Sample, *, loss: Loss | None, targets: tuple[Tensor, ...],
    names: Mapping[str, str] | None, check: bool, by_blocks: bool,
) -> Layered:  # fmt: skip
    """The layers by the first way that changes nothing."""
    few = example.with_rows(TRACED_ROWS)
    if names is not None:
        traced = _with_loss(trace_symbolic(model, few, list(names)), loss, targets)
        layers = named_layers(traced, names)
        return Layered(model=model, traced=traced, layers=layers, num_targets=len(targets) if loss else 0)
    ways: tuple[_Way, ...] = (trace_symbolic, trace_exported)
    whole = blocks_of(model) if by_blocks else {}
    if whole:
        ways = (partial(trace_exported, whole=whole),)
    elif is_chain(model):
        ways = (lambda _, few: trace_sequential(model, few),)
    for trace in ways:
        is_last = trace is ways[-1]
        try:
            layered = _found(model, trace(model, few), loss, targets, whole)
            return _checked(layered, example, targets, is_last=is_last) if check else layered
        except Exception:  # whatever a model's own code raises when it is handed a proxy, or what the check found
            if is_last:
                raise
    raise AssertionError("the last way returns or raises")


def _found(
    model: nn.Module, traced: Traced, loss: Loss | None, targets: tuple[Tensor, ...], whole: Collection[str]
) -> Layered:
    """The layers of a traced model by its modules."""
    traced = _with_loss(traced, loss, targets)
    flow = find_flow(traced, find_facts(traced))
    layers = found_layers(flow, model, whole)
    if loss is not None and layers[-1].name != LOSS:
        raise stuck_at(flow, LOSS, len(flow.order) - 1)
    layered = Layered(model=model, traced=traced, layers=layers, num_targets=len(targets) if loss else 0)
    vars(layered)["flow"] = flow
    return layered


def _checked(layered: Layered, sample: Sample, targets: tuple[Tensor, ...], *, is_last: bool) -> Layered:
    """The layers, once they have been compared with the model."""
    fault, evaluates = checked(layered, sample, targets)
    if fault is not None or not (evaluates or is_last):
        raise ModelError(
            f"{type(layered.model).__name__} cannot be cut: {fault}",
            "put what a trace does not see (numbers from outside torch, state, hooks on tensors) into a module without "
            "children, which is kept whole, or outside of the model",
        )
    return layered.changed(evaluates=evaluates)


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


def _check_modules(model: nn.Module) -> None:
    """Refuses modules that no stage can hold."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(
                f"'{name}' makes sparse gradients, which replicas cannot add up", "build it with sparse=False"
            )


def _with_loss(traced: Traced, loss: Loss | None, targets: tuple[Tensor, ...]) -> Traced:
    """The graph with the targets as further inputs, and `(loss, *outputs)` as its output."""
    name_places(traced.graph, traced.objects)
    if loss is None:
        return traced
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ModelError("the loss has parameters", "make them part of the model")
    graph, copies = fx.Graph(), {}
    for node in traced.placeholders:
        copies[node] = graph.node_copy(node)
    made = [graph.placeholder(name) for name in _target_names(len(targets))]
    for node in traced.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, lambda old: copies[old])
    outputs = [copies[node] for node in outputs_of(traced.graph)]
    total = graph.call_module(LOSS_PATH, (tuple(outputs), tuple(made)))
    total.meta["layer"] = LOSS
    graph.output((total, *outputs))
    objects = {**traced.objects, LOSS_PATH: LossModule(loss)}
    return replace(traced, graph=graph, objects=objects, tensors=(*traced.tensors, *targets))


def _target_names(count: int) -> list[str]:
    return ["target"] if count == 1 else [f"target{index}" for index in range(count)]
