"""One pass over a worker's stages before the first step, so that nothing is loaded or tuned while others wait.

On a card a kernel's first use loads it, which waits for every kernel that runs; a receive that waits for its sender
is one of those, and two workers could wait for each other for ever. So everything runs once before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from stagewright.models import TensorSpec
from stagewright.runtime.compiling import COMPILED, replays
from stagewright.runtime.precision import sum_of_squares
from stagewright.runtime.replica import Replica
from stagewright.runtime.weights import Versions
from stagewright.runtime.worker import Worker


def warm_up(worker: Worker) -> None:
    """On a card, runs every stage of a worker once."""
    if worker.world.device.type == "cuda":
        _run_everything_once(worker)
        torch.cuda.synchronize()


def _run_everything_once(worker: Worker) -> None:
    """Runs every stage of a worker forward, backward and through its optimizer on zeros, and leaves no trace."""
    for here in worker.replicas.values():
        sizes = {share.stop - share.start for share in here.shares if share is not None}
        buffers = [buffer.clone() for buffer in here.weights.modules[0].buffers()]
        for slot in range(len(here.weights.modules)):
            for rows in sorted(sizes) * 2:  # the second time adds to gradients and sums
                run = partial(_run_once, worker, here, slot, rows)
                _run_or_compile_again(run, here.weights.modules, slot) if worker.settings.compile else run()
                for length in filter(None, here.shapes):
                    _run_once(worker, here, slot, rows, length)
            if slot:  # gradients of one slot at a time, as in a run
                here.weights.modules[slot].zero_grad(set_to_none=True)
        for buffer, kept in zip(here.weights.modules[0].buffers(), buffers):
            buffer.copy_(kept)
        for versions in (here.weights, *here.tied):
            _update_once(versions, worker.world.device)


def _run_or_compile_again(run: Callable[[], None], modules: list[nn.Module], slot: int) -> None:
    """Runs what uses a module that is compiled, a second time without options where inductor fails with them."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        run()
    except BackendCompilerFailed:
        modules[slot] = torch.compile(getattr(modules[slot], COMPILED.rstrip(".")))  # type: ignore[call-overload]
        run()


def _run_once(worker: Worker, here: Replica, slot: int, rows: int, length: int | None = None) -> None:
    """Forward and backward of one slot on rows of zeros."""
    runner, key = here.runner, (slot, -1)
    if replays(here.plan):  # a gradient is never added to, and where graphs are replayed it must not be
        for parameter in here.weights.modules[slot].parameters():
            parameter.grad = None
    shape = here.shapes[length]
    inputs, targets = (_zeros(rows, specs, worker) for specs in (shape.inputs, shape.targets))
    made = runner.forward(shape.modules[slot], key, inputs, targets)
    if runner.has_loss:
        worker.note(-1, rows, made, targets)
        worker.figures(-1)
        runner.backward(key, None, torch.zeros_like(worker.scale.current))  # no gradient may overflow
    else:
        outputs = [tensor for tensor, spec in zip(made, runner.outputs) if spec.needs_grad]
        runner.backward(key, [torch.zeros_like(tensor) for tensor in outputs], worker.scale.current)


def _zeros(rows: int, specs: Sequence[TensorSpec], worker: Worker) -> list[Tensor]:
    """Rows of zeros in the layout of the run."""
    made = [torch.zeros((rows, *spec.shape_per_row), dtype=spec.dtype, device=worker.world.device) for spec in specs]
    layout = torch.channels_last if worker.settings.channels_last else torch.contiguous_format
    return [each.contiguous(memory_format=layout) if each.dim() == 4 else each for each in made]


def _update_once(weights: Versions, device: torch.device) -> None:
    """One optimizer step at a rate of 0 on the gradients just made, then a clean slate."""
    gradients = [parameter.grad for parameter in weights.parameters[0]]
    present = [gradient for gradient in gradients if gradient is not None]
    sum_of_squares(present, device)
    if present:  # a stage may well have no weights: a loss alone
        torch._foreach_copy_([torch.empty_like(gradient) for gradient in present], present)
        torch._foreach_mul_(present, 1.0)
    for slot in weights.parameters:
        for parameter in slot:
            parameter.grad = None
    if weights.optimizer is None:
        return
    rates, scheduler = [group["lr"] for group in weights.optimizer.param_groups], weights.scheduler
    weights.scheduler = None
    for group in weights.optimizer.param_groups:
        group["lr"] = 0.0
    if weights.pieces is not None:
        gradients = [torch.zeros_like(place) for place in weights.places[0]]
    for _ in range(2):  # the second time adds to a momentum
        weights.update(0, gradients)
    weights.num_updates, weights.scheduler = 0, scheduler
    weights.optimizer.state.clear()
    for group, rate in zip(weights.optimizer.param_groups, rates):
        group["lr"] = rate
