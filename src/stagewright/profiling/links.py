"""Rates and latencies of the wires, measured between workers that really run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from stagewright.cluster import Cluster
from stagewright.errors import ClusterError
from stagewright.profiling.detect import num_cores
from stagewright.profiling.inside import rate_of


class Pair(NamedTuple):
    """What one pair of workers showed, in one direction."""

    bytes_per_s: float
    latency_s: float


_Pairs = Mapping[tuple[int, int], Pair]


def measure_links(cluster: Cluster) -> Cluster:
    """The cluster of this machine with the rates and latencies that its devices show."""
    if len(cluster.hosts) != 1 or len(cluster.device_ids) < 2:
        raise ClusterError(
            f"{cluster.name} has {len(cluster.hosts)} hosts and {len(cluster.device_ids)} devices: "
            "links are measured between two devices or more of one host",
            "measure each host on its own, and write the network's rate into the file",
        )
    if cluster.hosts[0].devices[0].kind != "cpu" and torch.cuda.device_count() >= len(cluster.device_ids):
        pairs = combinations(range(len(cluster.device_ids)), 2)
        return with_pairs(cluster, {pair: _copy_between(*pair) for pair in pairs}, "between GPUs")
    told = measure_workers(len(cluster.device_ids))
    return _with_cores(with_pairs(cluster, pairs_of(told), "between gloo workers"), told)


def pairs_of(told: Sequence[Mapping[str, Any]]) -> _Pairs:
    """What all pairs of workers showed."""
    return {(first, second): Pair(*seen) for each in told for first, second, *seen in each["pairs"]}


def _with_cores(cluster: Cluster, told: Sequence[Mapping[str, Any]]) -> Cluster:
    """The cluster of this machine with the cores that its workers share, and what moving and adding up a byte costs."""

    def middle_of(key: str) -> float:
        return float(median(each[key] for each in told if each[key]))

    return replace(
        cluster, cores=float(num_cores()), core_s_per_byte=_rounded(middle_of("core_s_per_byte")),
        sum_core_s_per_byte=_rounded(middle_of("sum_core_s_per_byte")),
        notes=(*cluster.notes, "cores that workers share, and what a byte costs them, measured in these workers"),
    )  # fmt: skip


def measure_workers(num_workers: int, large_bytes: int = 16 << 20) -> list[dict[str, Any]]:
    """What as many processes see of links and cores: neighbours over gloo, one pair at a time, then all at once."""
    memory = Path("/dev/shm")  # files there are nothing but memory
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        asked = {"meet": f"file://{folder}/meet", "large_bytes": large_bytes, "threads": 1, "has_common_memory": True}
        Path(folder, "inside.json").write_text(json.dumps(asked))
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "stagewright.profiling.inside", folder],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(num_workers)},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(num_workers)
        ]  # fmt: skip
        _wait_for(workers)
        return [json.loads(Path(folder, f"inside-{rank}.json").read_text()) for rank in range(num_workers)]


def _wait_for(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Returns when all workers are done; when one fails or hangs, ends the others and says what it said."""
    try:
        for rank, worker in enumerate(workers):
            _, said = worker.communicate(timeout=300.0)
            if worker.returncode:
                last = said.strip().splitlines()[-1:] or ["nothing"]
                raise ClusterError(f"worker {rank} stopped while links were measured; it said: {last[0]}")
    except subprocess.TimeoutExpired:
        raise ClusterError("the workers did not finish measuring links in 300 s") from None
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()


def _copy_between(first: int, second: int, large_bytes: int = 64 << 20) -> Pair:
    """What copies from one GPU to another show."""

    def moment() -> float:
        torch.cuda.synchronize(first)
        torch.cuda.synchronize(second)
        return perf_counter()

    seconds = []
    for size in (1, large_bytes):
        source = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{first}")
        target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{second}")
        gaps = []
        for _ in range(7):
            begin = moment()
            target.copy_(source)
            gaps.append(moment() - begin)
        seconds.append(median(gaps[2:]))
    return Pair(rate_of(large_bytes, seconds[1], seconds[0]), seconds[0])


def with_pairs(cluster: Cluster, pairs: _Pairs, how: str) -> Cluster:
    """The cluster with each wire as fast as the fastest pair that used it, and its share of the pair's latency.

    Pairs are numbers of devices, counted host by host.

    0 ─ hub ─ 1   a pair at 2 GB/s and 60 µs: both wires carry 2 GB/s, with 30 µs each
    """
    rates: dict[int, float] = {}
    latencies: dict[int, float] = {}
    for (first, second), pair in pairs.items():
        path = cluster.path(cluster.device_ids[first], cluster.device_ids[second])
        for wire, _ in path:
            rates[wire] = max(rates.get(wire, 0.0), pair.bytes_per_s)
            latencies[wire] = min(latencies.get(wire, float("inf")), pair.latency_s / len(path))
    links = [*(link for host in cluster.hosts for link in host.links), *cluster.links]
    for wire, rate in rates.items():
        links[wire] = replace(links[wire], bytes_per_s=_rounded(rate), latency_s=_rounded(latencies[wire]))
    left = iter(links)
    hosts = tuple(replace(host, links=tuple(islice(left, len(host.links)))) for host in cluster.hosts)
    notes = (*cluster.notes, f"link rates and latencies measured {how}")
    return replace(cluster, hosts=hosts, links=tuple(left), notes=notes)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
