"""Profile → bytes: what a replica of any run of layers holds, by kind. The planner, the simulator, the check before a
launch and the reports all ask here; docs/cost-model.md explains each formula.

A replica is fullest in one of three moments, with P bytes of trained parameters:

    in a backward    what microbatches wait with, and of its own what layers 0 … u still have, the gradients that layers
                     u … n have made by then, and what layer u takes for itself: at the layer u where that is most
    in an update     gradients, states and what the optimizer takes for itself
    in the first     gradients of the whole batch beside a backward run once more (the self-check), before there are
    batch            states; on a card every stage has run once more before it, adding to its gradients
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from stagewright.cluster import Device
from stagewright.plan import Plan
from stagewright.policy import holds
from stagewright.profile import LayerProfile, Profile

_Number = TypeVar("_Number", int, float)


class StageBytes(NamedTuple):
    """What one replica of a stage holds, by the kinds of `record.MEMORY_KINDS`."""

    weights: int
    versions: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    workspace: int
    framework: int
    allocator: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class _BackwardPeak(NamedTuple):
    """Where a backward takes most: what is still saved of its microbatch by then, what gradients it has made, and what
    it takes beside."""

    saved: float
    gradients: int
    workspace: float


def crossings(profile: Profile) -> tuple[float, ...]:
    """Bytes a row of what is made before each cut and read after it, from 0 (the model's input) to the end (none)."""
    number_of = {name: number for number, name in enumerate(profile.names)}
    last_reader = [0] * len(profile.layers)
    for number, layer in enumerate(profile.layers):
        for source in (number - 1,) if layer.inputs is None else (number_of[name] for name in layer.inputs):
            if source >= 0:
                last_reader[source] = number
    change = [0.0] * (len(profile.layers) + 2)
    for number, layer in enumerate(profile.layers):
        if last_reader[number] > number:
            change[number + 1] += layer.output_bytes
            change[last_reader[number] + 1] -= layer.output_bytes
    running = list(accumulate(change))[1 : len(profile.layers)]
    return (profile.input_bytes, *running, 0.0)


class Memory:
    """Bytes of any run of layers `first … last − 1`."""

    in_common = False
    """Whether replicas add gradients up in memory that they have in common."""

    def __init__(self, profile: Profile) -> None:
        self.profile, self.crossings = profile, crossings(profile)
        layers = profile.layers
        self._parameters = sums([layer.parameter_bytes + layer.buffer_bytes + layer.cast_bytes for layer in layers])
        self._casts = sums([layer.cast_bytes for layer in layers])
        self._trained = sums([layer.gradient_bytes for layer in layers])
        states = (layer.gradient_bytes if layer.state_bytes is None else layer.state_bytes for layer in layers)
        self._states = sums([*states])
        self._saved = sums([layer.saved_bytes for layer in layers])
        before = (layer.before_bytes for layer in layers)
        self._left = [0.0 if b is None else max(all_ - b, 0.0) for b, all_ in zip(before, self.crossings)] + [0.0]
        """Bytes a row of what crosses each cut that no layer before it has saved."""
        self._entered = [layer.before_bytes or 0.0 for layer in layers]
        self._peaks: dict[tuple[float, bool, bool], list[float]] = {}

    def parameter_bytes(self, first: int, last: int) -> tuple[int, int, int]:
        """Bytes of the parameters of some layers, of those that are trained, and of their states."""
        weights = sum(layer.parameter_bytes for layer in self.profile.layers[first:last])
        return weights, self.gradient_bytes(first, last), self._states[last] - self._states[first]

    def gradient_bytes(self, first: int, last: int) -> int:
        """Bytes of the parameters that are trained, which are also those of their gradients."""
        return self._trained[last] - self._trained[first]

    def held_bytes(
        self, first: int, last: int, held: int, recompute: bool = False, device: Device | None = None
    ) -> float:
        """Bytes a row of `held` microbatches' activations: what forward leaves behind, what entered and what leaves.

        With recompute what entered and what leaves is held, and one microbatch in full.
        """
        factor = device.saved_factor if device is not None else 1.0
        whole = (self._saved[last] - self._saved[first]) * factor + self._entered[first] + self._left[last]
        if recompute and held:
            return whole - self._entered[first] + held * (self.crossings[first] + self.crossings[last])
        return held * whole

    def saved_bytes(self, first: int, last: int) -> float:
        """Bytes a row that forward saves for backward."""
        return self._saved[last] - self._saved[first]

    def backward_peak(self, first: int, last: int, rows: float, *, adds: bool, many: bool) -> _BackwardPeak:
        """The fullest moment of a microbatch's backward, `adds` where gradients of others are there, `many` where they
        go to buckets that are set aside."""
        key = (rows, adds, many)
        if key not in self._peaks:
            self._peaks[key] = [self._at(number, rows, adds=adds, many=many) for number in range(len(self._entered))]
        here = self._peaks[key][first:last]
        layer = first + here.index(max(here))
        return _BackwardPeak(
            saved=rows * (self._saved[layer + 1] - self._saved[first]),
            gradients=self._made(layer, first, last, adds=adds, many=many),
            workspace=self._workspace(self.profile.layers[layer], rows, adds=adds),
        )

    def _at(self, number: int, rows: float, *, adds: bool, many: bool) -> float:
        """What a layer's backward holds, but for what is the same for all layers of a stage."""
        made = 0 if adds or many else self._trained[number]
        return rows * self._saved[number + 1] - made + self._workspace(self.profile.layers[number], rows, adds=adds)

    def _made(self, layer: int, first: int, last: int, *, adds: bool, many: bool) -> int:
        """The gradients that there are while a layer runs backward, buckets left out."""
        if many and not adds:  # a bucket's gradients are copied to it as soon as they are complete
            return max((each.gradient_bytes for each in self.profile.layers[first:last]), default=0)
        return self.gradient_bytes(first if adds else layer, last)

    def _workspace(self, layer: LayerProfile, rows: float, *, adds: bool) -> float:
        """What a layer's backward takes beside; a gradient that is added to another is one more meanwhile.

        Linear layers outside of autocast add inside their product.
        """
        is_inside = layer.kind == "matmul" and not layer.cast_bytes
        return (
            rows * layer.workspace_bytes + layer.scratch_bytes + (layer.gradient_bytes if adds and not is_inside else 0)
        )

    def update_bytes(self, first: int, last: int, replicas: int = 1, *, sharded: bool = False) -> float:
        """What an update takes for itself."""
        share = replicas if sharded else 1
        return self.profile.update_scratch * self.gradient_bytes(first, last) / share

    def stage_bytes(
        self,
        first: int,
        last: int,
        *,
        rows: float,
        held: int = 1,
        versions: int = 1,
        num_replicas: int = 1,
        recompute: bool = False,
        sharded: bool = False,
        microbatches: int = 1,
        device: Device | None = None,
    ) -> StageBytes:
        """The most that one replica of a stage holds, `rows` being those of its largest microbatch share.

        weights      parameters, buffers, and copies in the format that is computed in
        versions     (K − 1) P                          optimizer  what the profile says of the layers, or its share
        gradients    P where `microbatches` of a batch add up, else those that are made by then
        activations  rows · held · saved; with recompute what enters and leaves alone is held, and one microbatch in
                     full; held is at least K on a device that sets memory aside for every batch that may be under way
        buffers      rows · (inputs and outputs, twice each: one on the wire, one at work), of the first stage also what
                     waits of a batch; K P to reduce from, and more where replicas have that in common
        workspace    what the fullest layer takes, or the update
        framework    as the device says                 allocator  what it keeps beside, as the device says
        """
        trained, many = self.gradient_bytes(first, last), num_replicas > 1
        states = self._states[last] - self._states[first]
        held = max(held, versions) if device is not None and device.sets_aside else held
        peak = self.backward_peak(first, last, rows, adds=microbatches > 1, many=many)
        gone = rows * (self._saved[last] - self._saved[first]) - peak.saved
        factor = device.saved_factor if device is not None else 1.0
        activations = rows * self.held_bytes(first, last, held, recompute, device)
        wire = 2 * rows * ((self.crossings[first] if first else 0.0) + self.crossings[last])
        if not first:  # the rows of a batch that wait for their turn
            wire += rows * max(microbatches - held, 0) * self.crossings[0]
        plain = StageBytes(
            weights=self._parameters[last] - self._parameters[first],
            versions=(versions - 1) * (trained + self._casts[last] - self._casts[first]), gradients=peak.gradients,
            optimizer=math.ceil(states / num_replicas) if sharded else states,
            activations=math.ceil(activations - gone * factor if held else 0),
            buffers=math.ceil(wire) + self.bucket_bytes(trained, versions, num_replicas),
            workspace=math.ceil(peak.workspace), framework=device.framework_bytes if device is not None else 0,
        )  # fmt: skip
        waiting = rows * self.held_bytes(first, last, held - 1, recompute, device) if held > 1 and versions > 1 else 0
        update = plain._replace(
            gradients=0 if many else trained, activations=math.ceil(waiting),
            workspace=math.ceil(self.update_bytes(first, last, num_replicas, sharded=sharded)),
        )  # fmt: skip
        again = self.backward_peak(first, last, rows, adds=True, many=many)
        begin = plain._replace(
            optimizer=0, gradients=trained, activations=math.ceil(activations), workspace=math.ceil(again.workspace)
        )  # fmt: skip
        most = max((plain, update, begin), key=sum)
        return most._replace(allocator=self.kept_by_allocator(most, device))

    def bucket_bytes(self, trained: int, versions: int, num_replicas: int) -> int:
        """What gradients are reduced in: a bucket's worth of each version; in common memory the sum and the parts of
        others that a replica adds up as well."""
        if num_replicas < 2:
            return 0
        return math.ceil(versions * trained * ((3 - 1 / num_replicas) if self.in_common else 1))

    def kept_by_allocator(self, held: StageBytes, device: Device | None) -> int:
        """What the allocator of a device keeps beside what it has given out."""
        if device is None:
            return 0
        return device.library_bytes + math.ceil(
            device.kept_share * (held.activations + held.workspace + held.gradients)
        )


def in_words(held: Mapping[str, int]) -> str:
    """`weights 1.2 GiB, activations 3.4 GiB`: the kinds that count, the largest first."""
    kinds, least = sorted(held.items(), key=lambda kind: -kind[1]), sum(held.values()) / 100
    return ", ".join(f"{kind} {size / 2**30:.2f} GiB" for kind, size in kinds if size >= least)


def sums(values: Sequence[_Number]) -> tuple[_Number, ...]:
    """The sum of the values before each, and of all."""
    return tuple(accumulate(values, initial=type(values[0])(0)))


def plan_bytes(memory: Memory, plan: Plan, devices: Sequence[Device | None]) -> list[StageBytes]:
    """What each worker of a plan holds at most, on its device."""
    found: list[list[StageBytes]] = [[] for _ in plan.devices]
    held = holds(plan)
    for number, (stage, members) in enumerate(zip(plan.stages, plan.workers)):
        shares = [share for each in range(plan.num_microbatches) for share in plan.shares(number, each)]
        for replica, worker in enumerate(members):
            rows = [share.stop - share.start for share in shares if share.replica == replica]
            most = min(held[number], len(rows) * stage.versions)
            found[worker].append(memory.stage_bytes(
                plan.edges[number], plan.edges[number + 1], rows=max(rows, default=0), held=most,
                versions=stage.versions, num_replicas=len(members), recompute=stage.recompute,
                sharded=plan.shard_optimizer[number], microbatches=len(rows), device=devices[worker],
            ))  # fmt: skip
    return [_together(each) for each in found]


def _together(stages: Sequence[StageBytes]) -> StageBytes:
    """What a worker with these stages holds: one of them computes at a time, and the framework is there once."""
    whole = StageBytes(*(sum(column) for column in zip(*stages)))
    once = ("workspace", "framework", "allocator")
    return whole._replace(**{kind: max(getattr(each, kind) for each in stages) for kind in once})
