"""What each emulated host gets, read from a cluster: the rate and latency of its own link, and its share of the CPU.

All hosts hang on one switch, so a cluster can be rehearsed where the rate between any two hosts is that of the slower
one's own link:

    host 0 ── 37.5 MB/s ──┐
    host 1 ── 37.5 MB/s ──┼── switch        0 → 2 goes at 12.5 MB/s, and so does 1 → 2; both at once share it
    host 2 ── 12.5 MB/s ──┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from stagewright.cluster import Cluster, DeviceId
from stagewright.errors import ClusterError
from stagewright.profiling.detect import num_cores


@dataclass(frozen=True)
class Wiring:
    """One emulated host: its link to the switch, the same in both directions, and the cores it may use."""

    bytes_per_s: float
    latency_s: float
    cores: float | None
    """None where the host takes what the others leave."""


def wirings(cluster: Cluster) -> tuple[Wiring, ...]:
    """For each host of the cluster what a rehearsal gives it."""
    _check_hosts(cluster)
    numbers = range(len(cluster.hosts))
    links = {
        pair: [wire for wire, _ in cluster.path(DeviceId(pair[0], 0), DeviceId(pair[1], 0))]
        for pair in combinations(numbers, 2)
    }
    _check_trunks(cluster, links)
    speeds = {pair: min(cluster.wires[wire].bytes_per_s for wire in each) for pair, each in links.items()}
    delays = {pair: sum(cluster.wires[wire].latency_s for wire in each) for pair, each in links.items()}
    rates = [max(rate for pair, rate in speeds.items() if number in pair) for number in numbers]
    for (first, second), rate in speeds.items():
        least = min(rates[first], rates[second])
        if abs(rate - least) > 1e-6 * rate:
            raise ClusterError(
                f"hosts {first} and {second} of {cluster.name} are joined at {rate:.4g} bytes/s, though each has a "
                f"link of {least:.4g} or more: emulated hosts have one switch",
                "give each host one link to a common junction",
            )
    return tuple(Wiring(rates[n], _own_latency_s(n, delays), cluster.hosts[n].cpu_share) for n in numbers)


def _check_hosts(cluster: Cluster) -> None:
    """Refuses what is no set of hosts with one worker each, and shares of the CPU that this machine does not have."""
    if not 2 <= len(cluster.hosts) <= 250:  # as many as the private range has addresses
        raise ClusterError(
            f"{cluster.name} has {len(cluster.hosts)} hosts: a rehearsal emulates 2 to 250",
            "give a cluster file with several hosts, or --slices N to cut one card",
        )
    for number, host in enumerate(cluster.hosts):
        if len(host.devices) > 1:
            raise ClusterError(
                f"host {number} of {cluster.name} has {len(host.devices)} devices: a rehearsal runs one worker a host",
                "write each device as a host of its own",
            )
    wanted, cores = max(sum(host.cpu_share or 0.0 for host in cluster.hosts), cluster.cores or 0.0), num_cores()
    if wanted > cores * (1 + 1e-6):
        raise ClusterError(
            f"the hosts of {cluster.name} want {wanted:g} CPU cores together, and this machine has {cores}",
            "lower the hosts' cpu_share and the cluster's cores",
        )


def _check_trunks(cluster: Cluster, links: Mapping[tuple[int, int], Sequence[int]]) -> None:
    """Refuses a wire that two pairs of hosts share without a host in common: one switch has no such wire."""
    common: dict[int, set[int]] = {}
    for pair, wires in links.items():
        for wire in wires:
            common[wire] = common.get(wire, set(pair)) & set(pair)
    trunk = next((wire for wire, hosts in common.items() if not hosts), None)
    if trunk is not None:
        raise ClusterError(
            f"several pairs of hosts share the link {' – '.join(cluster.wires[trunk].ends)} of {cluster.name}: "
            "emulated hosts have one switch",
            "give each host one link to a common junction",
        )


def _own_latency_s(host: int, delays: Mapping[tuple[int, int], float]) -> float:
    """A host's part of its latencies: a(b) + b(c) − a(c) is twice its own, for any two others; half of it for one."""

    def between(one: int, other: int) -> float:
        return delays[min(one, other), max(one, other)]

    others = sorted({number for pair in delays for number in pair} - {host})
    if len(others) == 1:
        return between(host, others[0]) / 2
    found = [(between(host, a) + between(host, b) - between(a, b)) / 2 for a, b in combinations(others, 2)]
    return max(0.0, median(found))
