"""Muon for matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim

_OF_MUON = "matrices"
"""The option of a group that says which of the two moves its parameters."""


class Muon(optim.Optimizer):
    """torch's Muon for the groups of matrices and AdamW for the others; they share this optimizer's groups and states.

    Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`, of Liu et al., "Muon is scalable for LLM
    training", 2025, equation 4), so that one learning rate and one weight decay are right for both.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, weight_decay: float, momentum: float, **adamw: Any
    ) -> None:  # fmt: skip
        own: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        makers: dict[bool, Callable[[Any], optim.Optimizer]] = {
            True: lambda given: optim.Muon(given, momentum=momentum, adjust_lr_fn="match_rms_adamw", **own),
            False: lambda given: optim.AdamW(given, **adamw, **own),
        }
        self._parts: dict[bool, optim.Optimizer] = {}
        for is_muon, make in makers.items():
            mine = [group for group in groups if group["is_matrices"] == is_muon]
            if mine:
                plain = [{key: value for key, value in group.items() if key != "is_matrices"} for group in mine]
                self._parts[is_muon] = make(plain)
        marked = [{**group, _OF_MUON: of} for of, part in self._parts.items() for group in part.param_groups]
        super().__init__(marked, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Moves every parameter that has a gradient."""
        for is_muon, part in self._parts.items():
            # Whoever restored this optimizer has given it other groups and states.
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group[_OF_MUON] == is_muon]
            part.step()
