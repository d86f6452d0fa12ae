"""Numbers: autocast, the dynamic loss scale, and the agreement of all workers on overflow and norm."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.runtime.settings import Settings

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH, BACKOFF = 2.0, 0.5


def autocast(settings: Settings) -> AbstractContextManager[object]:
    """The context in which a forward runs."""
    dtype = AUTOCAST.get(settings.precision)
    return nullcontext() if dtype is None else torch.autocast(settings.device, dtype=dtype)


class LossScale:
    """The dynamic loss scale: halved on overflow, doubled after a run of finite steps.

    Every worker computes it from the same agreements, so all hold the same one without a word more. It stays on the
    device: a host that asked for it after every step would keep a card waiting for the next.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.is_on = settings.precision == "fp16"
        self.growth_steps = settings.scale_growth_steps
        self.current = torch.tensor(settings.loss_scale if self.is_on else 1.0, dtype=torch.float64, device=device)
        """What the loss of a backward that starts now is multiplied with; never changed in place."""
        self._num_finite = torch.zeros_like(self.current)

    @property
    def value(self) -> float:
        """The scale as a number, which waits for the device."""
        return float(self.current)

    def note(self, overflowed: Tensor) -> None:
        """Moves the scale on after one step."""
        if not self.is_on:
            return
        finite = self._num_finite + 1
        grows = finite >= self.growth_steps
        self._num_finite = torch.where(overflowed | grows, 0.0, finite)
        self.current = self.current * torch.where(overflowed, BACKOFF, torch.where(grows, GROWTH, 1.0))

    def saved(self) -> tuple[float, int]:
        """What a checkpoint keeps: the scale, and the finite steps since it last changed."""
        return self.value, int(self._num_finite)

    def restore(self, value: float, num_finite: int) -> None:
        """Goes on from what a checkpoint kept."""
        self.current = torch.full_like(self.current, value)
        self._num_finite = torch.full_like(self._num_finite, num_finite)


class Verdict:
    """What all workers agreed on for one batch; it stays on the device."""

    def __init__(self, sums: Tensor, scale: Tensor, clip_norm: float | None) -> None:
        bad, squares = sums.unbind()
        self.norm = squares.sqrt() / scale
        """The norm of the gradients of all stages, unscaled."""
        self.overflowed = (bad > 0) | ~torch.isfinite(self.norm)
        """Whether any gradient of any stage was infinite or NaN."""
        # The same factor as torch.nn.utils.clip_grad_norm_: min(1, clip / (norm + 1e-6)).
        clip = 1.0 if clip_norm is None else (clip_norm / (self.norm + 1e-6)).clamp(max=1.0)
        self.factor = clip / scale
        """What the gradients are multiplied with before the step: unscaling and clipping in one."""


def gradient_sums(gradients: list[Tensor], device: torch.device) -> Tensor:
    """(how many are not finite, sum of squares) of a stage's gradients, as one small tensor on the device."""
    if not gradients:
        return torch.zeros(2, dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(gradients)).double()
    bad = (~torch.isfinite(norms)).sum().double()
    squares = torch.where(torch.isfinite(norms), norms, torch.zeros_like(norms)).square().sum()
    return torch.stack([bad, squares])


def agree(sums: Tensor, scale: Tensor, clip_norm: float | None, group: dist.ProcessGroup | None) -> Verdict:
    """All workers' sums added up; `sums` counts each stage once."""
    if group is not None:
        dist.all_reduce(sums, group=group)
    return Verdict(sums, scale, clip_norm)
