"""A layered model's layers as modules that run one after the other, forward and then backward.

forward    x ─▶ conv1 ─▶ │ ─▶ conv2 ─▶ │ ─▶ loss      at every │ the tensors are cut off from what made them,
backward     ◀─ conv1 ◀─ │ ◀─ conv2 ◀─ │ ◀─ loss      so that backward stops there and is handed on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stagewright.errors import ProfileError
from stagewright.models.layered import Layered
from stagewright.models.stage import StageModule
from stagewright.profile import Precision

_PLAIN = (bool, int, float, str, tuple, type(None), torch.dtype, FunctionType, BuiltinFunctionType)
DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

_Mark = Callable[[int, bool], None]
"""Called when a unit's forward or backward is over: (unit, whether backward)."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Layers first … last − 1 that no cut may separate: most often one layer."""

    first: int
    last: int
    module: StageModule


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A model as units, and the inputs and targets that it was traced with."""

    model: Layered
    units: tuple[Unit, ...]
    precision: Precision

    def rows(self, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets with so many rows: the sample's, repeated."""

        def repeated(tensor: Tensor) -> Tensor:
            return torch.cat([tensor] * -(-rows // tensor.size(0)))[:rows]

        return list(map(repeated, self.model.sample)), list(map(repeated, self.model.sample_targets))


def make_pieces(model: Layered, precision: Precision = "fp32") -> Pieces:
    """The model in the smallest units that can be cut from one another."""
    if not model.has_loss:
        raise ProfileError(
            "the model has no loss, so that its backward cannot run", "give make_layered a loss and targets"
        )
    edges = (0, *model.cuts(), model.num_layers)
    units = (Unit(first=a, last=b, module=model.stage(a, b)) for a, b in zip(edges, edges[1:]))
    return Pieces(model=model, units=tuple(units), precision=precision)


def run_units(
    pieces: Pieces, inputs: Sequence[Tensor], targets: Sequence[Tensor], mark: _Mark, *,
    start: Callable[[int], None] = lambda unit: None, accumulate: bool = True, weights: bool = True,
) -> None:  # fmt: skip
    """Runs every unit forward, then every unit backward in the opposite order; `start` opens each forward.

    Without `weights`, backward makes the gradients alone that the unit before asks for.
    """
    kept = _run_forward(pieces, inputs, targets, mark, start)
    gradients: list[Tensor | None] = [None] * len(kept[-1][1])
    for number in reversed(range(len(kept))):
        entering, outputs = kept.pop()
        gradients = run_backward(pieces.units[number], entering, outputs, gradients, accumulate, weights)
        del entering, outputs
        mark(number, True)


def _run_forward(
    pieces: Pieces, inputs: Sequence[Tensor], targets: Sequence[Tensor], mark: _Mark,
    start: Callable[[int], None] = lambda unit: None,
) -> list[tuple[list[Tensor], list[GradientEdge | None]]]:  # fmt: skip
    """Runs every unit forward; for each what entered it, and where backward enters."""
    kept: list[tuple[list[Tensor], list[GradientEdge | None]]] = []
    tensors, dtype = inputs, DTYPES.get(pieces.precision)
    with nullcontext() if dtype is None else torch.autocast(inputs[0].device.type, dtype=dtype):
        for number, unit in enumerate(pieces.units):
            specs = unit.module.inputs
            entering = [t.detach().requires_grad_(spec.needs_grad) for t, spec in zip(tensors, specs)]
            start(number)
            tensors = unit.module(*entering, *(targets if unit.module.has_loss else ()))
            # Unlike the tensors themselves, the places where backward enters keep no memory that it does not need.
            kept.append((entering, [get_gradient_edge(each) if each.requires_grad else None for each in tensors]))
            mark(number, False)
    return kept


def run_backward(
    unit: Unit, entering: Sequence[Tensor], outputs: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None],
    accumulate: bool, weights: bool,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of what entered a unit, from those of its outputs."""
    pairs = [(edge, grad) for edge, grad in zip(outputs, gradients) if edge is not None]
    if unit.module.has_loss:
        pairs = pairs[:1]
    if not pairs:
        return [None] * len(entering)
    roots, seeds = [edge for edge, _ in pairs], [grad for _, grad in pairs]
    asked = [tensor for tensor in entering if tensor.requires_grad]
    if accumulate:
        if weights or asked:
            torch.autograd.backward(roots, seeds, inputs=None if weights else asked)
        return [tensor.grad for tensor in entering]
    wanted = [*asked, *(parameter for parameter in unit.module.parameters() if parameter.requires_grad)]
    found = iter(torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if wanted else ())
    return [next(found) if tensor.requires_grad else None for tensor in entering]


# Units that are built alike


def shortened(pieces: Pieces) -> tuple[Pieces, tuple[int, ...]]:
    """The pieces with two of each run of units that are built alike, and for each unit the place of its like there.

    Two, for the first may be given what nobody before it has saved. What each makes is of the shapes that it takes, so
    that the unit after the run can follow any of them.

        embed  block  block  block  block  head
          0      1      2      2      2      3
    """
    uses = Counter(id(each) for unit in pieces.units for each in unit.module.parameters())
    kept, places, looks = [], [], list[Hashable]()
    for unit in pieces.units:
        is_shared = any(uses[id(each)] > 1 for each in unit.module.parameters())
        looks.append(object() if is_shared else _look(unit.module))
        if looks[-3:] != looks[-1:] * 3:
            kept.append(unit)
        places.append(len(kept) - 1)
    return replace(pieces, units=tuple(kept)), tuple(places)


def _look(module: StageModule) -> Hashable:
    """All that may tell two units apart, but for names: code, shapes, and the modules' own settings."""
    code, scope = module._compute.__code__, module._compute.__globals__
    paths = {part for path in (*module.called, *module.read) for part in path.split(".")}
    names = [getattr(scope.get(name), "operation", name) for name in code.co_names if name not in paths]
    specs = [
        [(spec.shape_per_row, spec.dtype, spec.needs_grad) for spec in some]
        for some in (module.inputs, module.targets, module.outputs)
    ]
    parts = [_settings(part) for name, part in module.named_modules(remove_duplicate=False) if name]
    return repr((code.co_code, [each for each in code.co_consts if each not in paths], names, specs, parts))


def _settings(module: nn.Module) -> list[Any]:
    """A module's kind, its tensors' shapes, and its settings; which block of the model it is makes no difference."""
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    shapes = [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors]
    named = sorted((name, value) for name, value in vars(module).items() if name != "layer_idx")
    settings = [(name, value if isinstance(value, _PLAIN) else type(value)) for name, value in named]
    return [type(module), len(module._modules), shapes, settings]
