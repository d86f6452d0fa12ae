"""The links of a cluster, and the cores that its hosts share: the other half of the formulas in `cost`.

Paths, rings and trees over directed links, what each transfer and each all-reduce loads them with, and how long that
takes when nothing else is on them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stagewright.cluster import Cluster, DeviceId


class Collective(NamedTuple):
    """How an all-reduce loads the links: `passes` times its bytes over each of `loads`.

    A load is (directed link, how many of the collective's edges cross it); the edges of one link share its rate.
    """

    kind: str
    passes: float
    loads: tuple[tuple[int, int], ...]
    bytes_per_s: float
    """What one edge gets when the collective has the links to itself."""
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """How long it takes when it has the links to itself."""
        return self.passes * num_bytes / self.bytes_per_s + self.latency_s


class _Cores:
    """CPU cores that hosts share, as links: a byte on them is the work that moving a byte costs at one end.

    Where one machine emulates several hosts, what they compute and what they send use the same cores. Work of one
    core-second is 1 / `core_s_per_byte` such bytes, so that cores are shared out as links are:

        host 0, 0.25 cores ──┐                 a transfer 0 → 1 loads both hosts' links once, the machine's twice;
        host 1, 0.25 cores ──┴── machine, 2    a device that computes loads its host's and the machine's once
    """

    UNIT_S = 1e-9
    """A byte's work where transfers cost no core anything."""
    FILLED = 0.6
    """The part of its share that a host spends on a collective, however little work that is."""

    def __init__(self, cluster: Cluster, first: int) -> None:
        self.unit_s = cluster.core_s_per_byte or self.UNIT_S
        self.moving = int(cluster.core_s_per_byte > 0)
        shares = [host.cpu_share for host in cluster.hosts] if cluster.cores is not None else []
        limited = [host for host, share in enumerate(shares) if share is not None]
        self.first = first
        self.of_host = {host: first + number for number, host in enumerate(limited)}
        self.of_all = first + len(limited) if cluster.cores is not None else None
        self.rates = tuple((shares[host] or 0.0) / self.unit_s for host in limited)
        self.rates += () if cluster.cores is None else (cluster.cores / self.unit_s,)
        self.cluster = cluster

    def wanted(self, id: DeviceId) -> float:
        """How many cores a device keeps busy when nobody else wants them."""
        return min(self.cluster.device(id).cores, self.cluster.hosts[id.host].cpu_share or math.inf)

    def computing(self, id: DeviceId) -> tuple[tuple[int, int], ...]:
        own = ((self.of_host[id.host], 1),) if id.host in self.of_host else ()
        return own if self.of_all is None else (*own, (self.of_all, 1))

    def transfer(self, source: DeviceId, target: DeviceId) -> tuple[tuple[int, int], ...]:
        """What a transfer loads: work at both of its ends, which may be two workers of one host."""
        if self.of_all is None or not self.moving or source == target:
            return ()
        ends = tuple((self.of_host[id.host], 1) for id in (source, target) if id.host in self.of_host)
        return (*ends, (self.of_all, 2))

    def filled(self, loads: Mapping[int, int], rate: float) -> dict[int, int]:
        """A collective's loads, with hosts' shares more than half full at its rate.

        A host that has used up its share of a period handles no message before the next, and all others in the ring
        wait for it: between hosts with a quarter of a core, of all-reduces that backward should hide a half to two
        thirds came after it.
        """
        full = {
            link: int(self.FILLED * self.rates[link - self.first] / rate)
            for link in self.of_host.values()
            if link in loads
        }
        return {link: max(load, full.get(link, 0)) for link, load in loads.items()}

    def crowded(self, id: DeviceId, computing: Sequence[DeviceId]) -> float:
        """A device's speed while some compute, itself among them, against its profile's: 0.5 where four share two."""
        if self.of_all is None or self.cluster.cores is None:
            return 1.0
        wants = sorted(map(self.wanted, computing))
        left, level = self.cluster.cores, 0.0
        for number, want in enumerate(wants):
            level = left / (len(wants) - number)
            if want > level:
                break
            left, level = left - want, want
        return min(1.0, level / self.wanted(id))

    def share(self, computing: Sequence[DeviceId]) -> float:
        """The share of the machine's cores that some devices keep busy, at most 1; 0 where no cores are shared."""
        if self.of_all is None or self.cluster.cores is None:
            return 0.0
        return min(1.0, sum(map(self.wanted, computing)) / self.cluster.cores)


class Network:
    """Paths, rings and trees of a cluster, over directed links: 2 n is link n along its ends, 2 n + 1 against.

    After the links come the cores that hosts share, where they do.
    """

    def __init__(self, cluster: Cluster, all_reduce: str = "fastest") -> None:
        self.cluster, self.all_reduce = cluster, all_reduce
        self.cores = _Cores(cluster, first=2 * len(cluster.wires))
        there_and_back = ((link.bytes_per_s, link.back_bytes_per_s or link.bytes_per_s) for link in cluster.wires)
        self.rates = (*(rate for rates in there_and_back for rate in rates), *self.cores.rates)
        self.latencies = tuple(link.latency_s for link in cluster.wires for _ in range(2))
        self._paths: dict[tuple[DeviceId, DeviceId], tuple[int, ...]] = {}
        self._collectives: dict[tuple[DeviceId, ...], tuple[Collective, ...]] = {}
        self._orders: dict[tuple[DeviceId, ...], tuple[DeviceId, ...]] = {}

    def path(self, source: DeviceId, target: DeviceId) -> tuple[int, ...]:
        """The directed links from one device to another."""
        found = self._paths.get((source, target))
        if found is None:
            steps = self.cluster.path(source, target)
            found = self._paths[source, target] = tuple(2 * wire + (not along) for wire, along in steps)
        return found

    def latency_s(self, source: DeviceId, target: DeviceId) -> float:
        """The latencies of all links on the path."""
        return sum(self.latencies[link] for link in self.path(source, target))

    def loads(self, source: DeviceId, target: DeviceId) -> tuple[tuple[int, int], ...]:
        """What a transfer loads, as (link, how often): the links on its path, and the cores at its ends."""
        return (*((link, 1) for link in self.path(source, target)), *self.cores.transfer(source, target))

    def rate(self, source: DeviceId, target: DeviceId) -> float:
        """The rate of the slowest link on the path; infinite inside one device."""
        return min((self.rates[link] / times for link, times in self.loads(source, target)), default=math.inf)

    def exchange_s(self, moves: Iterable[tuple[DeviceId, DeviceId, float]]) -> float:
        """Transfers that start together, as (source, target, bytes): the fullest link decides, max Σ bytes / rate."""
        loads: dict[int, float] = {}
        latency = 0.0
        for source, target, num_bytes in moves:
            latency = max(latency, self.latency_s(source, target))
            for link, times in self.loads(source, target):
                loads[link] = loads.get(link, 0.0) + times * num_bytes
        return latency + max((load / self.rates[link] for link, load in loads.items()), default=0.0)

    def collective(self, devices: Sequence[DeviceId], num_bytes: float) -> Collective | None:
        """A ring, or a tree where latency is most of the ring's time and the tree is faster; None for one device."""
        if len(devices) < 2:
            return None
        key = tuple(devices)
        if key not in self._collectives:
            common = self._common(key)
            self._collectives[key] = (self._ring(key), self._tree(key)) if common is None else (common, common)
        ring, tree = self._collectives[key]
        if self.all_reduce != "fastest":
            return tree if self.all_reduce == "tree" else ring
        is_small = ring.latency_s > ring.passes * num_bytes / ring.bytes_per_s
        return tree if is_small and tree.seconds(num_bytes) < ring.seconds(num_bytes) else ring

    def _ring(self, devices: tuple[DeviceId, ...]) -> Collective:
        order = self.ring_order(devices)
        edges = tuple(zip(order, (*order[1:], order[0])))
        count = len(devices)
        # Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, eq. 3.
        return self._collect("ring", 2 * (count - 1) / count, edges, 2 * (count - 1))

    def _common(self, devices: tuple[DeviceId, ...]) -> Collective | None:
        """A sum in memory that replicas of one host have in common: nothing travels, but each one's core adds and
        copies, and they meet before and after they add.
        """
        cores, spent_s = self.cores, self.cluster.sum_core_s_per_byte
        if cores.of_all is None or not spent_s or len({id.host for id in devices}) > 1:
            return None
        meeting_s = self._ring(devices).latency_s
        rate = min(self.rates[cores.of_all] / len(devices), 1 / cores.unit_s)
        return Collective("common", spent_s / cores.unit_s, ((cores.of_all, len(devices)),), rate, 2 * meeting_s)

    def _tree(self, devices: tuple[DeviceId, ...]) -> Collective:
        """Sums climb a binary tree over the hosts and in each host, and the result comes down again, pipelined."""
        hosts: dict[int, list[DeviceId]] = {}
        for id in self.ring_order(devices):
            hosts.setdefault(id.host, []).append(id)
        groups = [[members[0] for members in hosts.values()], *hosts.values()]
        edges = [(group[(child - 1) // 2], group[child]) for group in groups for child in range(1, len(group))]
        depth = len(groups[0]).bit_length() - 1 + max(len(members).bit_length() - 1 for members in hosts.values())
        return self._collect("tree", 1.0, [*edges, *((child, parent) for parent, child in edges)], 2 * depth)

    def _collect(self, kind: str, passes: float, edges: Sequence[tuple[DeviceId, DeviceId]], rounds: int) -> Collective:
        loads: Counter[int] = Counter()
        for source, target in edges:
            loads.update(dict(self.loads(source, target)))
        rate = min(self.rates[link] / load for link, load in loads.items())
        latency = max(self.latency_s(source, target) for source, target in edges)
        filled = self.cores.filled(loads, rate)
        return Collective(kind, passes, tuple(sorted(filled.items())), rate, rounds * latency)

    def ring_order(self, devices: Sequence[DeviceId]) -> tuple[DeviceId, ...]:
        """The devices in the order of a good ring: host by host, each next one near and over fast links.

        0 1 2 3 4 5 6 7  over NVLinks becomes  0 3 2 1 5 6 7 4: double links all the way round
        """
        key = tuple(devices)
        if key not in self._orders:
            hosts: dict[int, list[DeviceId]] = {}
            for id in key:
                hosts.setdefault(id.host, []).append(id)
            order = [id for members in hosts.values() for id in self._walk(members)]
            # The search is cubic: rings of more devices are not improved.
            self._orders[key] = self._two_opt(order) if len(hosts) == 1 and 3 < len(order) <= 16 else tuple(order)
        return self._orders[key]

    def _walk(self, members: Sequence[DeviceId]) -> list[DeviceId]:
        walk, left = [members[0]], list(members[1:])
        while left:
            here = walk[-1]
            near = min(left, key=lambda id: (len(self.path(here, id)), -self.rate(here, id), id))
            left.remove(near)
            walk.append(near)
        return walk

    def _ring_score(self, order: Sequence[DeviceId]) -> tuple[float, int]:
        loads: Counter[int] = Counter()
        for source, target in zip(order, (*order[1:], order[0])):
            loads.update(self.path(source, target))
        return -min(self.rates[link] / load for link, load in loads.items()), sum(loads.values())

    def _best_ring_score(self, devices: Sequence[DeviceId]) -> tuple[float, int]:
        """What no ring can be better than: each device sends to the nearest, over links that are all its own."""
        rates, hops = [], 0
        for source in devices:
            paths = [self.path(source, target) for target in devices if target != source]
            rates.append(max(min((self.rates[link] for link in path), default=math.inf) for path in paths))
            hops += min(map(len, paths))
        return -min(rates), hops

    def _two_opt(self, order: Sequence[DeviceId]) -> tuple[DeviceId, ...]:
        """The order after turning round every stretch that makes the ring faster, or shorter at the same rate."""
        best, score = tuple(order), self._ring_score(order)
        if score <= self._best_ring_score(order):
            return best
        pairs = [(low, high) for low in range(1, len(best)) for high in range(low + 2, len(best) + 1)]
        better = True
        while better:
            better = False
            for low, high in pairs:
                turned = (*best[:low], *best[low:high][::-1], *best[high:])
                found = self._ring_score(turned)
                if found < score:
                    best, score, better = turned, found, True
        return best
