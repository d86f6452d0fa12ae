"""PipeDream's own objective, minimised exactly over the graph: the yardstick for our planner.

Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019, section 3.1, one level, without
overlap. A stage of r replicas, and a boundary into it (and out of it, where it is not the first), cost

    (compute + 4 (r − 1) / r · weight_bytes / bandwidth) / r        2 · activation_bytes / (bandwidth · r)

and the objective is the largest of them. A cut of a branching graph is a set of layers with everything they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.cost import layer_seconds
from stagewright.errors import PlanError
from stagewright.profile import Profile

MAX_CUTS = 20_000


@dataclass(frozen=True, kw_only=True)
class PipeDreamPlan:
    """What PipeDream's objective likes best: the layers of each stage, its replicas, and seconds a batch."""

    seconds: float
    stages: tuple[tuple[str, ...], ...]
    replicas: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Every way to cut a graph in two, smallest first: bit masks of layers, and sums over them."""

    masks: tuple[int, ...]
    compute_s: np.ndarray
    weight_bytes: np.ndarray
    crossing_bytes: np.ndarray

    def inside(self, cut: int) -> np.ndarray:
        """Which of the earlier cuts lie inside this one."""
        mask = self.masks[cut]
        return np.fromiter((other | mask == mask for other in self.masks[:cut]), dtype=bool, count=cut)


def find_cuts(profile: Profile) -> Cuts:
    """The cuts of a profile's graph, from nothing to everything."""
    reads = _reads(profile)
    seen, layer_sets = {0}, [0]
    for mask in layer_sets:
        for number, needed in enumerate(reads):
            larger = mask | 1 << number
            if larger != mask and needed & mask == needed and larger not in seen:
                seen.add(larger)
                layer_sets.append(larger)
                if len(layer_sets) > MAX_CUTS:
                    raise PlanError(f"{profile.model}: the graph can be cut in more than {MAX_CUTS:,} ways")
    return _sums(profile, reads, sorted(layer_sets, key=lambda mask: (mask.bit_count(), mask)))


def _reads(profile: Profile) -> list[int]:
    number = {name: place for place, name in enumerate(profile.names)}
    masks = []
    for place, layer in enumerate(profile.layers):
        sources = range(max(place - 1, 0), place) if layer.inputs is None else [number[name] for name in layer.inputs]
        masks.append(sum(1 << source for source in sources))
    return masks


def _sums(profile: Profile, reads: Sequence[int], masks: Sequence[int]) -> Cuts:
    rows = profile.batch_sizes[-1]
    count = len(profile.layers)
    seconds = layer_seconds(profile, rows)
    inside = np.array([[mask >> n & 1 for n in range(count)] for mask in masks], dtype=float)
    readers = [sum(1 << n for n in range(count) if reads[n] >> place & 1) for place in range(count)]
    crosses = np.array([[bool(mask >> n & 1 and readers[n] & ~mask) for n in range(count)] for mask in masks])
    return Cuts(
        masks=tuple(masks),
        compute_s=inside @ np.array(seconds),
        weight_bytes=inside @ np.array([layer.parameter_bytes for layer in profile.layers], dtype=float),
        crossing_bytes=crosses @ np.array([layer.output_bytes * rows for layer in profile.layers]),
    )


def pipedream_plan(profile: Profile, num_devices: int, bytes_per_s: float) -> PipeDreamPlan:
    """The plan that minimises PipeDream's objective, for one minibatch as the profile has it.

    best[cut, m] = min over inner cuts k and replicas r of max(best[k, m − r], the stage between them)
    """
    if num_devices < 1 or bytes_per_s <= 0:
        raise PlanError(f"{num_devices} devices at {bytes_per_s} bytes/s: expected positive numbers")
    cuts = find_cuts(profile)
    last = len(cuts.masks) - 1
    best = np.full((last + 1, num_devices + 1), np.inf)
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for cut in range(1, last + 1):
        _settle(cuts, cut, best, came, bytes_per_s)
    return _unwound(profile, cuts, best, came)


def _settle(
    cuts: Cuts, cut: int, best: np.ndarray, came: dict[tuple[int, int], tuple[int, int]], bytes_per_s: float
) -> None:
    inner = np.flatnonzero(cuts.inside(cut))
    inner = inner[inner > 0]
    devices = best.shape[1] - 1
    is_last = cut == len(cuts.masks) - 1
    for replicas in range(1, devices + 1):
        alone = _stage_s(cuts.compute_s[cut], cuts.weight_bytes[cut], replicas, bytes_per_s)
        _keep(best, came, cut, replicas, float(alone), 0, replicas)
        if not len(inner):
            continue
        compute, weights = (
            cuts.compute_s[cut] - cuts.compute_s[inner],
            cuts.weight_bytes[cut] - cuts.weight_bytes[inner],
        )
        entering = 2 * cuts.crossing_bytes[inner] / (bytes_per_s * replicas)
        leaving = 0.0 if is_last else 2 * cuts.crossing_bytes[cut] / (bytes_per_s * replicas)
        stage = np.maximum(_stage_s(compute, weights, replicas, bytes_per_s), np.maximum(entering, leaving))
        total = np.maximum(best[inner, 1 : devices + 1 - replicas], stage[:, None])
        for used, place in enumerate(total.argmin(axis=0), start=1):
            _keep(best, came, cut, used + replicas, float(total[place, used - 1]), int(inner[place]), replicas)


def _stage_s(
    compute_s: np.ndarray | float, weight_bytes: np.ndarray | float, replicas: int, bytes_per_s: float
) -> np.ndarray:
    return np.asarray((compute_s + 4 * (replicas - 1) / replicas * weight_bytes / bytes_per_s) / replicas)


def _keep(
    best: np.ndarray,
    came: dict[tuple[int, int], tuple[int, int]],
    cut: int,
    used: int,
    seconds: float,
    inner: int,
    replicas: int,
) -> None:
    if seconds < best[cut, used]:
        best[cut, used] = seconds
        came[cut, used] = (inner, replicas)


def _unwound(
    profile: Profile, cuts: Cuts, best: np.ndarray, came: dict[tuple[int, int], tuple[int, int]]
) -> PipeDreamPlan:
    cut = len(cuts.masks) - 1
    used = int(np.argmin(best[cut]))
    seconds = float(best[cut, used])
    stages: list[tuple[str, ...]] = []
    replicas: list[int] = []
    while cut:
        inner, count = came[cut, used]
        mask = cuts.masks[cut] & ~cuts.masks[inner]
        stages.append(tuple(name for n, name in enumerate(profile.names) if mask >> n & 1))
        replicas.append(count)
        cut, used = inner, used - count
    return PipeDreamPlan(seconds=seconds, stages=tuple(stages[::-1]), replicas=tuple(replicas[::-1]))


def along(profile: Profile, plan: PipeDreamPlan) -> Profile:
    """The profile with its layers in the plan's order, so that each of its stages is a run of layers."""
    names = [name for stage in plan.stages for name in stage]
    layers = []
    for name in names:
        place = profile.index(name)
        layer = profile.layers[place]
        before = (profile.names[place - 1],) if place else ()
        layers.append(replace(layer, inputs=before if layer.inputs is None else layer.inputs))
    return replace(profile, layers=tuple(layers))
