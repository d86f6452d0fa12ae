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


class _SumOverReplicas(torch.autograd.Function):
    """The sum over a group, whose gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def synchronize_batch_norm(module: nn.Module, group: dist.ProcessGroup | None) -> Any:
    """The module with every batch norm taking its statistics over all replicas of the group.

    mean = Σ x / n,  var = Σ x² / n − mean²,  sums over the rows of all replicas, n their number
    """
    for part in module.modules():
        if isinstance(part, _BatchNorm) and group is not None:
            part.forward = _SharedForward(part, group)  # type: ignore[method-assign, assignment]
    return module


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
        mean, variance, count = self._statistics(rows)
        self._track(mean, variance, count)
        shape = [1, -1, *([1] * (rows.dim() - 2))]
        result = (rows.to(mean.dtype) - mean.view(shape)) * torch.rsqrt(variance.view(shape) + norm.eps)
        if norm.weight is not None:
            result = result * norm.weight.view(shape) + norm.bias.view(shape)
        return result.to(rows.dtype)

    def _statistics(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        around = [dim for dim in range(rows.dim()) if dim != 1]
        wide = rows if rows.dtype == torch.float64 else rows.float()
        count = wide.new_full((1,), rows.numel() / rows.size(1))
        sums = torch.cat([wide.sum(around), wide.square().sum(around), count])
        total: Tensor = _SumOverReplicas.apply(sums, self.group)  # type: ignore[no-untyped-call]
        channels = rows.size(1)
        mean = total[:channels] / total[-1]
        return mean, total[channels:-1] / total[-1] - mean.square(), total[-1].detach()

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
