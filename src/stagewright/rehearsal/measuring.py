"""Profiles and link rates of emulated hosts, measured inside them: the sources of plans and predictions."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from stagewright.cluster import Cluster, Host
from stagewright.errors import RunError
from stagewright.profile import Profile
from stagewright.profiling.detect import num_cores
from stagewright.profiling.links import pairs_of, with_pairs
from stagewright.profiling.measured import layers_against_model
from stagewright.runtime.launch.local import Hosts, seats_in, wait_for_workers, workers
from stagewright.runtime.run_folder import LOGS


def measure_hosts(
    cluster: Cluster, hosts: Hosts, folder: Path, *, model: str, options: Mapping[str, Any],
    batch_sizes: Sequence[int], threads: int = 1, device: str = "cpu",
) -> tuple[Profile, Cluster]:  # fmt: skip
    """The model's profile on the first host's device, and the cluster with what its hosts and links showed."""
    folder.mkdir(parents=True, exist_ok=True)
    every, profiled = range(len(cluster.hosts)), _profiled(cluster, device, threads)
    asked = {
        "model": model, "options": dict(options), "batch_sizes": list(batch_sizes), "threads": threads,
        "profiled": profiled, "repeats": 4, "device": device,
        # About 0.15 s at the rate that the cluster file names: neither lost in noise nor long.
        "large_bytes": int(min(max(min(link.bytes_per_s for link in cluster.links) * 0.15, 1 << 20), 16 << 20)),
    }  # fmt: skip
    (folder / "inside.json").write_text(json.dumps(asked), encoding="utf-8")
    command = [sys.executable, "-m", "stagewright.profiling.inside", str(folder)]
    with workers(seats_in(command, hosts, every), folder / LOGS, {"OMP_NUM_THREADS": "1"}) as started:
        failed = wait_for_workers(started)
    for host, status in failed.items():
        said = (folder / LOGS / f"worker-{host}.log").read_text(errors="replace").strip().splitlines()[-3:]
        raise RunError(f"measuring failed on host {host} of {len(every)} with status {status}", "\n".join(said))
    told = [json.loads((folder / f"inside-{host}.json").read_text(encoding="utf-8")) for host in every]
    found = with_pairs(cluster, pairs_of(told), "between emulated hosts")
    if device == "cpu":
        found = _with_cores(found, [each["core_s_per_byte"] for each in told], threads)
    profile = average([Profile.load(folder / f"inside-{host}.profile.json") for host in profiled])
    # A slice is not the card that it is cut from.
    return replace(profile, device=cluster.hosts[0].devices[0].kind), found


def _profiled(cluster: Cluster, device: str, threads: int) -> list[int]:
    """The hosts that time the layers: those with the first one's share, as many at once as the cores suffice for."""
    share = cluster.hosts[0].cpu_share
    alike = [number for number, host in enumerate(cluster.hosts) if host.cpu_share == share]
    if share is not None or device != "cpu":
        return alike  # slices of a card share its memory, as they will in a run
    return alike[: max(1, int((cluster.cores or num_cores()) / threads))]


def _with_cores(cluster: Cluster, spent_s: Sequence[float], threads: int) -> Cluster:
    """The cluster with the cores that its hosts share, what a byte costs them, and speeds as their shares are."""

    def own_cores(host: Host) -> float:
        return min(float(threads), host.cpu_share or float(threads))

    def renewed(host: Host) -> Host:
        speed = own_cores(host) / own_cores(cluster.hosts[0])
        return replace(host, devices=(replace(host.devices[0], cores=float(threads), speed=speed),))

    return replace(
        cluster, hosts=tuple(map(renewed, cluster.hosts)), cores=cluster.cores or float(num_cores()),
        core_s_per_byte=float(f"{median(sorted(filter(None, spent_s))):.4g}"),
    )  # fmt: skip


def average(profiles: Sequence[Profile]) -> Profile:
    """The medians of several hosts' profiles of one model, with layers that take together what the model takes.

    Other work on the machine disturbs few of many short samples, and no long one goes without: the layers' medians come
    to less than that of the whole, and a step is as long as the whole.
    """
    first = profiles[0]

    def middle_of(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(median(each) for each in zip(*values))

    layers = [
        layer.with_times({key: middle_of([each.layers[number].timed[key] for each in profiles]) for key in layer.timed})
        for number, layer in enumerate(first.layers)
    ]
    medians = replace(
        first, layers=tuple(layers), optimizer_s=median(each.optimizer_s for each in profiles),
        model_s=middle_of([each.model_s for each in profiles]),
        notes=(*first.notes, f"medians of {len(profiles)} emulated hosts that computed at once"),
    )  # fmt: skip
    return medians.slowed([1 / ratio for ratio in layers_against_model(medians)])
