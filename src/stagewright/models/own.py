"""A model of one's own by the file that makes it: `python:FILE.py:FUNCTION`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright.errors import ModelError
from stagewright.models.layered import Layered
from stagewright.models.making import make_layered

PYTHON = "python:"
"""How the names of these models begin."""


def build_own(name: str, *, seed: int, adapt: Callable[[nn.Module], nn.Module] | None = None) -> Layered:
    """The layers that a function in a file returns, on the device where it makes them."""
    function = _function(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = function()
    if not isinstance(made, Layered):
        raise ModelError(
            f"{name} returned a {type(made).__name__}, not layers",
            "return sw.make_layered(module, (inputs,), loss=…, targets=(labels,))",
        )
    if adapt is None:
        return made
    return make_layered(adapt(made.model), made.sample, loss=made.loss, targets=made.sample_targets)


def _function(name: str) -> Callable[[], Any]:
    """The function that a name says."""
    file, _, function = name.removeprefix(PYTHON).rpartition(":")
    path = Path(file)
    if not file or not function.isidentifier():
        raise ModelError(f"{name} names no function of a file", "write python:FILE.py:FUNCTION")
    if not path.is_file():
        raise ModelError(f"{name}: there is no file {path.absolute()}", "write python:FILE.py:FUNCTION")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{name}: {path} is no Python file", "write python:FILE.py:FUNCTION")
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ModelError(f"{path} has no function {function}", "write python:FILE.py:FUNCTION")
    made: Callable[[], Any] = found
    return made
