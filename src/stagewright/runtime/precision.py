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
        self.current = torch.tensor(settings.loss_scale if self.is_on else 1.0, device=device)
        """What the loss of a backward that starts now is multiplied with; never changed in place."""
        self._num_finite = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def value(self) -> float:
        """The scale as a number, which waits for the device."""
        return float(self.current)

    def note(self, overflowed: Tensor) -> None:
        """Moves the scale on after one step; `overflowed` is 1 or 0."""
        if self.is_on:
            self.current = self.current.clone()
            torch._amp_update_scale_(self.current, self._num_finite, overflowed, GROWTH, BACKOFF, self.growth_steps)

    def saved(self) -> tuple[float, int]:
        """What a checkpoint keeps: the scale, and the finite steps since it last changed."""
        return self.value, int(self._num_finite)

    def restore(self, value: float, num_finite: int) -> None:
        """Goes on from what a checkpoint kept."""
        self.current = torch.full_like(self.current, value)
        self._num_finite = torch.full_like(self._num_finite, num_finite)


class Verdict:
    """What all workers agreed on for one batch; it stays on the device."""

    def __init__(self, squares: Tensor, scale: Tensor, clip_norm: float | None) -> None:
        self.norm = squares.sqrt() / scale
        """The norm of the gradients of all stages, unscaled."""
        self.overflowed = (self.norm - self.norm).ne(0).float()  # ∞ − ∞ is NaN; isfinite takes twice the kernels
        """1 where any gradient of any stage was infinite or NaN, else 0."""
        # As torch.nn.utils.clip_grad_norm_, which multiplies with min(1, clip / (norm + 1e-6)).
        self.divisor = scale if clip_norm is None else scale * ((self.norm + 1e-6) / clip_norm).clamp(min=1.0)
        """What the gradients are divided by before the step: unscaling and clipping in one."""


def sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """That of some gradients, on the device; one that is not finite makes it so too."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()


def agree(squares: Tensor, scale: Tensor, clip_norm: float | None, group: dist.ProcessGroup | None) -> Verdict:
    """The verdict on the squares of all workers' gradients; each stage counts once."""
    if group is not None:
        dist.all_reduce(squares, group=group)
    return Verdict(squares, scale, clip_norm)
