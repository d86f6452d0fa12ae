"""Causal masks that tracing writes down, and those that say more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stagewright as sw
from stagewright.models.attention import ATTENTION
from stagewright.models.exporting import trace_exported
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
