"""What a trace keeps whole, as one node each: custom autograd functions, whose backward is the author's, and modules.

GradReverse.apply(x)        ─▶   one node that calls a module, _CustomFunction(GradReverse), on x
self.layers[3](h, mask)     ─▶   one node that calls the module 'layers.3', which runs its own code in the stage
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing, track_tensor_tree
from torch.utils import _pytree as pytree

_APPLY: Any = torch.autograd.Function.__dict__["apply"]


class _CustomFunction(nn.Module):
    """A custom autograd function as a module."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function.apply(*args)  # type: ignore[no-untyped-call]


class Kept:
    """What a trace has met and keeps whole, by the path it has among the graph's objects."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._calls: list[tuple[str, Callable[..., Any], pytree.TreeSpec]] = []
        self._likes: dict[str, str] = {}
        self._made: dict[Any, Any] = {}

    def path(self, function: type[torch.autograd.Function]) -> str:
        """The path of a function, which it gets when it is met first."""
        for path, module in self.modules.items():
            if isinstance(module, _CustomFunction) and module.function is function:
                return path
        path = f"_custom_function_{len(self.modules)}_{function.__name__}"
        self.modules[path] = _CustomFunction(function)
        return path

    def call(self, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One node that stands for a call of what is at a path, of which torch.export sees nothing else."""
        leaves, nesting = pytree.tree_flatten((args, kwargs))
        self._calls.append((path, run, nesting))
        return _call(len(self._calls) - 1, *leaves)

    def keep(self, path: str, module: nn.Module) -> None:
        """Makes a node of each call of a module. Two modules that are alike return the same shapes."""
        shapes = [(name, tuple(each.shape)) for name, each in module.named_parameters()]
        self._likes[path] = f"{type(module)} {shapes}"
        own = module.forward
        module.forward = lambda *args, **kwargs: self.call(path, own, args, kwargs)

    def run(self, number: int, *leaves: Any) -> Any:
        """Makes a call, to see what comes out."""
        _, args, kwargs = self.called(number, *leaves)
        return self._calls[number][1](*args, **kwargs)

    def shapes(self, number: int, *leaves: Any) -> Any:
        """What comes out of a call on shapes alone, as it did of one that was like it."""
        path, _, nesting = self._calls[number]
        given = [str((each.shape, each.dtype)) if isinstance(each, Tensor) else repr(each) for each in leaves]
        key = (self._likes.get(path, path), str(nesting), *given)
        if key not in self._made:
            self._made[key] = self.run(number, *leaves)
            return self._made[key]
        return pytree.tree_map_only(Tensor, torch.empty_like, self._made[key])

    def called(self, number: int, *leaves: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """The path of what a node calls, and the arguments."""
        path, _, nesting = self._calls[number]
        args, kwargs = pytree.tree_unflatten(list(leaves), nesting)
        return path, args, kwargs


class _Call(HigherOrderOperator):
    """What stands for a call in a program that torch.export makes: (number of the call, its arguments)."""

    def __init__(self) -> None:
        super().__init__("kept_whole")  # type: ignore[no-untyped-call]
        self.kept = Kept()

    def __call__(self, number: int, *args: Any) -> Any:
        return super().__call__(number, *args)  # type: ignore[no-untyped-call]


_call = _Call()
_call.py_impl(DispatchKey.CompositeExplicitAutograd)(lambda number, *args: _call.kept.run(number, *args))
for _key in (
    "AutogradCPU", "AutogradCUDA", "AutogradMeta", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView", "BackendSelect",
    "PythonTLSSnapshot",
):  # fmt: skip
    _call.fallthrough(getattr(DispatchKey, _key))  # type: ignore[no-untyped-call]


@_call.py_impl(FakeTensorMode)
def _on_shapes(mode: FakeTensorMode, number: int, *args: Any) -> Any:
    with mode:
        return _call.kept.shapes(number, *args)


@_call.py_impl(ProxyTorchDispatchMode)
def _as_node(mode: ProxyTorchDispatchMode, number: int, *args: Any) -> Any:
    with disable_proxy_modes_tracing():
        made = _call(number, *args)
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, args)  # type: ignore[union-attr]
    node = mode.tracer.create_proxy("call_function", _call, (number, *proxies), {})
    return track_tensor_tree(made, node, constant=None, tracer=mode.tracer)


def is_kept(target: Any) -> bool:
    """Whether a node of an exported program stands for something that is kept whole."""
    return target is _call


@contextmanager
def keeping(tracer: fx.Tracer | None = None, modules: Mapping[str, nn.Module] | None = None) -> Iterator[Kept]:
    """Inside, custom functions and the given modules become one node each: of this tracer, or of torch.export."""
    kept, modules = Kept(), modules or {}

    def apply(function: Any, *args: Any) -> Any:
        leaves = pytree.tree_leaves(args)
        own = partial(_APPLY.__func__, function)
        if function.__module__.startswith("torch."):
            return own(*args)
        if tracer is not None and any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return tracer.create_proxy("call_module", kept.path(function), args, {})
        if tracer is None and any(isinstance(leaf, Tensor) for leaf in leaves):
            return kept.call(kept.path(function), own, args, {})
        return own(*args)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)), patch.object(_call, "kept", kept):
        for path, module in modules.items():
            kept.keep(path, module)
        try:
            yield kept
        finally:
            for module in modules.values():
                del module.forward
