"""What happens where torch fails to compile a stage with kernels combined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stagewright.runtime.warm_up import _run_or_compile_again


def refuse(graph: object, inputs: object) -> None:
    """A backend that cannot compile anything."""
    raise RuntimeError("cannot combine these")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where inductor is loaded
def test_what_cannot_be_combined_is_compiled_apart() -> None:
    module, rows, made = nn.Linear(3, 2), torch.ones(4, 3), list[Tensor]()
    refused = torch.compile(module, backend=refuse)
    assert isinstance(refused, nn.Module)
    modules: list[nn.Module] = [module, refused]
    _run_or_compile_again(lambda: made.append(modules[1](rows)), modules, 1)
    torch.testing.assert_close(made, [module(rows)])
    assert modules[0] is module


def test_a_fault_of_the_model_is_told_at_once() -> None:
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        raise ValueError("a layer's own fault")

    with pytest.raises(ValueError, match="own fault"):
        _run_or_compile_again(run, [nn.Linear(3, 2)], 0)
    assert len(calls) == 1
