"""What each emulated host gets, read from a cluster: the rate and latency of its own link, and its share of the CPU.

All hosts hang on one switch, so a cluster can be rehearsed where the rate between any two hosts is that of the slower
one's own link:

    host 0 ── 37.5 MB/s ──┐
    host 1 ── 37.5 MB/s ──┼── switch        0 → 2 goes at 12.5 MB/s, and so does 1 → 2; both at once share it
    host 2 ── 12.5 MB/s ──┘
"""

from __future__ import annotations

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
    _check_shares(cluster)
    numbers = range(len(cluster.hosts))
    pairs = {pair: _along(cluster, *pair) for pair in combinations(numbers, 2)}
    _check_trunks(cluster)
    rates = [max(rate for pair, (rate, _) in pairs.items() if number in pair) for number in numbers]
    for (first, second), (rate, _) in pairs.items():
        if abs(rate - min(rates[first], rates[second])) > 1e-6 * rate:
            raise ClusterError(
                f"hosts {first} and {second} of {cluster.name} are joined at {rate:.4g} bytes/s, though each has a "
                f"link of {min(rates[first], rates[second]):.4g} or more: emulated hosts have one switch",
                "give each host one link to a common junction",
            )
    delays = [_own_latency_s(number, {pair: delay for pair, (_, delay) in pairs.items()}) for number in numbers]
    shares = [host.cpu_share for host in cluster.hosts]
    return tuple(Wiring(*each) for each in zip(rates, delays, shares))


def _check_hosts(cluster: Cluster) -> None:
    """Refuses what is no set of hosts with one worker each."""
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


def _check_shares(cluster: Cluster) -> None:
    """Refuses shares of the CPU that this machine does not have."""
    wanted = max(sum(host.cpu_share or 0.0 for host in cluster.hosts), cluster.cores or 0.0)
    cores = num_cores()
    if wanted > cores * (1 + 1e-6):
        raise ClusterError(
            f"the hosts of {cluster.name} want {wanted:g} CPU cores together, and this machine has {cores}",
            "lower the hosts' cpu_share and the cluster's cores",
        )


def _along(cluster: Cluster, first: int, second: int) -> tuple[float, float]:
    """Rate and latency between two hosts' devices."""
    links = [cluster.wires[wire] for wire, _ in cluster.path(DeviceId(first, 0), DeviceId(second, 0))]
    return min(link.bytes_per_s for link in links), sum(link.latency_s for link in links)


def _check_trunks(cluster: Cluster) -> None:
    """Refuses a wire that two pairs of hosts share without a host in common: one switch has no such wire."""
    users: dict[int, set[int]] = {}
    for pair in combinations(range(len(cluster.hosts)), 2):
        for wire, _ in cluster.path(DeviceId(pair[0], 0), DeviceId(pair[1], 0)):
            users[wire] = users[wire] & set(pair) if wire in users else set(pair)
    for wire, common in users.items():
        if not common:
            ends = " – ".join(cluster.wires[wire].ends)
            raise ClusterError(
                f"several pairs of hosts share the link {ends} of {cluster.name}: emulated hosts have one switch",
                "give each host one link to a common junction",
            )


def _own_latency_s(host: int, delays: dict[tuple[int, int], float]) -> float:
    """A host's part of its latencies: a(b) + b(c) − a(c) is twice its own, for any two others; half of it for one."""

    def between(one: int, other: int) -> float:
        return delays[min(one, other), max(one, other)]

    others = sorted({number for pair in delays for number in pair} - {host})
    if len(others) == 1:
        return between(host, others[0]) / 2
    found = [(between(host, a) + between(host, b) - between(a, b)) / 2 for a, b in combinations(others, 2)]
    return max(0.0, median(found))
