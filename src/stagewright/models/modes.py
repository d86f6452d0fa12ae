"""The modes that a model's code sets around its operations: without gradient, with or without autocast.

A trace sees operations, not the `with` around them. So each node remembers the mode it was met in, and runs in it.

    with torch.no_grad():         node.meta["mode"] = Mode(gradient=False)
        h = self.backbone(x)  ─▶  backbone(x) ─▶ Within(mode, …)(backbone, x)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stagewright.models.drawing import drawing, draws, place_of

_KINDS = ("cpu", "cuda")
"""Kinds of devices that have an autocast of their own."""

_Autocast = tuple[str, bool, torch.dtype]
"""The kind of device, whether it is on, and the format it casts to."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How an operation runs, where that is not how its surroundings run."""

    gradient: bool = True
    autocast: tuple[_Autocast, ...] = ()

    def __bool__(self) -> bool:
        return not self.gradient or bool(self.autocast)

    def inside(self, outer: Mode) -> Mode:
        """This mode inside another one."""
        kinds = {kind for kind, _, _ in self.autocast}
        kept = tuple(each for each in outer.autocast if each[0] not in kinds)
        return Mode(gradient=self.gradient and outer.gradient, autocast=kept + self.autocast)


def casts() -> dict[str, _Autocast]:
    """How autocast is set at the moment."""
    return {kind: (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS}


def mode_now(before: dict[str, _Autocast]) -> Mode:
    """The mode at the moment, against autocast as it was before with gradients on."""
    changed = tuple(now for kind, now in casts().items() if now != before[kind])
    return Mode(gradient=torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), autocast=changed)


@contextmanager
def autocast_on() -> Iterator[None]:
    """Autocast seems to be on inside, so that a model which switches it off shows that it does."""
    before = casts()
    for kind in _KINDS:
        torch.set_autocast_enabled(kind, True)
    try:
        yield
    finally:
        for kind, enabled, dtype in before.values():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """`torch.inference_mode` is `torch.no_grad` inside: the same numbers, and torch.export sees it."""
    kind: Any = torch.inference_mode
    own = kind.__enter__, kind.__exit__

    def enter(self: Any) -> None:
        self.stagewright_mode = torch.set_grad_enabled(not self.mode and torch.is_grad_enabled())
        self.stagewright_mode.__enter__()

    kind.__enter__, kind.__exit__ = enter, lambda self, *fault: self.stagewright_mode.__exit__(*fault)
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = own


@contextmanager
def entered(mode: Mode | None) -> Iterator[None]:
    """Runs what is inside in a mode."""
    with ExitStack() as stack:
        if mode is not None and not mode.gradient:
            stack.enter_context(torch.no_grad())
        for kind, enabled, dtype in mode.autocast if mode is not None else ():
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield


class _Within:
    """A function that runs in a mode, in a place: another function, a method by its name, or its first argument."""

    __name__ = "within"

    def __init__(self, mode: Mode | None, place: int | None, operation: Callable[..., Any] | str | None) -> None:
        self.mode, self.place, self.operation = mode, place, operation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with entered(self.mode), drawing(self.place):
            if isinstance(self.operation, str):
                return getattr(args[0], self.operation)(*args[1:], **kwargs)
            return args[0](*args[1:], **kwargs) if self.operation is None else self.operation(*args, **kwargs)


KEPT = ("mode", "place")
"""What a node remembers of how it runs: the mode, and where in the model it may draw at random."""


def name_places(graph: fx.Graph, objects: Mapping[str, Any]) -> None:
    """Names the nodes that may draw at random: by the module they are in, and how many of its nodes came before."""
    seen: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op.startswith("call") and draws(_operation(node, objects)):
            inside = node.meta.get("path") or ("",)
            path = (str(node.target) if node.op == "call_module" else inside[-1]).partition("@")[0]
            node.meta["place"] = place_of(path, seen[path])
            seen[path] += 1


def _operation(node: fx.Node, objects: Mapping[str, Any]) -> Any:
    return objects[str(node.target)] if node.op == "call_module" else node.target


def runnable(graph: fx.Graph) -> fx.Graph:
    """The graph with every node in its mode and place, for running; the graph itself where no node has one."""
    if not any(key in node.meta for node in graph.nodes for key in KEPT):
        return graph
    made, copies = fx.Graph(), dict[fx.Node, Any]()

    def copied(old: fx.Node) -> Any:
        return copies[old]

    for node in graph.nodes:
        is_plain = not any(key in node.meta for key in KEPT) or not node.op.startswith("call")
        copies[node] = made.node_copy(node, copied) if is_plain else _within(made, node, copied)
    return made


def _within(graph: fx.Graph, node: fx.Node, copied: Callable[[fx.Node], Any]) -> fx.Node:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), copied)
    mode, place = (node.meta.get(key) for key in KEPT)
    if node.op == "call_module":
        return graph.call_function(_Within(mode, place, None), (graph.get_attr(str(node.target)), *args), kwargs)
    return graph.call_function(_Within(mode, place, node.target), tuple(args), kwargs)
