"""Corrections of stale weights: what is done about a batch that computes without the last updates.

    d        the delay of a stage, its K − 1: batch n + d computes with what update n left
    z        the newest weights, which the optimizer moves by u: z(n) = z(n−1) + u(n)
    x        the weights at use; without a correction x(n) = z(n)

    predict          x(n) = z(n) + d · u(n)
    nesterov         x(n) = z(n) + γ · u(n), and the optimizer's momentum is γ = 1 − (1 − momentum) / (d + 1)
    slow-predict     x(n) = z(n) + d · u(n), with the momentum of nesterov
    error-feedback   x(n) = x(n−1) + u(n) + (u(n) − u(n−d)), and the optimizer moves x itself
    rescale          the rate of a step is divided by (d + 1)^p; p falls from 1 to 0 over the first steps

u(n) is what a step did to the weights, whatever the optimizer: −rate · momentum for SGD, −rate · m / (√v + eps) for
Adam. So a correction needs nothing of an optimizer but its weights; `nesterov` also sets its momentum. Evaluation and
checkpoints have z.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What a stage does about its delay."""

    paper: str = ""
    ahead: Callable[[int, float], float] | None = None
    """From delay and momentum to how many moves like the last one the weights at use are ahead of the newest."""
    momentum: Callable[[int, float], float] | None = None
    """From delay and momentum to the momentum that the optimizer gets instead."""
    rate: Callable[[int, float], float] | None = None
    """From delay and the share of the first steps that is over to the factor of the learning rate."""
    feeds_back: bool = False
    """Whether each move is followed by its difference from the one of `delay` updates before."""

    @property
    def keeps_weights(self) -> bool:
        """Whether it keeps weights or moves beside the weights at use."""
        return self.ahead is not None or self.feeds_back


def _ahead_by_delay(delay: int, momentum: float) -> float:
    return delay


def _slowed(delay: int, momentum: float) -> float:
    """The momentum that remembers d + 1 times as long."""
    return 1 - (1 - momentum) / (delay + 1)


CORRECTIONS: Mapping[str, Correction] = {
    "none": Correction(),
    "predict": Correction(
        paper="Chen et al., SpecTrain, 2018, equation 4; Guan et al., XPipe, 2019, equation 6",
        ahead=_ahead_by_delay,
    ),
    # They use a momentum of 0.99 for 8 stages, or a line from 0.9 in the last one to that in the first.
    "nesterov": Correction(
        paper="Ajanthan et al., Nesterov method for asynchronous pipeline parallel optimization, ICML 2025",
        ahead=lambda delay, momentum: momentum,
        momentum=_slowed,
    ),
    "slow-predict": Correction(
        paper="both: moves that change slowly are foreseen better", ahead=_ahead_by_delay, momentum=_slowed
    ),
    "error-feedback": Correction(
        paper="Zmushko et al., One-step gradient delay is not a barrier, ICML 2026, for d = 1", feeds_back=True
    ),
    # They divide by the delay itself, which changes nothing at 1; the largest stable rate of their lemma 1,
    # sin(π / (4d + 2)), falls as 1 / (d + 1) within an eighth.
    "rescale": Correction(
        paper="Yang et al., PipeMare, 2021, technique 1", rate=lambda delay, over: (delay + 1) ** (over - 1)
    ),
}
