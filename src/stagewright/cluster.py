"""Hardware: devices, links, hosts, clusters, and the placement strings that name devices.

A cluster is a graph. Its nodes are devices (`0:3` is device 3 of host 0) and junctions (`0:switch1`,
`0:cpu0`, `0:nic`, `net`); its edges are links. A transfer takes the path with the fewest links that passes
through no other device, and shares every link on it with the transfers that use it in the same direction:

    0:0 ─┐                      ┌─ 1:0
    0:1 ─┴─ 0:switch0 ─ 0:nic ─ net ─ 1:nic ─ 1:switch0
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import BeforeValidator, Field, PlainSerializer

from stagewright.errors import ClusterError, PlacementError, StagewrightError
from stagewright.schema import Saved, schema, twin


class DeviceId(NamedTuple):
    """One device, written `host:device`."""

    host: int
    device: int

    def __str__(self) -> str:
        return f"{self.host}:{self.device}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The device that `host:device` names."""
        match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text, re.ASCII)
        if match is None:
            raise PlacementError(f"device {text!r}: expected host:device, such as 0:3")
        return cls(int(match[1]), int(match[2]))


@schema(error=ClusterError)
class Device:
    """One accelerator, or one CPU worker."""

    kind: str
    memory_bytes: int = Field(gt=0)
    speed: float = Field(default=1.0, gt=0)
    """How fast it computes, against the device that the profile was made on."""
    framework_bytes: int = Field(default=0, ge=0)
    """What the framework itself occupies: context and libraries."""
    library_bytes: int = Field(default=0, ge=0)
    """What libraries have of the framework's allocator: the workspace of matrix products."""
    kept_share: float = Field(default=0.0, ge=0)
    """What the allocator keeps beside what comes and goes, as a share of that: pieces that fit nothing."""
    step_overhead_s: float = Field(default=0.0, ge=0)
    """What every optimizer step costs beside its actions."""
    saved_factor: float = Field(default=1.0, gt=0)
    """What the framework really keeps for backward, against what the layers need: 2 where it keeps the input of every
    activation function beside its output."""
    cores: float = Field(default=1.0, gt=0)
    """How many CPU cores it keeps busy while it computes; matters where hosts share cores."""
    sets_aside: bool = False
    """Whether the framework takes memory as it starts, for every batch that versions allow to be under way, instead of
    when it is used."""
    price_per_h: float | None = Field(default=None, ge=0)
    """What an hour of it costs, in whatever money; None where nobody asks."""


@schema(error=ClusterError)
class Link:
    """A wire between two nodes, with its rate from the first to the second, and back unless said otherwise."""

    ends: tuple[str, str]
    kind: str
    bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(default=0.0, ge=0)
    back_bytes_per_s: float | None = Field(default=None, gt=0)
    """Its rate from the second end to the first, where that differs."""

    def __post_init__(self) -> None:
        if self.ends[0] == self.ends[1]:
            raise ClusterError(f"link {self.ends[0]} – {self.ends[1]} joins a node with itself")


@schema(error=ClusterError)
class Host:
    """Devices in one box; `links` names its own nodes: `0`, `1` … for devices, words for junctions."""

    devices: tuple[Device, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    address: str = ""
    decode_images_per_s: float | None = Field(default=None, gt=0)
    """How many JPEG images a second its CPUs decode; unknown means that decoding never limits."""
    cpu_share: float | None = Field(default=None, gt=0)
    """How many CPU cores a rehearsal gives this host; without it the host takes what the others leave."""


@schema(error=ClusterError)
class Cluster(Saved):
    """Hosts and the links between them."""

    FORMAT: ClassVar[str] = "stagewright.cluster"
    VERSION: ClassVar[int] = 2
    DROPPED: ClassVar[frozenset[str]] = frozenset(
        {"core_loss", "crowding", "connection_bytes_per_s", "machine_bytes_per_s"}
    )
    ERROR: ClassVar[type[StagewrightError]] = ClusterError

    name: str
    hosts: tuple[Host, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    """Links between hosts; their ends are `host:junction`, or a word for what belongs to no host."""
    cores: float | None = Field(default=None, gt=0)
    """How many CPU cores all devices share, on one machine or on hosts that it emulates; None: each has its own."""
    core_s_per_byte: float = Field(default=0.0, ge=0)
    """What a core spends on a byte at each end of a transfer; matters where cores are shared."""
    sum_core_s_per_byte: float = Field(default=0.0, ge=0)
    """What a core spends on a byte of gradients for each replica, where replicas of one host add them up in memory that
    they have in common; 0: they do so over wires."""
    notes: tuple[str, ...] = ()
    """Where the figures come from: one sentence a fact."""

    def __post_init__(self) -> None:
        for number, host in enumerate(self.hosts):
            for link in host.links:
                for end in link.ends:
                    _check_end(end, host, number)
        for link in self.links:
            for end in link.ends:
                _check_wide_end(end, self.hosts)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its devices, each once."""
        return tuple(dict.fromkeys(plain_kind(device.kind) for host in self.hosts for device in host.devices))

    @cached_property
    def device_ids(self) -> tuple[DeviceId, ...]:
        """Every device, host by host."""
        return tuple(DeviceId(host, index) for host, box in enumerate(self.hosts) for index in range(len(box.devices)))

    def device(self, id: DeviceId) -> Device:
        """The device with this id."""
        todo = "change the placement, or give another cluster file with --cluster"
        if id.host >= len(self.hosts):
            wrong = f"{id} names host {id.host}, but {self.name} has {count(len(self.hosts), 'host')}"
            raise PlacementError(wrong, todo)
        devices = self.hosts[id.host].devices
        if id.device >= len(devices):
            wrong = f"{id} names device {id.device} of host {id.host}, which has {_numbers(len(devices))}"
            raise PlacementError(wrong, todo)
        return devices[id.device]

    @cached_property
    def wires(self) -> tuple[Link, ...]:
        """All links, their ends written as nodes of the whole cluster."""
        inner = (
            replace(link, ends=(f"{number}:{link.ends[0]}", f"{number}:{link.ends[1]}"))
            for number, host in enumerate(self.hosts)
            for link in host.links
        )
        return (*inner, *self.links)

    @cached_property
    def _neighbours(self) -> Mapping[str, tuple[dict[str, int], dict[str, int]]]:
        """For each node the wires to the devices beside it, and those to junctions; of several wires the first."""
        devices = frozenset(map(str, self.device_ids))
        table: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
        for wire, link in enumerate(self.wires):
            for here, there in (link.ends, link.ends[::-1]):
                table.setdefault(here, ({}, {}))[there not in devices].setdefault(there, wire)
        return table

    @cached_property
    def _trees(self) -> dict[str, Mapping[str, tuple[str, int]]]:
        return {}

    def path(self, source: DeviceId, target: DeviceId) -> tuple[tuple[int, bool], ...]:
        """The links from one device to another, as (index in `wires`, whether along its `ends`)."""
        if source == target:
            return ()
        here, there = str(source), str(target)
        if here not in self._trees:
            self._trees[here] = self._tree(here)
        came = self._trees[here]
        node = next((node for node in came if there in self._neighbours[node][0]), None)
        if node is None:
            raise ClusterError(
                f"no link leads from {here} to {there} in {self.name}", "add the missing link to the cluster file"
            )
        wire = self._neighbours[node][0][there]
        back = [(wire, self.wires[wire].ends[0] == node)]
        while node != here:
            node, wire = came[node]
            back.append((wire, self.wires[wire].ends[0] == node))
        return tuple(reversed(back))

    def _tree(self, source: str) -> Mapping[str, tuple[str, int]]:
        """All junctions that a device reaches, the nearest first, with the node and the wire before each."""
        came: dict[str, tuple[str, int]] = {source: ("", -1)} if source in self._neighbours else {}
        queue = deque(came)
        while queue:
            node = queue.popleft()
            # Nothing goes through a device, and most nodes are devices: they are not even looked at.
            for other, wire in self._neighbours[node][1].items():
                if other not in came:
                    came[other] = (node, wire)
                    queue.append(other)
        return came


def _check_end(end: str, host: Host, number: int) -> None:
    """Refuses a link end inside a host that is neither a device of it nor a junction's name."""
    if end.isdecimal() and int(end) >= len(host.devices):
        raise ClusterError(f"a link of host {number} ends at device {end}; the host has {_numbers(len(host.devices))}")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", end):
        raise ClusterError(f"a link of host {number} ends at {end!r}: expected a device number or a word")


def _check_wide_end(end: str, hosts: Sequence[Host]) -> None:
    """Refuses an end of a link between hosts that names no host or device there is."""
    match = re.fullmatch(r"(?:(\d{1,6}):)?([A-Za-z0-9_.-]+)", end, re.ASCII)
    if match is None:
        raise ClusterError(f"a link between hosts ends at {end!r}: expected host:junction or a word")
    if match[1] is None:
        return
    if int(match[1]) >= len(hosts):
        raise ClusterError(f"a link ends at {end}, but there are {count(len(hosts), 'host')}")
    _check_end(match[2], hosts[int(match[1])], int(match[1]))


def plain_kind(text: str) -> str:
    """A kind of device as files spell it: `TITAN V` and `titan_v` are `titan-v`."""
    return "-".join(re.split(r"[\s_-]+", text.strip().lower()))


def count(number: int, word: str, plural: str = "") -> str:
    """`1 host`, `2 hosts`, `2 microbatches`."""
    return f"{number:,} {word if number == 1 else plural or word + 's'}"


def _numbers(length: int) -> str:
    """`devices 0 to 7`, or `device 0`."""
    return "device 0" if length == 1 else f"devices 0 to {length - 1}"


def parse_devices(text: str) -> tuple[DeviceId, ...]:
    """The devices of one stage: `0:0-6,1:2`."""
    found: list[DeviceId] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6}):(\d{1,6})(?:-(\d{1,6}))?", part, re.ASCII)
        if match is None:
            raise PlacementError(
                f"placement part {part!r}: expected host:device or host:first-last",
                "write stages as 0:0-6.0:7, their parts separated by commas",
            )
        first, last = int(match[2]), int(match[3] or match[2])
        if last < first:
            raise PlacementError(f"placement part {part!r} counts down: write {match[1]}:{last}-{first}")
        if len(found) + last - first >= 65_536:
            raise PlacementError(f"placement part {part!r} makes more than 65,536 devices of one stage")
        found += (DeviceId(int(match[1]), index) for index in range(first, last + 1))
    if len(set(found)) < len(found):
        raise PlacementError(f"placement {text!r} names {twin(found)} twice in one stage: name each device once")
    return tuple(found)


def format_devices(devices: Sequence[DeviceId]) -> str:
    """The devices of one stage as `parse_devices` reads them, runs drawn together."""
    parts: list[str] = []
    start = 0
    for stop in range(1, len(devices) + 1):
        last = devices[stop - 1]
        if stop < len(devices) and devices[stop] == DeviceId(last.host, last.device + 1):
            continue
        first = devices[start]
        parts.append(str(first) if first == last else f"{first}-{last.device}")
        start = stop
    return ",".join(parts)


def parse_placement(text: str, cluster: Cluster | None = None) -> tuple[tuple[DeviceId, ...], ...]:
    """Stage by stage the devices that `0:0-6.0:7` names; empty is one stage on every device of the cluster."""
    if not text.strip():
        if cluster is None:
            raise PlacementError(
                "an empty placement means every device, but no cluster was given", "add --cluster FILE"
            )
        return (cluster.device_ids,)
    stages = tuple(parse_devices(part) for part in text.strip().split("."))
    if cluster is None:
        return stages
    try:
        for id in {id for stage in stages for id in stage}:
            cluster.device(id)
    except PlacementError as fault:
        raise PlacementError(f"placement {text!r}: {fault.what}", fault.todo) from None
    return stages


def format_placement(stages: Sequence[Sequence[DeviceId]]) -> str:
    """The placement as `parse_placement` reads it."""
    return ".".join(format_devices(devices) for devices in stages)


def parse_ratio(text: str) -> tuple[float, ...]:
    """The shares that `11:7` names."""
    shares: list[float] = []
    for part in text.split(":"):
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", part, re.ASCII) or float(part) == 0:
            raise PlacementError(f"ratio {text!r}: expected positive numbers separated by colons, such as 11:7")
        shares.append(float(part))
    return tuple(shares)


def _devices_from_text(value: object) -> object:
    return parse_devices(value) if isinstance(value, str) else value


Devices = Annotated[
    tuple[DeviceId, ...], BeforeValidator(_devices_from_text), PlainSerializer(format_devices, return_type=str)
]
"""Devices of a stage, written in files as `0:0-6`."""


def make_cluster(
    num_devices: int,
    *,
    name: str = "local",
    device: Device | None = None,
    bytes_per_s: float = 1e10,
    latency_s: float = 0.0,
) -> Cluster:
    """One host whose devices meet at one junction: the simplest cluster there is."""
    device = device or Device(kind="cpu", memory_bytes=4 << 30)
    links = (
        Link(ends=(str(index), "hub"), kind="local", bytes_per_s=bytes_per_s, latency_s=latency_s / 2)
        for index in range(num_devices)
    )
    return Cluster(name=name, hosts=(Host(devices=(device,) * num_devices, links=tuple(links)),))


def find_cluster(name_or_file: str) -> Cluster:
    """The cluster in a file, or the ready-made one of that name."""
    return Cluster.find(name_or_file)
