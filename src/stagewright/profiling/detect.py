"""The cluster of the machine itself: its GPUs where a driver shows some, else its CPUs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from stagewright.cluster import Cluster, Device, Host, Link, find_cluster, make_cluster
from stagewright.errors import ClusterError
from stagewright.profiling.kinds import find_kind, kind_called, plain_name, relative_speed
from stagewright.profiling.topology import DECODE_IMAGES_PER_S_A_THREAD, LINK_CLASSES, read_topology

_Asker = Callable[[Sequence[str]], str | None]


def ask(command: Sequence[str]) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def cluster_or_here(name_or_file: str | None) -> Cluster:
    """The cluster of this name or file; where none is given, this machine."""
    return detect_cluster() if name_or_file is None else find_cluster(name_or_file)


def detect_cluster(num_devices: int | None = None, ask: _Asker = ask) -> Cluster:
    """The machine's GPUs and their wires; without GPUs, its CPU cores as `num_devices` workers."""
    listing = ask(("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"))
    if listing is None or not listing.strip():
        return cpu_cluster(num_devices or num_cores())
    devices, topology = read_gpus(listing), ask(("nvidia-smi", "topo", "-m"))
    notes = ("detected by nvidia-smi; rates are defaults by link class until measured",)
    if topology is not None and len(devices) > 1:
        return read_topology([topology], devices, name="local", notes=notes, where="nvidia-smi topo -m")
    rates = LINK_CLASSES["PHB"]._asdict()
    links = (Link(ends=(str(number), "cpu0"), kind="PHB", **rates) for number in range(len(devices)))
    return Cluster(name="local", hosts=(_host(devices, tuple(links)),), notes=notes)


def read_gpus(listing: str) -> tuple[Device, ...]:
    """The devices in the lines `name, MiB` that nvidia-smi prints; speeds stand against the first one's."""
    devices: list[Device] = []
    reference = None
    for number, line in enumerate(listing.strip().splitlines(), 1):
        name, _, memory = line.rpartition(",")
        if not name or not memory.strip().isdecimal():
            raise ClusterError(f"nvidia-smi, line {number}: {line!r}: expected a name and MiB of memory")
        kind = kind_called(name)
        reference = reference or kind
        devices.append(
            Device(
                kind=kind.name if kind else plain_name(name),
                memory_bytes=int(memory) << 20,
                speed=relative_speed(kind, reference) if kind and reference else 1.0,
                framework_bytes=kind.framework_bytes if kind else 600 << 20,  # a CUDA context with its libraries
            )
        )
    return tuple(devices)


def cpu_cluster(num_devices: int, name: str = "local") -> Cluster:
    """One host whose workers are processes on its CPUs; they share its memory evenly."""
    memory = max(1, memory_bytes() // num_devices)
    device = Device(kind="cpu", memory_bytes=memory, framework_bytes=find_kind("cpu").framework_bytes)
    # 2 GB/s and 0.1 ms between two processes over the loopback device, as gloo moves tensors
    made = make_cluster(num_devices, name=name, device=device, bytes_per_s=2e9, latency_s=1e-4)
    host = _host(made.hosts[0].devices, made.hosts[0].links)
    return Cluster(name=name, hosts=(host,), notes=("CPU workers; rates are those of gloo over loopback",))


def _host(devices: tuple[Device, ...], links: tuple[Link, ...]) -> Host:
    return Host(devices=devices, links=links, decode_images_per_s=num_cores() * DECODE_IMAGES_PER_S_A_THREAD)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory, or the limit of the control group it runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdecimal() else total
