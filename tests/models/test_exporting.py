"""Kernels of torch in place of what a trace spells out: causal masks, but no others, and norms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stagewright as sw
from stagewright.models.exporting import ATTENTION, normalized, trace_exported
from stagewright.models.tracing import Sample


def tril(hidden: Tensor) -> Tensor:
    return torch.ones(hidden.size(1), hidden.size(1), dtype=torch.bool).tril().expand(hidden.size(0), 1, -1, -1)


def additive(hidden: Tensor) -> Tensor:
    return torch.full((hidden.size(1), hidden.size(1)), float("-inf"), dtype=hidden.dtype).triu(1)


def window(hidden: Tensor) -> Tensor:
    return tril(hidden) & ~tril(hidden).tril(-3)


def wide_window(hidden: Tensor) -> Tensor:
    return tril(hidden) & ~tril(hidden).tril(-99)


def bias(hidden: Tensor) -> Tensor:
    return additive(hidden) - 0.5


def of_values(hidden: Tensor) -> Tensor:
    return tril(hidden) & (hidden[:, None, None, :, 0] < 99.0)


class Attends(nn.Module):
    def __init__(self, mask: object) -> None:
        super().__init__()
        self.mask, self.start, self.end = mask, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.start(rows)
        heads = hidden.unsqueeze(1)
        mask = self.mask(hidden)  # type: ignore[operator]
        made = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, dropout_p=0.0)
        return self.end(made.squeeze(1)).sum(1)


@pytest.mark.parametrize(
    ("mask", "is_dropped"),
    [(tril, True), (additive, True), (wide_window, True), (window, False), (bias, False), (of_values, False)],
)
def test_a_mask_that_only_says_what_came_before_is_dropped(mask: object, is_dropped: bool) -> None:
    torch.manual_seed(0)
    model, rows = Attends(mask).double(), torch.randn(5, 8, 4, dtype=torch.float64)
    traced = trace_exported(model, Sample(args=(rows[:2],), kwargs={}))
    (attention,) = (node for node in traced.graph.nodes if node.target is ATTENTION)
    assert (len(attention.args) > 5 and attention.args[5] is True) == is_dropped
    assert (attention.args[3] is None) == is_dropped
    layered = sw.make_layered(model, (rows[:2],))
    (made,) = layered.stage(0, layered.num_layers)(rows)
    torch.testing.assert_close(made, model(rows), rtol=0, atol=1e-12)


class Norm(nn.Module):
    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim, self.weight, self.start = dim, nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.start(rows)
        return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(self.dim, keepdim=True) + 1e-6))


@pytest.mark.parametrize(("dim", "is_fused"), [(-1, True), (1, False)])
def test_a_norm_by_the_mean_square_of_each_row_is_one_function(dim: int, is_fused: bool) -> None:
    model, rows = Norm(dim).double(), torch.randn(5, 8, 4, dtype=torch.float64)
    traced = trace_exported(model, Sample(args=(rows[:2],), kwargs={}))
    assert any(node.target is normalized for node in traced.graph.nodes) == is_fused
    layered = sw.make_layered(model, (rows[:2],))
    (made,) = layered.stage(0, layered.num_layers)(rows)
    assert torch.equal(made, model(rows))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_the_kernel_of_a_norm_gives_the_same_numbers_on_a_card() -> None:
    rows = torch.randn(5, 64, dtype=torch.float64, device="cuda", requires_grad=True)
    pull = torch.randn(5, 64, dtype=torch.float64, device="cuda")
    wanted, made = rows * torch.rsqrt(rows.pow(2).mean(-1, True) + 1e-6), normalized(rows, 1e-6)
    torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(each, rows, pull)[0] for each in (made, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
