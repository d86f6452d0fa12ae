"""The first step checks itself: a replica's gradients before they are reduced against those of plain autograd.

Deferred, split, recomputed and compiled backwards all have to give what autograd gives. In the first batch the first
replica of each stage runs every microbatch once more, plainly, and keeps a few numbers of each gradient g of a weight w
that add up over microbatches: Σ g and Σ g · w. That comes after the microbatch's own backward, so that one graph is
held at a time, and no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stagewright.errors import RunError
from stagewright.models import StageModule
from stagewright.runtime.replica import Replica
from stagewright.runtime.settings import Settings
from stagewright.runtime.stage import Held, Key
from stagewright.runtime.weights import copy_hooks

_TOLERANCE = {"fp64": 1e-6, "fp32": 2e-2, "fp16": 0.2, "bf16": 0.3}
"""How far the numbers may be apart, as a share of themselves or of what random signs would give, by precision.

Rounding stays far below, that of compiled code too, which rounds elsewhere; a use of a weight that is lost or counted
twice is a share of about 1.
"""


class SelfCheck:
    """What plain autograd gives for one worker's first batch."""

    def __init__(self, settings: Settings) -> None:
        self._tolerance = _TOLERANCE[settings.precision]
        self._is_on = settings.self_check and not settings.sync_batch_norm  # whose replicas would all have to come
        self._is_compiled = settings.compile
        self._batch: int | None = None
        self._expected: dict[tuple[int, str], Tensor] = {}
        self._left: dict[int, int] = {}
        """By stage how many microbatches of the first batch are still to come."""
        self._found: dict[int, list[tuple[str, str, Tensor]]] = {}
        """By stage what came to be compared before the last of them: the model's name, the stage's own, the numbers."""

    def keep(self, here: Replica, key: Key) -> Held | None:
        """What it takes to run a microbatch of the first batch once more; None where that is not to be."""
        if not self._is_on or here.replica != 0 or (self._is_compiled and here.runner.draws):  # which draws otherwise
            return None
        self._batch = key[0] if self._batch is None else self._batch
        if key[0] != self._batch:
            return None
        self._left.setdefault(here.stage, here.num_backwards)
        return replace(here.runner.held[key], outputs=[])

    def add(
        self, here: Replica, key: Key, held: Held | None, gradients: Sequence[Tensor] | None, scale: Tensor,
        length: int | None,
    ) -> None:  # fmt: skip
        """Runs a microbatch once more, plainly: after its own backward, so that one graph is held at a time.

        With the batch's last one, what came to be compared meanwhile is judged.
        """
        if held is None:
            return
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # else copies of these weights stay until the next update
        try:
            self._run(here, key, held, gradients, scale, length)
        except torch.OutOfMemoryError:  # a card that is just large enough for the run itself
            self._is_on = False
        finally:
            torch.set_autocast_cache_enabled(caches)
        self._left[here.stage] -= 1
        if self._left[here.stage] == 0:
            for name, own_name, found in self._found.pop(here.stage, ()):
                self._judge(here.stage, name, self._expected.pop((here.stage, own_name), None), found)

    def _run(
        self, here: Replica, key: Key, held: Held, gradients: Sequence[Tensor] | None, scale: Tensor,
        length: int | None,
    ) -> None:  # fmt: skip
        module = _plain(here.module(key[0], length))
        weights = {name: module.get_parameter(name).detach().requires_grad_() for name in here.trained}
        for name, weight in weights.items():
            copy_hooks(module.get_parameter(name), weight)
            note = partial(self._note, here.stage, name)
            weight.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        here.runner.backward_plainly(
            lambda *inputs: functional_call(module, {**weights, **buffers}, inputs), key, held, gradients, scale
        )

    def _note(self, stage: int, name: str, weight: Tensor) -> None:
        """Adds a microbatch's gradient to what is expected, and lets it go."""
        gradient, weight.grad = weight.grad, None
        if gradient is not None:
            found = _numbers(gradient, weight)
            self._expected[stage, name] = self._expected.get((stage, name), torch.zeros_like(found)) + found

    def compare(self, here: Replica, batch: int, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Compares a stage's gradients of the first batch, before they are reduced."""
        if not self._is_on or batch != self._batch or here.replica != 0:
            return
        module, own = _plain(here.module(batch)), {first: name for name, first in here.names.items()}
        for name, gradient in zip(names, gradients):
            own_name = own.get(name, name)
            if gradient is None:
                continue
            found = _numbers(gradient, module.get_parameter(own_name))
            if self._left.get(here.stage, 0):
                self._found.setdefault(here.stage, []).append((name, own_name, found))
            else:
                self._judge(here.stage, name, self._expected.pop((here.stage, own_name), None), found)

    def _judge(self, stage: int, name: str, expected: Tensor | None, found: Tensor) -> None:
        if expected is None or not self._is_on:
            return
        allowed = self._tolerance * torch.maximum(expected[2:], expected[:2].abs())
        wrong = (expected[:2] - found[:2]).abs() > allowed
        if bool((wrong & expected[:2].isfinite() & found[:2].isfinite()).any()):
            raise RunError(
                f"the first step's gradient of '{name}' in stage {stage} is not that of plain autograd: "
                f"its sum is {float(found[0]):.6g} instead of {float(expected[0]):.6g}",
                "this is a fault of stagewright, please tell it; --no-self-check goes on all the same",
            )


def _plain(module: nn.Module) -> StageModule:
    """The stage as it is, where torch.compile has wrapped it."""
    return getattr(module, "_orig_mod", module)  # type: ignore[arg-type]


@torch.no_grad()
def _numbers(gradient: Tensor, weight: Tensor) -> Tensor:
    """Σ g and Σ g · w, and how large they would be with random signs; piece by piece, for sums are in fp64."""
    pairs = zip(*(torch.split(each.detach().reshape(-1), 1 << 18) for each in (gradient, weight)))
    doubles = ((g.double(), w.double()) for g, w in pairs)
    sums = torch.stack([torch.stack([g.sum(), g @ w, g @ g, w @ w]) for g, w in doubles]).sum(0)
    size, scale = sums[2].sqrt(), (sums[3] / max(1, weight.numel())).sqrt()
    return torch.stack([sums[0], sums[1], size, size * scale])
