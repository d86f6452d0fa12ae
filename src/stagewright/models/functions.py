"""Custom autograd functions, kept whole while a model is traced: their backward is the author's, not their operators'.

GradReverse.apply(x)   ─▶   one node that calls a module, CustomFunction(GradReverse), on x
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing, track_tensor_tree
from torch.utils import _pytree as pytree

_PREFIX = "_custom_function_"
"""How the paths of custom functions begin among the objects of a graph."""

_APPLY: Any = torch.autograd.Function.__dict__["apply"]


class _CustomFunction(nn.Module):
    """A custom autograd function as a module."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function.apply(*args)  # type: ignore[no-untyped-call]


class KeptFunctions:
    """The custom functions that a trace has met, by the path they have among the graph's objects."""

    def __init__(self) -> None:
        self.modules: dict[str, _CustomFunction] = {}

    def path(self, function: type[torch.autograd.Function]) -> str:
        """The path of a function, which it gets when it is met first."""
        known = next((path for path, module in self.modules.items() if module.function is function), None)
        if known is None:
            known = f"{_PREFIX}{len(self.modules)}_{function.__name__}"
            self.modules[known] = _CustomFunction(function)
        return known


class _Call(HigherOrderOperator):
    """What stands for a custom function in a program that torch.export makes: (path, function's arguments)."""

    def __init__(self) -> None:
        super().__init__("custom_function")  # type: ignore[no-untyped-call]
        self.kept = KeptFunctions()

    def __call__(self, path: str, *args: Any) -> Any:
        return super().__call__(path, *args)  # type: ignore[no-untyped-call]

    def run(self, path: str, *args: Any) -> Any:
        return _APPLY.__func__(self.kept.modules[path].function, *args)


_call = _Call()
_call.py_impl(DispatchKey.CompositeExplicitAutograd)(_call.run)
for _key in ("AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView", "BackendSelect"):
    _call.fallthrough(getattr(DispatchKey, _key))  # type: ignore[no-untyped-call]
_call.fallthrough(DispatchKey.PythonTLSSnapshot)  # type: ignore[no-untyped-call]


@_call.py_impl(FakeTensorMode)
def _on_shapes(mode: FakeTensorMode, path: str, *args: Any) -> Any:
    with mode:
        return _call.run(path, *args)


@_call.py_impl(ProxyTorchDispatchMode)
def _as_node(mode: ProxyTorchDispatchMode, path: str, *args: Any) -> Any:
    with disable_proxy_modes_tracing():
        made = _call(path, *args)
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, args)  # type: ignore[union-attr]
    node = mode.tracer.create_proxy("call_function", _call, (path, *proxies), {})
    return track_tensor_tree(made, node, constant=None, tracer=mode.tracer)


def is_custom_function(target: Any) -> bool:
    """Whether a node of an exported program calls a custom function; its first argument is then the path."""
    return target is _call


@contextmanager
def kept_functions(tracer: fx.Tracer | None = None) -> Iterator[KeptFunctions]:
    """Inside, custom functions become one node each: of this tracer, or of torch.export."""
    kept = KeptFunctions()

    def apply(function: Any, *args: Any) -> Any:
        leaves = pytree.tree_leaves(args)
        if function.__module__.startswith("torch."):
            return _APPLY.__func__(function, *args)
        if tracer is not None and any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return tracer.create_proxy("call_module", kept.path(function), args, {})
        if tracer is None and any(isinstance(leaf, Tensor) for leaf in leaves):
            return _call(kept.path(function), *args)
        return _APPLY.__func__(function, *args)

    before, _call.kept = _call.kept, kept
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield kept
    finally:
        torch.autograd.Function.apply = _APPLY  # type: ignore[method-assign]
        _call.kept = before
