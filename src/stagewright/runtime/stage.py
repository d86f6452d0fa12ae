"""One replica of a stage on its worker: forward and backward of microbatches, and the rows in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright.models import StageModule, TensorSpec
from stagewright.models.running import row_keys, rows_drawn
from stagewright.runtime.precision import autocast
from stagewright.runtime.settings import Settings

Key = tuple[int, int]
"""(batch, microbatch)"""


@dataclass
class Held:
    """What forward of a microbatch left for its backward."""

    inputs: list[Tensor]
    targets: Sequence[Tensor]
    start: int
    """The number of the first row in the batch."""
    outputs: list[Tensor]
    """The loss alone in the last stage."""
    output_gradients: list[Tensor] | None = None
    weight_groups: list[dict[str, Any]] | None = None
    """What the weights' half of a split backward still needs."""


class StageRunner:
    """Computes one stage; knows nothing of other workers."""

    def __init__(
        self, number: int, module: StageModule, settings: Settings, *, replica: int = 0, recompute: bool = False
    ) -> None:
        self.number, self.settings, self.recompute = number, settings, recompute
        self.seed = _mix(settings.seed, number, replica)
        self.inputs: tuple[TensorSpec, ...] = module.inputs
        self.outputs: tuple[TensorSpec, ...] = module.outputs
        self.has_loss, self.draws = module.has_loss, module.draws
        self.held: dict[Key, Held] = {}
        self._uses_a_weight_twice: bool | None = None
        self.timed: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context that each forward and backward runs in: a stopwatch's, while somebody measures them."""

    def forward(
        self, module: nn.Module, key: Key, inputs: Sequence[Tensor], targets: Sequence[Tensor], *, start: int = 0,
        hold: bool = True,
    ) -> list[Tensor]:  # fmt: skip
        """Runs a microbatch forward and holds what backward needs; returns the outputs, or loss and predictions.

        `start` is the number of its first row in the batch.
        """
        leaves = [tensor.detach().requires_grad_(spec.needs_grad) for tensor, spec in zip(inputs, self.inputs)]
        _draw_from(_mix(self.seed, *key), self.settings.device)
        keys = self._row_keys(key[0], start, leaves)
        with autocast(self.settings), rows_drawn(keys), self.timed():
            if self.recompute:
                contexts = (nullcontext(), _Again(module, keys))
                made = checkpoint(module, *leaves, *targets, use_reentrant=False, context_fn=lambda: contexts)
            else:
                made = module(*leaves, *targets)
        if hold:
            self.held[key] = Held(leaves, targets, start, list(made[:1]) if self.has_loss else list(made))
        return list(made)

    def _row_keys(self, batch: int, start: int, inputs: Sequence[Tensor]) -> Tensor | None:
        if not self.draws or self.settings.compile:  # compiled code draws in its own way
            return None
        rows, device = inputs[0].size(0), inputs[0].device
        return row_keys(self.settings.seed, batch, start, start + rows, device)

    def backward(self, key: Key, gradients: Sequence[Tensor] | None, scale: Tensor) -> list[Tensor]:
        """Runs a microbatch backward, gradients of inputs and weights at once; returns those of the inputs.

        `scale` is the gradient of the last stage's sum: the loss scale divided by what the batch counts.
        """
        held = self.held.pop(key)
        outputs, given = self._ends(held, gradients, scale)
        with self.timed():
            torch.autograd.backward(outputs, given)
        return self._input_gradients(held)

    def backward_plainly(
        self, call: Callable[..., Any], key: Key, held: Held, gradients: Sequence[Tensor] | None, scale: Tensor
    ) -> None:
        """Runs a microbatch that was held forward and backward once more, by a call of the module."""
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in held.inputs]
        _draw_from(_mix(self.seed, *key), self.settings.device)
        with torch.enable_grad(), autocast(self.settings), rows_drawn(self._row_keys(key[0], held.start, leaves)):
            made = list(call(*leaves, *held.targets))
        again = replace(held, outputs=made[:1] if self.has_loss else made)
        outputs, given = self._ends(again, gradients, scale)
        if outputs:
            torch.autograd.backward(outputs, given)

    def backward_input(
        self, module: nn.Module, key: Key, gradients: Sequence[Tensor] | None, scale: Tensor
    ) -> list[Tensor]:
        """The first half: gradients of the inputs only; the rest is kept for `backward_weight`."""
        held = self.held[key]
        outputs, given = self._ends(held, gradients, scale)
        needing = [tensor for tensor in held.inputs if tensor.requires_grad]
        held.output_gradients = given
        if not needing:
            return []
        if self._uses_a_weight_twice is None:
            self._uses_a_weight_twice = _uses_a_weight_twice(outputs, needing)
        if self._uses_a_weight_twice:
            # torch's halves free what the other use of the weight needs; so the graph is gone through once more.
            with self.timed():
                found = torch.autograd.grad(outputs, needing, given, retain_graph=True, allow_unused=True)
            for tensor, gradient in zip(needing, found):
                tensor.grad = gradient
            held.outputs = outputs
            return self._input_gradients(held)
        # Imported where it is used: it takes long, and every worker would wait for it when it starts.
        from torch.distributed.pipelining._backward import stage_backward_input

        # It detaches the outputs in place, which a view, such as what a flatten makes, cannot be.
        ends = [tensor.clone() if tensor._is_view() else tensor for tensor in outputs]
        with self.timed():
            _, held.weight_groups = stage_backward_input(ends, given, needing, iter(_trained(module)))
        held.outputs = []
        return self._input_gradients(held)

    def backward_weight(self, module: nn.Module, key: Key) -> None:
        """The second half: gradients of the weights."""
        held, weights = self.held.pop(key), _trained(module)
        if held.weight_groups is None:
            outputs = [tensor for tensor in held.outputs if tensor.requires_grad]
            if outputs and weights:
                with self.timed():
                    torch.autograd.backward(outputs, held.output_gradients, inputs=weights)
            return
        from torch.distributed.pipelining._backward import stage_backward_weight

        with self.timed():
            stage_backward_weight(iter(weights), held.weight_groups)

    def _ends(self, held: Held, gradients: Sequence[Tensor] | None, scale: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        if self.has_loss:
            loss = held.outputs[0]
            return held.outputs, [scale.to(loss.dtype).expand_as(loss)]
        if gradients is None:
            raise ValueError(f"backward of stage {self.number} has no gradients")
        needing = [tensor for tensor, spec in zip(held.outputs, self.outputs) if spec.needs_grad]
        pairs = [(tensor, gradient) for tensor, gradient in zip(needing, gradients) if tensor.requires_grad]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]

    def _input_gradients(self, held: Held) -> list[Tensor]:
        found = []
        for tensor, spec in zip(held.inputs, self.inputs):
            if spec.needs_grad:
                found.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
                tensor.grad = None
        return found


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _uses_a_weight_twice(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether the gradient of a weight is added up from several places of the graph; that of an input may be."""
    given = {id(tensor) for tensor in inputs}
    to_do = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen, ends = set(to_do), set[object]()
    while to_do:
        for node, _ in to_do.pop().next_functions:
            if node is None:
                continue
            if hasattr(node, "variable"):  # where the gradient of a leaf is added up
                if node in ends and id(node.variable) not in given:
                    return True
                ends.add(node)
            elif node not in seen:
                seen.add(node)
                to_do.append(node)
    return False


class _Again:
    """What a forward runs in when backward runs it again, once or more: on the buffers and keys that the first one had.

    Running statistics move once a forward, not twice.
    """

    def __init__(self, module: nn.Module, keys: Tensor | None) -> None:
        self._buffers = list(module.buffers())
        self._values = [buffer.clone() for buffer in self._buffers]
        self._keys = keys
        self._left: list[tuple[list[Tensor], AbstractContextManager[None]]] = []

    def __enter__(self) -> None:
        drawn = rows_drawn(self._keys)
        self._left.append(([buffer.clone() for buffer in self._buffers], drawn))
        drawn.__enter__()
        self._fill(self._values)

    def __exit__(self, *fault: Any) -> None:
        now, drawn = self._left.pop()
        drawn.__exit__(*fault)
        self._fill(now)

    def _fill(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values):
            buffer.data.copy_(value)  # by way of `data`, for graphs that hold the buffer must not notice


def _draw_from(seed: int, device: str) -> None:
    """Sets what is drawn at random from here on.

    Beside a CPU's own generator torch.manual_seed sets those of all kinds of devices, with a traceback for each that is
    not in use: half a millisecond, of a step that may take two.
    """
    if device == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _mix(*numbers: int) -> int:
    """One seed out of several numbers, the same on every machine."""
    seed = 0x9E3779B97F4A7C15
    for number in numbers:
        seed = ((seed ^ (number + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        seed ^= seed >> 31
    return seed & 0x7FFFFFFFFFFFFFFF
