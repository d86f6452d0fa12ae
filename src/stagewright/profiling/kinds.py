"""Kinds of device: small files of peak rates, memory rate and efficiencies, one file a kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from stagewright.cluster import Cluster, Device, plain_kind
from stagewright.errors import ClusterError, StagewrightError
from stagewright.profile import LayerProfile, Precision, Profile
from stagewright.schema import Saved, schema

WorkKind = Literal["conv", "matmul", "memory"]
"""What an operator is limited by: convolution, matrix product, or moving bytes."""
_NOT_IN_NAMES = ("nvidia", "tesla", "geforce", "graphics", "quadro")


@schema(error=ClusterError)
class DeviceKind(Saved):
    """What one kind of device can do: peaks from its data sheet, efficiencies from measurements."""

    FORMAT: ClassVar[str] = "stagewright.device"
    ERROR: ClassVar[type[StagewrightError]] = ClusterError

    name: str
    names: tuple[str, ...] = ()
    """How drivers call it, in lower case; the first file with a name in the driver's name is meant."""
    memory_bytes: int = Field(gt=0)
    framework_bytes: int = Field(default=0, ge=0)
    library_bytes: int = Field(default=0, ge=0)
    kept_share: float = Field(default=0.0, ge=0)
    peak_flops: Mapping[Precision, float]
    """Operations a second by the data sheet."""
    memory_bytes_per_s: float = Field(gt=0)
    efficiency: Mapping[str, float]
    """`conv`, `matmul`, `memory`, or one precision of them such as `conv.fp16`: the share of the peak that is
    reached. Above 1 where an algorithm saves operations that FLOPs count: Winograd convolutions do."""
    fused: tuple[Precision, ...] = ()
    """Precisions in which operators on single elements (addition, activation) run inside the operator beside them."""
    launch_s: float = Field(default=0.0, ge=0)
    """What an operator costs beside its work."""
    step_overhead_s: float = Field(default=0.0, ge=0)
    notes: tuple[str, ...] = ()
    """What the figures were taken or fitted from."""

    def __post_init__(self) -> None:
        for key, value in (*self.peak_flops.items(), *self.efficiency.items()):
            if value <= 0:
                raise ClusterError(f"device kind {self.name}: key {key} is {value}: expected more than zero")
        if "fp32" not in self.peak_flops:
            raise ClusterError(f"device kind {self.name}: key peak_flops.fp32 is missing")
        for work in ("conv", "matmul", "memory"):
            if work not in self.efficiency:
                raise ClusterError(f"device kind {self.name}: key efficiency.{work} is missing")

    def rate(self, work: WorkKind, precision: Precision) -> float:
        """Operations, or bytes, a second that this kind of work reaches."""
        share = self.efficiency.get(f"{work}.{precision}", self.efficiency[work])
        return share * (self.memory_bytes_per_s if work == "memory" else self.peak(precision))

    def peak(self, precision: Precision) -> float:
        """The peak in a precision; one that the file leaves out runs as fp32 does."""
        return self.peak_flops.get(precision, self.peak_flops["fp32"])

    def device(self) -> Device:
        """One such device."""
        return Device(
            kind=self.name, memory_bytes=self.memory_bytes, framework_bytes=self.framework_bytes,
            library_bytes=self.library_bytes, kept_share=self.kept_share, step_overhead_s=self.step_overhead_s,
        )  # fmt: skip


def relative_speed(kind: DeviceKind, reference: DeviceKind) -> float:
    """How many times as fast as the reference: the geometric mean over convolutions, matrix products and memory."""
    works: tuple[WorkKind, ...] = ("conv", "matmul", "memory")
    product = math.prod(kind.rate(work, "fp32") / reference.rate(work, "fp32") for work in works)
    return float(round(product ** (1 / len(works)), 4))


def with_kinds_of(profile: Profile, cluster: Cluster) -> Profile:
    """The profile with those of the cluster's other kinds of device, worked out from data sheets where they are known.

    Each layer's seconds change as what limits it does: convolutions, matrix products, or memory.
    """
    known = {plain_kind(kind): each for kind, each in profile.by_kind.items()}
    unknown = [kind for kind in cluster.kinds if kind not in known and kind in DeviceKind.ready_made()]
    speeds = {plain_kind(device.kind): device.speed for host in cluster.hosts for device in host.devices}
    measured = [find_kind(kind) for kind in known if kind in DeviceKind.ready_made()]
    if not measured or not {*known} & {*cluster.kinds}:  # a profile is not taken to other kinds alone
        return profile
    made = list[Profile]()
    for kind in (find_kind(each) for each in unknown if speeds[each] == 1.0):
        nearest = min(measured, key=lambda each: abs(math.log(relative_speed(each, kind))))
        made.append(_worked_out(known[nearest.name], nearest, kind))
    return Profile.of_kinds([profile, *made]) if made else profile


def _worked_out(profile: Profile, measured: DeviceKind, kind: DeviceKind) -> Profile:
    works: dict[str, WorkKind] = {"conv": "conv", "matmul": "matmul"}

    def slower(work: WorkKind) -> float:
        return measured.rate(work, profile.precision) / kind.rate(work, profile.precision)

    def scaled(layer: LayerProfile) -> LayerProfile:
        factor = slower(works.get(layer.kind, "memory"))
        return layer.with_times({key: tuple(each * factor for each in times) for key, times in layer.timed.items()})

    note = f"{kind.name}: worked out from the profile of {measured.name} by their data sheets, not measured"
    return replace(
        profile, device=kind.name, source="analytic", layers=tuple(map(scaled, profile.layers)), others=(), model_s=(),
        optimizer_s=profile.optimizer_s * slower("memory"), notes=(*profile.notes, note),
    )  # fmt: skip


def find_kind(name_or_file: str) -> DeviceKind:
    """The kind in a file, or the one of that name that comes with the package."""
    name = plain_kind(name_or_file)
    return DeviceKind.find(name if name in DeviceKind.ready_made() else name_or_file)


def kind_called(driver_name: str) -> DeviceKind | None:
    """The kind that a driver calls by this name, such as `Tesla V100-SXM2-16GB`."""
    lowered = driver_name.lower()
    kinds = (find_kind(name) for name in DeviceKind.ready_made())
    return next((kind for kind in kinds if any(part in lowered for part in kind.names)), None)


def plain_name(driver_name: str) -> str:
    """The kind that a driver calls by this name, or a word of its own: `rtx-4090` for `NVIDIA GeForce RTX 4090`."""
    kind = kind_called(driver_name)
    if kind is not None:
        return kind.name
    words = driver_name.lower().replace("_", " ").split()
    return "-".join(word for word in words if word not in _NOT_IN_NAMES) or "gpu"
