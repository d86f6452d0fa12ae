"""Which kind of work an operator is, and what fusing spares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stagewright.profiling.analytic import operator_seconds
from stagewright.profiling.facts import Work, WorkRecorder
from stagewright.profiling.kinds import DeviceKind

KIND = DeviceKind(
    name="round",
    memory_bytes=1,
    peak_flops={"fp32": 1e12},
    memory_bytes_per_s=1e9,
    efficiency={"conv": 1.0, "matmul": 1.0, "memory": 1.0},
    launch_s=1.0,
)


def works(module: nn.Module, *, backward: bool = False) -> list[Work]:
    """What a module's operators do on eight channels of 4 × 4 points."""
    rows = torch.zeros(2, 8, 4, 4, requires_grad=True)
    with WorkRecorder(4) as recorder:
        made = module(rows)
        if backward:
            made.sum().backward()
    return recorder.works


@pytest.mark.parametrize(("size", "kind"), [(1, "matmul"), (3, "conv")])
def test_a_convolution_over_one_point_is_a_matrix_product(size: int, kind: str) -> None:
    found = works(nn.Conv2d(8, 8, size, padding=size // 2, bias=False), backward=True)
    assert [work.kind for work in found if work.flops] == [kind, kind]


def test_a_fused_operator_neither_reads_one_operand_nor_writes() -> None:
    size = 2 * 8 * 4 * 4 * 4
    (relu,) = works(nn.ReLU())
    assert (relu.num_bytes, relu.spared_bytes) == (2 * size, 2 * size)
    added = Work("memory", 0.0, 3e9, 2e9)
    assert operator_seconds(added, KIND, "fp32") == pytest.approx(1.0 + 3.0)
    assert operator_seconds(added, replace(KIND, fused=("fp32",)), "fp32") == pytest.approx(1.0)


def test_what_is_no_operator_on_single_elements_is_never_fused() -> None:
    assert all(work.spared_bytes == 0.0 for work in works(nn.Conv2d(8, 8, 3)) if work.flops)
