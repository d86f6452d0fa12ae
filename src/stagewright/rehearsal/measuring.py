"""Profiles and link rates of emulated hosts, measured inside them: the sources of plans and predictions."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from stagewright.cluster import Cluster
from stagewright.profile import Kernels, LayerProfile, Profile
from stagewright.profiling.inside import middle, middle_size
from stagewright.profiling.links import CORE_LOSS, Pair, with_all_at_once, with_pairs
from stagewright.profiling.noise import added_up, on_lines
from stagewright.rehearsal.beating import beating
from stagewright.rehearsal.forks import launch_in_hosts
from stagewright.rehearsal.slices import SLICE
from stagewright.runtime.hosts import Hosts
from stagewright.runtime.transport.staged import STRANDS

SAMPLES = 4
"""How often each layer is timed, by all hosts that are like the first together; the model in one piece more often."""
CARD_CORES = 0.1
"""About what a worker's card keeps busy of the host's cores: handing work over."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure."""

    model: str
    options: Mapping[str, Any]
    batch_sizes: tuple[int, ...]
    """The rows at which layers are timed; none where a profile is there already."""
    device: str = "cpu"
    threads: int = 1
    kernels: Kernels = "onednn"
    links: bool = True


class Beats(NamedTuple):
    """The pulse of a machine while its hosts passed over a model for a profile."""

    beat_s: float
    """What a beat took on the whole."""
    in_beats: tuple[float, ...]
    """How many beats each pass of the middle size took."""


class Measured(NamedTuple):
    """What hosts showed."""

    profile: Profile | None
    """None where none was asked for."""
    cluster: Cluster
    beats: Beats | None
    """None on cards, whose speed is their own, and where no profile was asked for."""


def measure_hosts(cluster: Cluster, hosts: Hosts, request: Request, folder: Path) -> Measured:
    """The model's profile on the first host's device, and the cluster with what its hosts and links showed.

    As many hosts compute at once as the machine has cores for: then each has what it wants, and memory and caches are
    as busy as in a run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    busy, profiled = busy_together(cluster), profiled_hosts(cluster)
    asked = {
        "model": request.model, "options": dict(request.options), "batch_sizes": request.batch_sizes,
        "threads": request.threads, "kernels": request.kernels, "links": request.links, "busy": busy,
        "profiles": profiled, "repeats": math.ceil(SAMPLES / len(profiled)),
        "bytes_per_s": min(link.bytes_per_s for link in cluster.links), "device": request.device,
        "strands": STRANDS if is_sliced(cluster) else 0,
    }  # fmt: skip
    threads, uses_card = {"OMP_NUM_THREADS": str(request.threads)}, request.device == "cuda"
    with nullcontext() if uses_card else beating(folder / "pulse.bin") as pulse:
        asked["pulse"] = None if pulse is None else os.fspath(pulse)
        (folder / "inside.json").write_text(json.dumps(asked), encoding="utf-8")
        launch_in_hosts("stagewright.profiling.inside", folder, hosts, threads, uses_card=uses_card)
    told = [json.loads((folder / f"inside-{n}.json").read_text(encoding="utf-8")) for n in range(len(cluster.hosts))]
    found = with_cores(with_links(cluster, told), told, request)
    if not request.batch_sizes:
        return Measured(None, found, None)
    profile = average([Profile.load(folder / f"inside-{number}.profile.json") for number in profiled])
    profile = replace(profile, device=cluster.hosts[0].devices[0].kind)  # a slice is not the card that it is cut from
    found = with_speeds(found, {number: told[number]["model_s"] for number in busy})
    if uses_card:
        return Measured(profile, found, None)
    together_s, alone_s = profile.model_s[middle_size(profile.batch_sizes)], told[profiled[0]]["alone_s"]
    found = replace(found, crowding=float(f"{max(together_s / alone_s, 1.0):.4g}"))
    return Measured(profile, found, beats_of([told[number] for number in profiled]))


def beats_of(told: Sequence[Mapping[str, Any]]) -> Beats:
    """The pulse that several hosts saw, and all their passes."""
    return Beats(median(each["beat_s"] for each in told), tuple(taken for each in told for taken in each["in_beats"]))


def busy_together(cluster: Cluster) -> list[int]:
    """The hosts that are busy while layers are timed: all with a share of their own, and of others as cores are left.

    Slices of a card share its memory, so all of them do.
    """
    if is_sliced(cluster):
        return list(range(len(cluster.hosts)))
    limited = [number for number, host in enumerate(cluster.hosts) if host.cpu_share is not None]
    left = num_cores(cluster) - sum(host.cpu_share or 0.0 for host in cluster.hosts)
    free = [number for number, host in enumerate(cluster.hosts) if host.cpu_share is None]
    return sorted([*limited, *free[: max(1, int(left + 1e-9))]])


def profiled_hosts(cluster: Cluster) -> list[int]:
    """Of the busy hosts those that are like the first, whose layers are timed."""
    return [number for number in busy_together(cluster) if number in alike(cluster, 0)]


def is_sliced(cluster: Cluster) -> bool:
    """Whether its devices are slices of one card."""
    return cluster.hosts[0].devices[0].kind == SLICE


def num_cores(cluster: Cluster) -> float:
    """The cores that the hosts share: those that the cluster names, or all of this machine."""
    return cluster.cores or float(len(os.sched_getaffinity(0)))


def alike(cluster: Cluster, host: int) -> list[int]:
    """The hosts with the same share of the CPU as this one."""
    share = cluster.hosts[host].cpu_share
    return [number for number, other in enumerate(cluster.hosts) if other.cpu_share == share]


def with_links(cluster: Cluster, told: Sequence[Mapping[str, Any]]) -> Cluster:
    """The cluster with the rates and latencies that pairs of hosts showed."""
    pairs = {(first, second): Pair(rate, latency) for each in told for first, second, rate, latency in each["pairs"]}
    if not pairs:
        return cluster
    found = with_pairs(cluster, pairs, "between emulated hosts")
    together = told[0].get("all_at_once")
    return found if together is None else with_all_at_once(found, together)


def with_cores(cluster: Cluster, told: Sequence[Mapping[str, Any]], request: Request) -> Cluster:
    """The cluster with the cores that its hosts share, and what moving a byte costs them."""
    spent = middle([each["core_s_per_byte"] for each in told]) or cluster.core_s_per_byte
    cores = CARD_CORES if request.device == "cuda" else float(request.threads)
    hosts = tuple(
        replace(host, devices=tuple(replace(device, cores=cores) for device in host.devices)) for host in cluster.hosts
    )
    loss = 0.0 if request.device == "cuda" else CORE_LOSS
    spent_s = float(f"{spent:.4g}")
    return replace(cluster, hosts=hosts, cores=num_cores(cluster), core_s_per_byte=spent_s, core_loss=loss)


def with_speeds(cluster: Cluster, model_s: Mapping[int, float]) -> Cluster:
    """The cluster with each device's speed against the first host's, the same for hosts with the same share."""

    def seconds(host: int) -> float:
        return median(model_s[number] for number in alike(cluster, host) if number in model_s)

    hosts = tuple(
        replace(host, devices=(replace(host.devices[0], speed=float(f"{seconds(0) / seconds(number):.4g}")),))
        for number, host in enumerate(cluster.hosts)
    )
    return replace(cluster, hosts=hosts)


def average(profiles: Sequence[Profile]) -> Profile:
    """The medians of several hosts' profiles of one model."""
    first = profiles[0]

    def middle_of(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(median(each) for each in zip(*values))

    layers: list[LayerProfile] = [
        layer.with_times({key: middle_of([each.layers[number].timed[key] for each in profiles]) for key in layer.timed})
        for number, layer in enumerate(first.layers)
    ]
    medians = replace(
        first,
        layers=tuple(layers),
        optimizer_s=median(each.optimizer_s for each in profiles),
        model_s=middle_of([each.model_s for each in profiles]),
        notes=(*first.notes, f"medians of {len(profiles)} emulated hosts that computed at once"),
    )
    whole = added_up(medians)
    return added_up(on_lines(whole)) if whole.device == "cpu" else whole
