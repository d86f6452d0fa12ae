"""Layers that are built alike and follow one another, as the blocks of a language model do: a few stand for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from stagewright.models.stage import StageModule
from stagewright.profiling.layers import Pieces

_PLAIN = (bool, int, float, str, tuple, type(None), torch.dtype, FunctionType, BuiltinFunctionType)


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
