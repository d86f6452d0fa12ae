"""Batch norm that sees the rows of all replicas of its stage, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stagewright.errors import UsageError
from stagewright.plan import Plan
from stagewright.policy import RULES


class _Normalised(torch.autograd.Function):
    """Rows normalised by the mean and variance over all replicas, which come along, with the number of values.

        n = Σ nᵢ,   mean = Σ nᵢ meanᵢ / n,   var = Σ nᵢ (varᵢ + (meanᵢ − mean)²) / n        (Chan et al. 1979, eq. 1.5)
        dx = (dy − Σ dy / n − x̂ · Σ (dy · x̂) / n) / √(var + ε)                              x̂: what comes out

    Each replica tells its own mean and variance about it: a sum of squares would lose small variances of large means.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, eps: float, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        around, channels = _around(rows), rows.size(1)
        wide = rows if rows.dtype == torch.float64 else rows.float()
        # About a mean that is rounded itself, so that nothing else is: x − near is exact where x is near.
        near = wide.mean(around)
        centred = wide - _along(near, rows)
        rest = centred.mean(around).double()
        own_variance = centred.square().mean(around).double() - rest.square()
        own = torch.cat([near.double() + rest, own_variance, near.new_full((1,), rows.numel() / channels).double()])
        told = own.new_empty((dist.get_world_size(group), len(own)))
        dist.all_gather([*told], own, group=group)
        means, variances, counts = told[:, :channels], told[:, channels:-1], told[:, -1:]
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        factor = torch.rsqrt(variance + eps).to(wide.dtype)
        normal = (centred - _along((mean - near).to(wide.dtype), rows)) * _along(factor, rows)
        ctx.save_for_backward(normal, factor, count)
        ctx.group, ctx.dtype = group, rows.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return normal, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        normal, factor, count = ctx.saved_tensors
        gradient, around = gradients[0], _around(normal)
        sums = torch.cat([gradient.sum(around), (gradient * normal).sum(around)])
        dist.all_reduce(sums, group=ctx.group)
        to_mean, to_variance = (sums / count.to(sums.dtype)).chunk(2)
        centred = gradient - _along(to_mean, normal) - normal * _along(to_variance, normal)
        return (centred * _along(factor, normal)).to(ctx.dtype), None, None


def _around(rows: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [dimension for dimension in range(rows.dim()) if dimension != 1]


def _along(channels: Tensor, rows: Tensor) -> Tensor:
    """One number a channel, shaped to meet rows."""
    return channels.view([1, -1, *([1] * (rows.dim() - 2))])


def synchronize_batch_norm(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Lets every batch norm inside take its statistics over all replicas of the group."""
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.forward = _SharedForward(part, group)  # type: ignore[method-assign, assignment]


def check_batch_norm(plan: Plan) -> None:
    """Refuses plans under which the replicas of a stage do not come to their batch norms together."""
    for stage, num_replicas in enumerate(plan.replicas):
        if num_replicas == 1:
            continue
        if plan.route == "rotate" or RULES[plan.policy].by_arrival:
            word = "the route rotate" if plan.route == "rotate" else f"the schedule {plan.policy}"
            raise UsageError(
                f"--sync-batch-norm needs all replicas of stage {stage} at one microbatch, which {word} does not give",
                "use --route split and a static schedule, or leave --sync-batch-norm out",
            )
        for microbatch in range(plan.num_microbatches):
            found = len(plan.shares(stage, microbatch))
            if found < num_replicas:
                raise UsageError(
                    f"--sync-batch-norm needs rows on all {num_replicas} replicas of stage {stage}, but microbatch "
                    f"{microbatch} gives rows to {found}",
                    "use a larger --batch or fewer --microbatches",
                )


class _SharedForward:
    """The forward of a batch norm over a group."""

    def __init__(self, norm: _BatchNorm, group: dist.ProcessGroup) -> None:
        self.norm, self.group = norm, group

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedForward:
        return _SharedForward(memo.get(id(self.norm), self.norm), self.group)

    def __call__(self, rows: Tensor) -> Tensor:
        norm = self.norm
        if not norm.training and norm.track_running_stats:
            return type(norm).forward(norm, rows)
        result, mean, variance, count = _Normalised.apply(rows, norm.eps, self.group)  # type: ignore[no-untyped-call]
        self._track(mean, variance, count)
        if norm.weight is not None:
            result = result * _along(norm.weight, rows) + _along(norm.bias, rows)
        return result.to(rows.dtype)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        norm = self.norm
        if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
            return
        norm.num_batches_tracked += 1
        share = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
        unbiased = variance * count / (count - 1)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
