"""Profile × cluster → seconds: with `memory`, for bytes, and `network`, for links and cores, the only formulas here.

The planner's bounds, the simulator's durations and the reports' limits all come from here. docs/cost-model.md
explains each of them. `Costs` answers for any run of layers from sums that are made once:

    costs = Costs(profile, cluster)
    costs.seconds(0, 7, rows=32).forward      layers 0 … 6 on 32 rows
    costs.reduce_s(1 << 20, devices)          an all-reduce among devices, alone on the wires
    costs.stage_bytes(0, 7, rows=32, …)       what a replica of that stage holds, kind by kind: see `memory`
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from stagewright.cluster import Cluster, Device, DeviceId, plain_kind
from stagewright.errors import ProfileError
from stagewright.memory import Memory, sums
from stagewright.network import Network
from stagewright.plan import Policy, Route
from stagewright.policy import RULES
from stagewright.profile import LayerProfile, Profile
from stagewright.system import OWN, System

KEPT_SHARE = 0.5
"""Of a linear layer's weights, what the rows that it keeps for later weight gradients may take beside them."""

_Each = TypeVar("_Each")


# ── layers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _interpolate(sizes: Sequence[int], seconds: Sequence[float], rows: float) -> float:
    """Seconds at `rows`: on the lines between the measured sizes, and on the outermost lines beyond them.

    Below the smallest size it is no less than in proportion to rows: where large sizes fall out of a cache, the line
    would meet zero before the rows do. Beyond the largest it is no less than there: a library that turns to a faster
    way for many rows makes the last line fall. One measured size alone means proportion.
    """
    if rows <= 0:
        return 0.0
    if len(sizes) == 1:
        return seconds[0] * rows / sizes[0]
    upper = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
    low, high = sizes[upper - 1], sizes[upper]
    slope = (seconds[upper] - seconds[upper - 1]) / (high - low)
    least = seconds[0] * rows / sizes[0] if rows < sizes[0] else seconds[-1] if rows > sizes[-1] else 0.0
    return max(seconds[upper - 1] + slope * (rows - low), least)


def layer_seconds(profile: Profile, rows: float) -> tuple[float, ...]:
    """Forward and backward of each layer on `rows` rows."""
    pairs = (
        (_interpolate(profile.batch_sizes, each, rows) for each in (one.forward_s, one.backward_s))
        for one in profile.layers
    )
    return tuple(map(sum, pairs))


def _weight_s(profile: Profile, layer: LayerProfile, rows: float) -> float:
    """The part of a layer's backward that only its weights' gradients need: as measured, or its share."""
    whole = _interpolate(profile.batch_sizes, layer.backward_s, rows)
    if not layer.weight_s:
        return whole * layer.weight_share
    return min(_interpolate(profile.batch_sizes, layer.weight_s, rows), whole)


class Handled(NamedTuple):
    """How many microbatches of a batch one replica of a stage handles, and how it makes their weight gradients."""

    microbatches: int = 1
    folds: bool = True
    """Whether linear layers may make those of several at once. A backward in halves asks for the weights' half of each
    microbatch, so that nothing folds."""

    def keeps(self, layer: LayerProfile, rows: float) -> bool:
        """Whether a layer keeps the rows of all microbatches of a batch until the last of them."""
        if not self.folds or self.microbatches < 2 or layer.kind != "matmul":
            return False
        return _num_folded(layer, rows, self.microbatches) == self.microbatches


_ONE = Handled()


def handled_by_each(policy: Policy, route: Route, num_microbatches: int, num_replicas: int) -> Handled:
    """What a replica of a stage handles: all microbatches of a batch, or those that come round to it."""
    count = -(-num_microbatches // num_replicas) if route == "rotate" else num_microbatches
    return Handled(count, not RULES[policy].halves)


def _num_folded(layer: LayerProfile, rows: float, num_microbatches: int) -> int:
    """Of how many microbatches a layer makes the weight gradients at once.

    It keeps their rows while these take no more than KEPT_SHARE of its weights.
    """
    kept = rows * (layer.saved_bytes + layer.output_bytes)
    return max(1, min(num_microbatches, int(KEPT_SHARE * layer.parameter_bytes / kept))) if kept else 1


class _Seconds(NamedTuple, Generic[_Each]):
    """What a microbatch takes: in some layers, or in the layers before each cut."""

    forward: _Each
    backward: _Each
    """With forward once more before it where the stage recomputes."""
    weight: _Each
    """The part of backward that only the weights' gradients need (action W; I is the rest)."""
    kept: _Each
    """The part of that for which layers keep rows until a batch's last backward is over; its gradients leave first."""


class Costs(Memory):
    """Seconds and bytes of any run of layers `first … last − 1`; `speed` is that of the device (`Device.speed`).

    They are those of the profile's own kind of device: `on(device)` has those of another kind that was profiled too.
    """

    def __init__(self, profile: Profile, cluster: Cluster, system: System = OWN) -> None:
        profile = _of_these_kinds(profile, cluster)
        super().__init__(profile)
        speeds = {other.device: _whole_s(profile, profile) / _whole_s(other, profile) for other in profile.others}
        self.cluster = _at_speeds(cluster, speeds) if speeds else cluster
        self.system, self.network = system, Network(self.cluster, system.all_reduce)
        self.in_common = bool(cluster.sum_core_s_per_byte)
        self.own_speed = 1.0
        """`Device.speed` of the kind that the seconds are of."""
        self._forget()
        self._kinds: dict[str, Costs] = {}
        for other in profile.others:
            made = self._kinds[plain_kind(other.device)] = copy(self)
            Memory.__init__(made, other)
            made._forget()
            made.own_speed = speeds[other.device]

    def _forget(self) -> None:
        self._rows: dict[tuple[float, Handled], _Seconds[tuple[float, ...]]] = {}
        self._buckets: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def on(self, device: Device) -> Costs:
        """The costs on this kind of device."""
        return self._kinds.get(plain_kind(device.kind), self) if self._kinds else self

    def stage_speed(self, device: Device, first: int, last: int) -> float:
        """How fast a device runs some layers, against the kind that the profile is of."""
        own, rows = self.on(device), float(self.profile.batch_sizes[-1])
        if own is self:
            return device.speed
        here, there = (costs.seconds(first, last, rows, costs.own_speed) for costs in (self, own))
        taken_s = there.forward + there.backward
        return (here.forward + here.backward) / taken_s if taken_s else device.speed

    # seconds

    def speed(self, id: DeviceId, computing: Sequence[DeviceId]) -> float:
        """A device's speed while some compute; only cores that hosts share make that differ."""
        return self.cluster.device(id).speed * self.network.cores.crowded(id, computing)

    def row_sums(self, rows: float, handled: Handled = _ONE) -> _Seconds[tuple[float, ...]]:
        """Sums of all layers' seconds at this number of rows, made at the first call."""
        key = (rows, handled)
        found = self._rows.get(key)
        if found is None:
            handled = handled._replace(folds=handled.folds and self.system.folds)
            sizes, layers = self.profile.batch_sizes, self.profile.layers
            forward = [_interpolate(sizes, layer.forward_s, rows) for layer in layers]
            backward, weight = zip(*(self._backward_halves(layer, rows, handled) for layer in layers))
            kept = [own if handled.keeps(layer, rows) else 0.0 for layer, own in zip(layers, weight)]
            found = self._rows[key] = _Seconds(sums(forward), sums(backward), sums(weight), sums(kept))
        return found

    def _backward_halves(self, layer: LayerProfile, rows: float, handled: Handled) -> tuple[float, float]:
        """A layer's backward, and what of it only the weights' gradients need; of a microbatch, on average.

        All but a batch's first microbatch add their weight gradients to those before: three passes over memory, where
        an SGD-with-momentum step has five. A layer that folds does that inside its product, which writes them anyway.
        """
        whole = _interpolate(self.profile.batch_sizes, layer.backward_s, rows)
        apart = _weight_s(self.profile, layer, rows)
        if handled.folds and layer.kind == "matmul":
            count = _num_folded(layer, rows, handled.microbatches)
            together = _weight_s(self.profile, layer, rows * count) / count
            return whole - apart + together, together
        adding = self._step_s(layer.gradient_bytes) * self.system.adding_passes / 5
        adding *= (handled.microbatches - 1) / handled.microbatches
        return whole + adding, apart + adding

    def _step_s(self, num_bytes: float) -> float:
        return self.profile.optimizer_s * num_bytes / self._trained[-1] if self._trained[-1] else 0.0

    def seconds(
        self,
        first: int,
        last: int,
        rows: float,
        speed: float = 1.0,
        *,
        recompute: bool = False,
        handled: Handled = _ONE,
    ) -> _Seconds[float]:
        """What a microbatch of so many rows takes in some layers."""
        sums = self.row_sums(rows, handled)
        forward, backward, weight, kept = [(before[last] - before[first]) / (speed / self.own_speed) for before in sums]
        if recompute:
            backward += forward
        # In the first stage all of backward is for the weights: nobody asks for gradients of the model's inputs.
        return _Seconds(forward, backward, weight if first else backward, kept)

    def optimizer_s(
        self, first: int, last: int, speed: float = 1.0, *, versions: int = 1, sharers: int = 1, buckets: int = 1
    ) -> float:
        """The optimizer step of some layers: their parameters' share of the whole one, cut among those who share it.

        Where the optimizer overlaps reductions, that of the last of the buckets.

        With several versions the new one begins as a copy of the newest: two passes over memory, against the five of an
        SGD-with-momentum step.
        """
        copying = 1.0 if versions == 1 else 1.0 + self.system.copying_passes / 5
        left = buckets if self.system.optimizer_overlaps else 1
        return self._step_s(self.gradient_bytes(first, last)) * copying / (speed / self.own_speed) / sharers / left

    def num_buckets(self, first: int, last: int, wanted: int | None = None) -> int:
        """In how many pieces the gradients of some layers are reduced: as the system does, or as a plan wants it."""
        size, most = self.gradient_bytes(first, last), self.system.bucket_bytes
        if most is None:
            return wanted or num_buckets(size)
        return max(math.ceil(size / most), 1) if most else 1

    def ready_shares(self, first: int, last: int, rows: float, num_buckets: int) -> tuple[float, ...]:
        """For each bucket the share of backward after which its gradients are complete.

        Buckets are equal in bytes and go from the last layer to the first, as backward does:

            layers    conv1 conv2 │ fc1        backward runs from right to left
            buckets   └──── 1 ────┴─┘└── 0 ──┘  bucket 1 waits for conv1, bucket 0 for fc1
        """
        sums = self.row_sums(rows).backward
        total_s, end_s = sums[last] - sums[first], sums[last]
        if not self.gradient_bytes(first, last) or total_s <= 0:
            return (1.0,) * num_buckets
        return tuple([(end_s - sums[low]) / total_s for low in self._bucket_layers(first, last, num_buckets)])

    def _bucket_layers(self, first: int, last: int, num_buckets: int) -> tuple[int, ...]:
        """For each bucket the layer in which its last byte lies: its parameters begin at or before it."""
        key = (first, last, num_buckets)
        if key not in self._buckets:
            size = self.gradient_bytes(first, last)
            ends = [self._trained[last] - size * (number + 1) / num_buckets for number in range(num_buckets)]
            lows = (min(max(bisect_left(self._trained, end + 1e-6) - 1, first), last - 1) for end in ends)
            self._buckets[key] = tuple(lows)
        return self._buckets[key]

    # links

    def reduce_s(self, num_bytes: float, devices: Sequence[DeviceId], num_buckets: int = 1) -> float:
        """An all-reduce among devices, alone on the wires, in buckets one after the other."""
        way = self.network.collective(devices, num_bytes / num_buckets)
        return 0.0 if way is None else num_buckets * way.seconds(num_bytes / num_buckets)


def _of_these_kinds(profile: Profile, cluster: Cluster) -> Profile:
    """The profile, first the one of a kind that the cluster has; refused where it has none of the cluster's kinds.

    Devices of other kinds beside the profile's own may be there where the cluster says how fast they are against it.
    """
    kinds, known = cluster.kinds, {plain_kind(kind): each for kind, each in profile.by_kind.items()}
    said = f"the profile of {profile.model} is of {' and '.join(known)} devices, but the cluster {cluster.name} has "
    here = [each for kind, each in known.items() if kind in kinds]
    if not here:
        raise ProfileError(
            said + ", ".join(kinds),
            f"give a --cluster of {next(iter(known))}, profile {profile.model} with --device {kinds[0]}, "
            f"or say that it holds there all the same: --assume-kind {kinds[0]}",
        )
    devices = {device for host in cluster.hosts for device in host.devices}
    unsaid = {plain_kind(device.kind) for device in devices if device.speed == 1.0} - {*known}
    if unsaid:
        against = next(iter(known))
        todo = f"profile it there too, or say in the cluster file how fast these are against {against}: key speed"
        raise ProfileError(f"{said}{', '.join(sorted(unsaid))} too", todo)
    return Profile.of_kinds([replace(each, others=()) for each in here]) if profile.others else profile


def _whole_s(profile: Profile, main: Profile) -> float:
    """Forward and backward of the whole model, on as many rows as the main profile was measured with at most."""
    return sum(layer_seconds(profile, main.batch_sizes[-1])) or 1.0


def _at_speeds(cluster: Cluster, speeds: Mapping[str, float]) -> Cluster:
    """The cluster whose devices of these kinds have these speeds."""
    found = {plain_kind(kind): speed for kind, speed in speeds.items()}
    hosts = [
        replace(host, devices=tuple(replace(d, speed=found.get(plain_kind(d.kind), d.speed)) for d in host.devices))
        for host in cluster.hosts
    ]
    return replace(cluster, hosts=tuple(hosts))


def num_buckets(gradient_bytes: int, most_bytes: int = 16 << 20) -> int:
    """How many buckets a stage's gradients make: several, so that only a small last one outlasts backward.

    None is larger than `most_bytes`; up to eight, none is smaller than an eighth of that, to be worth a message.
    """
    return max(math.ceil(gradient_bytes / most_bytes), min(8, 8 * gradient_bytes // most_bytes), 1)
