"""Profile × cluster → seconds and bytes: the only formulas of the project.

The planner's bounds, the simulator's durations and the reports' limits all come from here.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagewright.profile import Profile


def interpolate(sizes: Sequence[int], seconds: Sequence[float], rows: float) -> float:
    """Seconds at `rows`: on the lines between the measured sizes, and on the outermost lines beyond them.

    One measured size alone means time in proportion to rows.
    """
    if rows <= 0:
        return 0.0
    if len(sizes) == 1:
        return seconds[0] * rows / sizes[0]
    upper = next((number for number in range(1, len(sizes) - 1) if rows <= sizes[number]), len(sizes) - 1)
    low, high = sizes[upper - 1], sizes[upper]
    slope = (seconds[upper] - seconds[upper - 1]) / (high - low)
    return max(seconds[upper - 1] + slope * (rows - low), 0.0)


def _layer_s(profile: Profile, layer: int, rows: int, backward: bool) -> float:
    entry = profile.layers[layer]
    return interpolate(profile.batch_sizes, entry.backward_s if backward else entry.forward_s, rows)


def forward_s(profile: Profile, first: int, last: int, rows: int, speed: float = 1.0) -> float:
    """Forward of the layers first … last − 1 on `rows` rows."""
    return sum(_layer_s(profile, layer, rows, False) for layer in range(first, last)) / speed


def backward_s(profile: Profile, first: int, last: int, rows: int, speed: float = 1.0) -> float:
    """Backward of the layers first … last − 1 on `rows` rows."""
    return sum(_layer_s(profile, layer, rows, True) for layer in range(first, last)) / speed


def weight_gradient_s(profile: Profile, first: int, last: int, rows: int, speed: float = 1.0) -> float:
    """The part of backward that only the weights' gradients need."""
    layers = range(first, last)
    return sum(_layer_s(profile, layer, rows, True) * profile.layers[layer].weight_share for layer in layers) / speed


def optimizer_s(profile: Profile, first: int, last: int, speed: float = 1.0) -> float:
    """The optimizer step of some layers: their parameters' share of the whole one."""
    total = parameter_bytes(profile, 0, len(profile.layers))
    return profile.optimizer_s * parameter_bytes(profile, first, last) / total / speed if total else 0.0


def parameter_bytes(profile: Profile, first: int, last: int) -> int:
    """Bytes of the parameters of the layers first … last − 1."""
    return sum(layer.parameter_bytes for layer in profile.layers[first:last])


def saved_bytes(profile: Profile, first: int, last: int) -> float:
    """Bytes a row that forward leaves behind for backward."""
    return sum(layer.saved_bytes for layer in profile.layers[first:last])


def crossing_bytes(profile: Profile, cut: int) -> float:
    """Bytes a row of everything that is made before layer `cut` and read at or after it."""
    if cut <= 0:
        return profile.input_bytes
    if cut >= len(profile.layers):
        return 0.0
    crossing: set[int] = set()
    for number in range(cut, len(profile.layers)):
        inputs = profile.layers[number].inputs
        sources = (number - 1,) if inputs is None else (profile.index(name) for name in inputs)
        crossing.update(source for source in sources if source < cut)
    return sum(profile.layers[source].output_bytes for source in crossing)


def ring_s(num_bytes: float, num_replicas: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """A ring all-reduce: 2 (n − 1) / n of the bytes over the slowest link, in 2 (n − 1) rounds.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, eq. 3.
    """
    if num_replicas < 2:
        return 0.0
    rounds = 2 * (num_replicas - 1)
    return rounds / num_replicas * num_bytes / bytes_per_s + rounds * latency_s
