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

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class _Correction:
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
        return self.copies(1) > 0

    def copies(self, delay: int) -> int:
        """How many times the weights it keeps beside the versions, the last of them only while an update is made."""
        if delay == 0 or (self.ahead is None and not self.feeds_back):
            return 0
        return 2 if self.ahead is not None else delay + 1

    def prepare(self, groups: Iterable[dict[str, Any]], delay: int) -> dict[int, float]:
        """Sets the momentum of an optimizer's groups; by a parameter's id how many moves its slots are ahead."""
        found: dict[int, float] = {}
        for group in groups:
            momentum = _momentum_of(group)
            if self.momentum is not None and momentum is not None:
                momentum = _set_momentum(group, momentum, self.momentum(delay, momentum))
            if self.ahead is not None:
                found |= {id(each): self.ahead(delay, momentum or 0.0) for each in group["params"]}
        return found

    @contextmanager
    def rescaled(self, groups: Sequence[dict[str, Any]], delay: int, over: float) -> Iterator[None]:
        """Inside, the groups' rates are those of this correction, with such a share of the first steps over."""
        rates = [group["lr"] for group in groups]
        if self.rate is not None:
            for group, rate in zip(groups, rates):
                group["lr"] = rate * self.rate(delay, over)
        yield
        for group, rate in zip(groups, rates):
            group["lr"] = rate


def _momentum_of(group: Mapping[str, Any]) -> float | None:
    """The momentum of a group whose steps do not grow with it; None where there is none."""
    if "betas" in group:
        return float(group["betas"][0])
    return float(group["momentum"]) if "dampening" in group or "ns_steps" in group else None


def _set_momentum(group: dict[str, Any], before: float, momentum: float) -> float:
    """Gives a group another momentum, with steps of the same length in the long run; returns it."""
    if "betas" in group:
        group["betas"] = (momentum, group["betas"][1])
    else:
        group["momentum"] = momentum
    if "dampening" in group:  # a mean of gradients keeps its size by itself, SGD's sum of them does not
        group["dampening"] = 1 - (1 - momentum) / (1 - before) * (1 - group["dampening"])
    return momentum


def _ahead_by_delay(delay: int, momentum: float) -> float:
    return delay


def _slowed(delay: int, momentum: float) -> float:
    """The momentum that remembers d + 1 times as long."""
    return 1 - (1 - momentum) / (delay + 1)


CORRECTIONS: Mapping[str, _Correction] = {
    "none": _Correction(),
    "predict": _Correction(
        paper="Chen et al., SpecTrain, 2018, equation 4; Guan et al., XPipe, 2019, equation 6", ahead=_ahead_by_delay
    ),
    # They use a momentum of 0.99 for 8 stages, or a line from 0.9 in the last one to that in the first.
    "nesterov": _Correction(
        paper="Ajanthan et al., Nesterov method for asynchronous pipeline parallel optimization, ICML 2025",
        ahead=lambda delay, momentum: momentum,
        momentum=_slowed,
    ),
    "slow-predict": _Correction(
        paper="both: moves that change slowly are foreseen better", ahead=_ahead_by_delay, momentum=_slowed
    ),
    "error-feedback": _Correction(
        paper="Zmushko et al., One-step gradient delay is not a barrier, ICML 2026, for d = 1", feeds_back=True
    ),
    # They divide by the delay itself, which changes nothing at 1; the largest stable rate of their lemma 1,
    # sin(π / (4d + 2)), falls as 1 / (d + 1) within an eighth.
    "rescale": _Correction(
        paper="Yang et al., PipeMare, 2021, technique 1", rate=lambda delay, over: (delay + 1) ** (over - 1)
    ),
}

# ── what staleness costs, as benchmarks/staleness.py measured it ────────────────────────────────────────


@cache
def _measured() -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By optimizer and correction: (mean delay over the stages, how much higher the final loss is), by delay."""
    file = Path(__file__).with_name("stale_costs.json")
    told: dict[str, dict[str, list[tuple[float, float]]]] = json.loads(file.read_text(encoding="utf-8"))
    return told


def _mean_delay(versions: Sequence[int]) -> float:
    return sum(versions) / len(versions) - 1


def cost_of(optimizer: str, versions: Sequence[int], correct: str) -> float | None:
    """The share by which the study's final loss was higher at such delays; None where it has nothing near.

    Between two delays it is on a line, beyond the longest that of the longest.
    """
    delay, found = _mean_delay(versions), _measured().get(optimizer, {}).get(correct)
    if found is None:
        return None
    for (low, less), (high, more) in pairwise([(0.0, 0.0), *found]):
        if delay <= high:
            return less + (more - less) * (delay - low) / (high - low)
    return found[-1][1]


def _best(optimizer: str, versions: Sequence[int]) -> tuple[str, float]:
    """The correction that costs least."""
    costs = {name: cost_of(optimizer, versions, name) for name in _measured()[optimizer]}
    name = min((name for name in costs if costs[name] is not None), key=lambda name: costs[name] or 0.0)
    return name, costs[name] or 0.0


def price_of_staleness(versions: Sequence[int]) -> str:
    """One line on what each optimizer's loss pays for a plan's versions; empty for an exact plan."""
    if max(versions) == 1:
        return ""
    told = []
    for optimizer in _measured():
        plain, (name, best) = cost_of(optimizer, versions, "none"), _best(optimizer, versions)
        told.append(f"{optimizer} {plain or 0:+.1%}" + (f" (--correct {name} {best:+.1%})" if name != "none" else ""))
    delay = f"stale by {_mean_delay(versions):.2g} steps on average"
    return f"{delay}; the loss it costs at as many samples, measured on small models: {', '.join(told)}"


def warnings_of(optimizer: str, versions: Sequence[int], correct: Sequence[str]) -> Iterator[str]:
    """One line for a launch without a correction that would pay."""
    if max(versions) == 1 or set(correct) != {"none"} or optimizer not in _measured():
        return
    cost, (name, best) = cost_of(optimizer, versions, "none"), _best(optimizer, versions)
    if cost is not None and name != "none":
        yield (
            f"stale weights without a correction: {optimizer} paid {cost:+.1%} of final loss for such delays on a "
            f"small model, {best:+.1%} with --correct {name} (docs/staleness.md)"
        )
