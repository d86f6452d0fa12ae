"""Numbers: autocast, the dynamic loss scale, and the agreement of all workers on overflow and norm."""

from __future__ import annotations

import math
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

    Every worker computes it from the same agreements, so all hold the same one without a word more.
    """

    def __init__(self, settings: Settings) -> None:
        self.is_on = settings.precision == "fp16"
        self.value = settings.loss_scale if self.is_on else 1.0
        self.growth_steps = settings.scale_growth_steps
        self.num_finite = 0

    def note(self, overflowed: bool) -> None:
        """Moves the scale on after one step."""
        if not self.is_on:
            return
        if overflowed:
            self.value, self.num_finite = self.value * BACKOFF, 0
            return
        self.num_finite += 1
        if self.num_finite == self.growth_steps:
            self.value, self.num_finite = self.value * GROWTH, 0


class Verdict:
    """What all workers agreed on for one batch, kept on the device until someone needs the numbers."""

    def __init__(self, sums: Tensor, scale: float, clip_norm: float | None) -> None:
        self._sums, self._scale, self._clip_norm = sums, scale, clip_norm
        self._numbers: tuple[float, float] | None = None

    def _read(self) -> tuple[float, float]:
        if self._numbers is None:
            bad, squares = self._sums.tolist()
            self._numbers = (bad, math.sqrt(squares) / self._scale if squares >= 0 else math.nan)
        return self._numbers

    @property
    def overflowed(self) -> bool:
        """Whether any gradient of any stage was infinite or NaN."""
        bad, norm = self._read()
        return bad > 0 or not math.isfinite(norm)

    @property
    def norm(self) -> float:
        """The norm of the gradients of all stages, unscaled."""
        return self._read()[1]

    @property
    def factor(self) -> float:
        """What the gradients are multiplied with before the step: unscaling and clipping in one.

        The same factor as torch.nn.utils.clip_grad_norm_: min(1, clip / (norm + 1e-6)).
        """
        clip = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (self.norm + 1e-6))
        return clip / self._scale


def gradient_sums(gradients: list[Tensor], device: torch.device) -> Tensor:
    """(how many are not finite, sum of squares) of a stage's gradients, as one small tensor on the device."""
    if not gradients:
        return torch.zeros(2, dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(gradients)).double()
    bad = (~torch.isfinite(norms)).sum().double()
    squares = torch.where(torch.isfinite(norms), norms, torch.zeros_like(norms)).square().sum()
    return torch.stack([bad, squares])


def agree(sums: Tensor, scale: float, clip_norm: float | None, group: dist.ProcessGroup | None) -> Verdict:
    """All workers' sums added up; `sums` counts each stage once."""
    if group is not None:
        dist.all_reduce(sums, group=group)
    return Verdict(sums, scale, clip_norm)
