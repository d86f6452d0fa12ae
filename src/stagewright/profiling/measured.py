"""Profiles measured here: every layer timed in its place, between its neighbours."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.errors import ProfileError
from stagewright.models.layered import Layered
from stagewright.models.tracing import undisturbed
from stagewright.profile import Precision, Profile
from stagewright.profiling.busy import busy_cores
from stagewright.profiling.detect import num_cores
from stagewright.profiling.facts import find_facts, layer_profiles
from stagewright.profiling.heap import keep_freed_memory
from stagewright.profiling.kinds import plain_name
from stagewright.profiling.layers import Pieces, Unit, make_pieces, run_units

_Progress = Callable[[int, int], None]
"""Called with how many repeats are done, and of how many."""

_Now = Callable[[], float]
_WARM_UP = 2


class _Clock:
    """Notes moments, on a GPU in its own stream of work, so that nothing waits for the clock."""

    def __init__(self, device: torch.device, now: _Now) -> None:
        self._device, self._now, self._moments = device, now, list[Any]()
        if device.type == "cuda":
            # The GPU sleeps, a tenth of a second on today's, while its work is handed over: a layer is timed, not that.
            with torch.cuda.device(device):
                torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """Notes this moment; on a GPU, that when everything before it is done."""
        if self._device.type != "cuda":
            self._moments.append(self._now())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._moments.append(event)

    def gaps_s(self) -> list[float]:
        """The seconds between the moments noted."""
        if self._device.type != "cuda":
            return [second - first for first, second in pairwise(self._moments)]
        torch.cuda.synchronize(self._device)
        return [float(first.elapsed_time(second)) / 1e3 for first, second in pairwise(self._moments)]


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@dataclass(frozen=True)
class _Timing:
    """Seconds of one batch size, repeat by repeat."""

    forward: list[list[float]]
    backward: list[list[float]]
    weight: list[list[float]]
    """The part of backward that only weights need: what it takes longer than without them right after."""
    whole: list[float]


def make_profile(
    model: Layered, *, batch_sizes: Sequence[int], precision: Precision = "fp32", name: str | None = None,
    repeats: int = 7, workers: int = 1, progress: _Progress | None = None,
) -> Profile:  # fmt: skip
    """The profile of a model on the device where it is, its sample repeated to each batch size.

    On a CPU it holds while so many `workers` compute at once. Where they are more than the cores, it is CPU seconds.
    """
    if not batch_sizes or min(batch_sizes) < 1:
        raise ProfileError(f"batch sizes {list(batch_sizes)}: expected 1 row or more", "give --batch ROWS")
    if repeats < 1:
        raise ProfileError(f"{repeats} repeats: expected 1 or more")
    pieces = make_pieces(model, precision)
    unit = Unit(first=0, last=model.num_layers, module=model.stage(0, model.num_layers))
    whole = replace(pieces, units=(unit,))
    device = model.sample[0].device
    if device.type == "cpu":
        keep_freed_memory()  # as workers do
    facts = find_facts(pieces)
    total, done = len(batch_sizes) * (_WARM_UP + repeats), 0
    timings = [_Timing([], [], [], []) for _ in batch_sizes]
    threads = torch.get_num_threads()
    on_cores = workers if device.type == "cpu" else 1
    takes_turns = threads == 1 and on_cores > num_cores()  # and finds cold caches each time
    beside = on_cores - 1 if takes_turns else max(min(on_cores, num_cores() // threads) - 1, 0)
    now = thread_time if takes_turns else perf_counter
    with undisturbed(model.model), _gradients_kept(model.model), busy_cores(beside, threads):
        model.model.train()
        for number in range(_WARM_UP + repeats):
            # All sizes in every round: a machine that is slow for a while is so for all of them.
            for rows, timing in zip(batch_sizes, timings):
                repeat = number - _WARM_UP
                kept = timing if repeat >= 0 else _Timing([], [], [], [])
                _time_once(pieces, whole, rows, now, kept, weights=repeat >= 0 and repeat % 2 == 0)
                done += 1
                if progress is not None:
                    progress(done, total)
        optimizer_s = _time_optimizer(model, device, now, repeats)
    layers = layer_profiles(
        pieces, facts, _medians([each.forward for each in timings]), _medians([each.backward for each in timings]),
        weight_s=_medians([each.weight for each in timings]),
        spread=[_spread(timings[-1], number) for number in range(len(facts))],
    )  # fmt: skip
    kind = device.type
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine()}
    if device.type == "cuda":
        called = torch.cuda.get_device_name(device)
        kind, versions = plain_name(called), {**versions, "device": called, "cuda": str(torch.version.cuda)}
    how = f"median of {repeats} repeats after {_WARM_UP}; {threads} CPU threads, {beside} workers beside"
    return Profile(
        model=name or type(model.model).__name__.lower(), device=kind, precision=precision,
        source="measured", batch_sizes=tuple(batch_sizes), layers=layers,
        input_bytes=float(sum(spec.bytes_per_row for spec in model.inputs)),
        sample_name=model.sample_name, sample_tokens=model.row_tokens, optimizer_s=optimizer_s,
        model_s=tuple(median(timing.whole) for timing in timings), versions=versions, notes=(how,),
    )  # fmt: skip


def _medians(by_size: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, ...]]:
    """Unit by unit the medians of all repeats, one a batch size."""
    return list(zip(*([median(seconds) for seconds in zip(*runs)] for runs in by_size)))


def _time_once(pieces: Pieces, whole: Pieces, rows: int, now: _Now, timing: _Timing, *, weights: bool) -> None:
    """Times the layers and, right after, the whole model, so that both see the same machine.

    With `weights` also what of each unit's backward only its weights need, against the unit as it was just timed.
    """
    inputs, targets = pieces.rows(rows)
    # On zeros a pooling need not guess which number is larger, nor an activation which sign comes next.
    inputs = [torch.randn_like(each) if each.is_floating_point() else each for each in inputs]
    forward, backward = _timed_run(pieces, inputs, targets, now)
    timing.forward.append(forward)
    timing.backward.append(backward)
    timing.whole.append(sum(map(sum, _timed_run(whole, inputs, targets, now))))
    if weights:
        _, without = _timed_run(pieces, inputs, targets, now, weights=False)
        timing.weight.append([max(with_ - own, 0.0) for with_, own in zip(backward, without)])


def _timed_run(
    pieces: Pieces, inputs: Sequence[Tensor], targets: Sequence[Tensor], now: _Now, *, weights: bool = True
) -> tuple[list[float], list[float]]:
    """Seconds of each unit's forward, and of each unit's backward."""
    pieces.model.model.zero_grad(set_to_none=True)
    device, units = inputs[0].device, len(pieces.units)
    clock = _Clock(device, now)
    run_units(pieces, inputs, targets, lambda *_: clock.mark(), start=lambda unit: clock.mark(), weights=weights)
    gaps = clock.gaps_s()
    # Marks stand before and after each forward, so that every second gap is what cutting itself costs.
    own_s = _backward_call_s() if device.type == "cpu" else 0.0
    return gaps[: 2 * units : 2], [max(gap - own_s, 0.0) for gap in gaps[: 2 * units - 2 : -1]]


@cache
def _backward_call_s() -> float:
    """What one call of backward costs on the CPU beside its work; a stage pays it once, a profile a layer."""
    gaps = []
    for _ in range(101):
        leaf = torch.zeros(1, requires_grad=True)
        made = leaf.view(1)
        begin = perf_counter()
        torch.autograd.backward([made], [leaf.detach()])
        gaps.append(perf_counter() - begin)
    return median(gaps)


def _time_optimizer(model: Layered, device: torch.device, now: _Now, repeats: int) -> float:
    """Seconds of one SGD-with-momentum step over all parameters; the weights stay as they are."""
    parameters = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
    if not parameters:
        return 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    gaps = []
    for _ in range(_WARM_UP + repeats):
        clock = _Clock(device, now)
        clock.mark()
        optimizer.step()
        clock.mark()
        gaps += clock.gaps_s()
    return median(gaps[_WARM_UP:])


def _spread(timing: _Timing, unit: int) -> float:
    sums = [forward[unit] + backward[unit] for forward, backward in zip(timing.forward, timing.backward)]
    if len(sums) < 2 or median(sums) <= 0:
        return 0.0
    low, _, high = quantiles(sums, n=4)
    return max(0.0, (high - low) / 2 / median(sums))


def has_cuda() -> bool:
    """Whether torch finds a GPU here."""
    return torch.cuda.is_available()


def layers_against_model(profile: Profile) -> tuple[float, ...]:
    """For each batch size the sum of the layers over the whole model in one piece: 1 is perfect."""
    sums = (
        sum(layer.forward_s[size] + layer.backward_s[size] for layer in profile.layers)
        for size in range(len(profile.batch_sizes))
    )
    return tuple(total / whole for total, whole in zip(sums, profile.model_s))
