"""Muon for matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim

_OF_MUON = "matrices"
"""The option of a group that says which of the two moves its parameters."""


class Muon(optim.Optimizer):
    """torch's Muon and AdamW side by side; they share this optimizer's groups and states.

    Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`, of Liu et al., "Muon is scalable for LLM
    training", 2025, equation 4), so that one learning rate and one weight decay are right for both.
    """

    def __init__(
        self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], *, momentum: float, adamw: dict[str, Any],
        **values: Any,
    ) -> None:  # fmt: skip
        made: list[tuple[bool, optim.Optimizer]] = []
        if matrices:
            made.append((True, optim.Muon(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **values)))
        if others:
            made.append((False, optim.AdamW(others, **adamw, **values)))
        self._parts = dict(made)
        groups = [{**group, _OF_MUON: is_muon} for is_muon, part in made for group in part.param_groups]
        super().__init__(groups, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Moves every parameter that has a gradient."""
        for is_muon, part in self._parts.items():
            # Whoever restored this optimizer has given it other groups and states.
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group[_OF_MUON] == is_muon]
            part.step()
