"""Profile × cluster → seconds and bytes: the only formulas of the project.

The planner's bounds, the simulator's durations and the reports' limits all come from here. docs/cost-model.md
explains each of them. `Costs` answers for any run of layers from sums that are made once:

    costs = Costs(profile, cluster)
    costs.forward_s(0, 7, rows=32)            layers 0 … 6 on 32 rows
    costs.reduce_s(1 << 20, devices)          an all-reduce among devices, alone on the wires
    costs.stage_bytes(0, 7, rows=32, …)       what a replica of that stage holds, kind by kind
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

from stagewright.cluster import Cluster, Device, DeviceId
from stagewright.plan import Plan, Policy, Route
from stagewright.profile import LayerProfile, Profile

BUCKET_BYTES = 16 << 20
"""Gradients are reduced in pieces of at most about this size, so that the first can start while backward still runs."""

BUCKETS = 8
"""In so many at least: only the last one has nothing of backward left to hide under."""

LEAST_BUCKET_BYTES = 2 << 20
"""But smaller ones are not worth a message of their own."""

STATE_COPIES = 1
"""What SGD with momentum keeps beside the weights: one copy of them."""

COPY_SHARE = 0.4
"""A copy of the weights against an SGD-with-momentum step: two passes over memory (read, write) against five
(read weight, gradient and momentum, write weight and momentum)."""

ADD_SHARE = 0.6
"""Adding a microbatch's weight gradients to those before, against an SGD-with-momentum step: three passes over memory
(read both, write the sum) against five."""

KEPT_SHARE = 0.5
"""Of a linear layer's weights, what the rows that it keeps for later weight gradients may take beside them."""

MAX_TWO_OPT = 16
"""Rings of more devices on one host are not improved: the search is cubic."""

Number = TypeVar("Number", int, float)


# ── layers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def interpolate(sizes: Sequence[int], seconds: Sequence[float], rows: float) -> float:
    """Seconds at `rows`: on the lines between the measured sizes, and on the outermost lines beyond them.

    Below the smallest size it is no less than in proportion to rows: where large sizes fall out of a cache, the line
    would meet zero before the rows do. One measured size alone means proportion.
    """
    if rows <= 0:
        return 0.0
    if len(sizes) == 1:
        return seconds[0] * rows / sizes[0]
    upper = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
    low, high = sizes[upper - 1], sizes[upper]
    slope = (seconds[upper] - seconds[upper - 1]) / (high - low)
    return max(seconds[upper - 1] + slope * (rows - low), seconds[0] * rows / sizes[0] if rows < sizes[0] else 0.0)


def forward_s(profile: Profile, first: int, last: int, rows: float) -> float:
    """Forward of the layers first … last − 1 on `rows` rows, without sums made before."""
    return sum(interpolate(profile.batch_sizes, layer.forward_s, rows) for layer in profile.layers[first:last])


def backward_s(profile: Profile, first: int, last: int, rows: float) -> float:
    """Backward of the layers first … last − 1 on `rows` rows, without sums made before."""
    return sum(interpolate(profile.batch_sizes, layer.backward_s, rows) for layer in profile.layers[first:last])


def crossing_bytes(profile: Profile, cut: int) -> float:
    """Bytes a row of everything that is made before layer `cut` and read at or after it."""
    return crossings(profile)[cut]


def crossings(profile: Profile) -> tuple[float, ...]:
    """`crossing_bytes` of every cut, from 0 (the model's input) to the number of layers (nothing)."""
    last_reader = _last_readers(profile)
    change = [0.0] * (len(profile.layers) + 2)
    for number, layer in enumerate(profile.layers):
        if last_reader[number] > number:
            change[number + 1] += layer.output_bytes
            change[last_reader[number] + 1] -= layer.output_bytes
    running = list(accumulate(change))[1 : len(profile.layers)]
    return (profile.input_bytes, *running, 0.0)


def _last_readers(profile: Profile) -> list[int]:
    number_of = {name: number for number, name in enumerate(profile.names)}
    last = [0] * len(profile.layers)
    for number, layer in enumerate(profile.layers):
        for source in (number - 1,) if layer.inputs is None else (number_of[name] for name in layer.inputs):
            if source >= 0:
                last[source] = number
    return last


class Handled(NamedTuple):
    """How many microbatches of a batch one replica of a stage handles, and how it makes their weight gradients."""

    microbatches: int = 1
    folds: bool = True
    """Whether linear layers may make those of several at once. A backward in halves asks for the weights' half of each
    microbatch, so that nothing folds."""


ONE = Handled()


def handled_by_each(policy: Policy, route: Route, num_microbatches: int, num_replicas: int) -> Handled:
    """What a replica of a stage handles: all microbatches of a batch, or those that come round to it."""
    count = -(-num_microbatches // num_replicas) if route == "rotate" else num_microbatches
    return Handled(count, policy != "zero-bubble")


def folded_backward_s(profile: Profile, layer: LayerProfile, rows: float, num_microbatches: int) -> float:
    """Backward of a layer, a microbatch, where it makes the weight gradients of several microbatches at once.

    It keeps their rows while these take no more than KEPT_SHARE of its weights.
    """
    whole = interpolate(profile.batch_sizes, layer.backward_s, rows)
    kept = rows * (layer.saved_bytes + layer.output_bytes)
    if num_microbatches == 1 or not kept:
        return whole
    count = max(1, min(num_microbatches, int(KEPT_SHARE * layer.parameter_bytes / kept)))
    together = interpolate(profile.batch_sizes, layer.backward_s, rows * count) / count
    return whole + layer.weight_share * min(together - whole, 0.0)


class RowSums(NamedTuple):
    """Seconds of the layers before each cut, at one number of rows."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    """The part of backward that only the weights' gradients need."""


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

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


# ── wires ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def ring_s(num_bytes: float, num_replicas: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """A ring all-reduce: 2 (n − 1) / n of the bytes over the slowest link, in 2 (n − 1) rounds.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, eq. 3.
    """
    if num_replicas < 2:
        return 0.0
    rounds = 2 * (num_replicas - 1)
    return rounds / num_replicas * num_bytes / bytes_per_s + rounds * latency_s


class Collective(NamedTuple):
    """How an all-reduce loads the wires: `passes` times its bytes over each of `loads`.

    A load is (directed link, how many of the collective's edges cross it); the edges of one link share its rate.
    """

    kind: str
    passes: float
    loads: tuple[tuple[int, int], ...]
    bytes_per_s: float
    """What one edge gets when the collective has the wires to itself."""
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """How long it takes when it has the wires to itself."""
        return self.passes * num_bytes / self.bytes_per_s + self.latency_s


class Cores:
    """CPU cores that hosts share, as links: a byte on them is the work that moving a byte costs at one end.

    Where one machine emulates several hosts, what they compute and what they send use the same cores. Work of one
    core-second is 1 / `core_s_per_byte` such bytes, so that cores are shared out as wires are:

        host 0, 0.25 cores ──┐                 a transfer 0 → 1 loads both hosts' links once, the machine's twice;
        host 1, 0.25 cores ──┴── machine, 2    a device that computes loads its host's and the machine's once
    """

    UNIT_S = 1e-9
    """A byte's work where transfers cost no core anything."""

    def __init__(self, cluster: Cluster, first: int) -> None:
        self.unit_s = cluster.core_s_per_byte or self.UNIT_S
        self.moving = int(cluster.core_s_per_byte > 0)
        shares = [host.cpu_share for host in cluster.hosts] if cluster.cores is not None else []
        limited = [host for host, share in enumerate(shares) if share is not None]
        self.of_host = {host: first + number for number, host in enumerate(limited)}
        self.of_all = first + len(limited) if cluster.cores is not None else None
        self.rates = tuple((shares[host] or 0.0) / self.unit_s for host in limited)
        self.rates += () if cluster.cores is None else (cluster.cores / self.unit_s,)
        self.crowding = {self.of_all: cluster.crowding} if self.of_all is not None and cluster.crowding > 1 else {}
        """By link how many times as much work it has where twice as much is wanted as it can do."""
        self.cluster = cluster

    def wanted(self, id: DeviceId) -> float:
        """How many cores a device keeps busy when nobody else wants them."""
        return min(self.cluster.device(id).cores, self.cluster.hosts[id.host].cpu_share or math.inf)

    def computing(self, id: DeviceId) -> tuple[tuple[int, int], ...]:
        """What a device that computes loads."""
        own = ((self.of_host[id.host], 1),) if id.host in self.of_host else ()
        return own if self.of_all is None else (*own, (self.of_all, 1))

    def transfer(self, source: DeviceId, target: DeviceId) -> tuple[tuple[int, int], ...]:
        """What a transfer loads: work at both of its ends."""
        if self.of_all is None or not self.moving or source.host == target.host:
            return ()
        ends = tuple((self.of_host[id.host], 1) for id in (source, target) if id.host in self.of_host)
        return (*ends, (self.of_all, 2))

    def crowded(self, id: DeviceId, computing: Sequence[DeviceId]) -> float:
        """A device's speed while some compute, itself among them, against its speed alone: 0.5 where four share two."""
        if self.of_all is None or self.cluster.cores is None:
            return 1.0
        wants = sorted(map(self.wanted, computing))
        left, level = self.cluster.cores, 0.0
        for number, want in enumerate(wants):
            level = left / (len(wants) - number)
            if want > level:
                break
            left, level = left - want, want
        strained = strain(self.cluster.crowding, sum(wants) / self.cluster.cores)
        return min(1.0, level / self.wanted(id) / strained)

    def share(self, computing: Sequence[DeviceId]) -> float:
        """The share of the machine's cores that some devices keep busy, at most 1; 0 where no cores are shared."""
        if self.of_all is None or self.cluster.cores is None:
            return 0.0
        return min(1.0, sum(map(self.wanted, computing)) / self.cluster.cores)


def strain(crowding: float, wanted: float) -> float:
    """How many times as much work it is where `wanted` times the cores are wanted that there are.

    1 up to the cores there are, `crowding` from twice as many on, in between in proportion.
    """
    return 1.0 + (crowding - 1.0) * min(max(wanted - 1.0, 0.0), 1.0)


class Wires:
    """Paths, rings and trees of a cluster, over directed links: link 2 w is wire w along its ends, 2 w + 1 against.

    After the wires come the cores that hosts share, where they do.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.cores = Cores(cluster, first=2 * len(cluster.wires))
        self.rates = (*(link.bytes_per_s for link in cluster.wires for _ in range(2)), *self.cores.rates)
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
            self._collectives[key] = (self._ring(key), self._tree(key))
        ring, tree = self._collectives[key]
        is_small = ring.latency_s > ring.passes * num_bytes / ring.bytes_per_s
        return tree if is_small and tree.seconds(num_bytes) < ring.seconds(num_bytes) else ring

    def _ring(self, devices: tuple[DeviceId, ...]) -> Collective:
        order = self.ring_order(devices)
        edges = tuple(zip(order, (*order[1:], order[0])))
        count = len(devices)
        return self._collect("ring", 2 * (count - 1) / count, edges, 2 * (count - 1))

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
        return Collective(kind, passes, tuple(sorted(loads.items())), rate, rounds * latency)

    def ring_order(self, devices: Sequence[DeviceId]) -> tuple[DeviceId, ...]:
        """The devices in the order of a good ring: host by host, each next one near and over fast links.

        0 1 2 3 4 5 6 7  over NVLinks becomes  0 3 2 1 5 6 7 4: double links all the way round
        """
        key = tuple(devices)
        if key not in self._orders:
            self._orders[key] = self._find_order(key)
        return self._orders[key]

    def _find_order(self, devices: tuple[DeviceId, ...]) -> tuple[DeviceId, ...]:
        hosts: dict[int, list[DeviceId]] = {}
        for id in devices:
            hosts.setdefault(id.host, []).append(id)
        order = [id for members in hosts.values() for id in self._walk(members)]
        return self._two_opt(order) if len(hosts) == 1 and 3 < len(order) <= MAX_TWO_OPT else tuple(order)

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


# ── both ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Costs:
    """Seconds and bytes of any run of layers `first … last − 1`; `speed` is that of the device (`Device.speed`)."""

    def __init__(self, profile: Profile, cluster: Cluster, *, state_copies: int = STATE_COPIES) -> None:
        self.profile, self.cluster, self.state_copies = profile, cluster, state_copies
        self.wires = Wires(cluster)
        self.crossings = crossings(profile)
        layers = profile.layers
        self._parameters = _sums([layer.parameter_bytes for layer in layers])
        self._buffers = _sums([layer.buffer_bytes for layer in layers])
        self._saved = _sums([layer.saved_bytes for layer in layers])
        self._rows: dict[tuple[float, Handled], RowSums] = {}
        self._buckets: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._workspaces = [layer.workspace_bytes for layer in layers]

    # seconds

    def speed(self, id: DeviceId, computing: Sequence[DeviceId]) -> float:
        """A device's speed while some compute; only cores that hosts share make that differ."""
        return self.cluster.device(id).speed * self.wires.cores.crowded(id, computing)

    def row_sums(self, rows: float, handled: Handled = ONE) -> RowSums:
        """Sums of all layers' seconds at this number of rows, made at the first call."""
        found = self._rows.get((rows, handled))
        if found is None:
            sizes, layers = self.profile.batch_sizes, self.profile.layers
            forward = [interpolate(sizes, layer.forward_s, rows) for layer in layers]
            backward, weight = zip(*(self._backward_halves(layer, rows, handled) for layer in layers))
            found = self._rows[rows, handled] = RowSums(_sums(forward), _sums(backward), _sums(weight))
        return found

    def _backward_halves(self, layer: LayerProfile, rows: float, handled: Handled) -> tuple[float, float]:
        """A layer's backward, and what of it only the weights' gradients need; of a microbatch, on average.

        All but a batch's first microbatch add their weight gradients to those before. A layer that folds does that
        inside its product, which writes them anyway.
        """
        if handled.folds and layer.kind == "matmul":
            whole = folded_backward_s(self.profile, layer, rows, handled.microbatches)
            return whole, whole * layer.weight_share
        whole = interpolate(self.profile.batch_sizes, layer.backward_s, rows)
        adding = self._step_s(layer.parameter_bytes) * ADD_SHARE * (handled.microbatches - 1) / handled.microbatches
        return whole + adding, whole * layer.weight_share + adding

    def _step_s(self, num_bytes: float) -> float:
        """The optimizer step of so many bytes of parameters."""
        return self.profile.optimizer_s * num_bytes / self._parameters[-1] if self._parameters[-1] else 0.0

    def forward_s(self, first: int, last: int, rows: float, speed: float = 1.0) -> float:
        """Forward."""
        sums = self.row_sums(rows).forward
        return (sums[last] - sums[first]) / speed

    def backward_s(
        self,
        first: int,
        last: int,
        rows: float,
        speed: float = 1.0,
        *,
        recompute: bool = False,
        handled: Handled = ONE,
    ) -> float:
        """Backward, with forward once more before it where the stage recomputes."""
        sums = self.row_sums(rows, handled).backward
        again = self.forward_s(first, last, rows, speed) if recompute else 0.0
        return (sums[last] - sums[first]) / speed + again

    def weight_gradient_s(
        self,
        first: int,
        last: int,
        rows: float,
        speed: float = 1.0,
        *,
        recompute: bool = False,
        handled: Handled = ONE,
    ) -> float:
        """The part of backward that only the weights' gradients need (action W; I is the rest).

        In the first stage that is all of it: nobody asks for gradients of the model's inputs.
        """
        if first == 0:
            return self.backward_s(first, last, rows, speed, recompute=recompute, handled=handled)
        sums = self.row_sums(rows, handled).weight
        return (sums[last] - sums[first]) / speed

    def optimizer_s(self, first: int, last: int, speed: float = 1.0, *, versions: int = 1) -> float:
        """The optimizer step of some layers: their parameters' share of the whole one.

        With several versions the new one begins as a copy of the newest: COPY_SHARE of a step more.
        """
        copying = 1.0 if versions == 1 else 1.0 + COPY_SHARE
        return self._step_s(self.parameter_bytes(first, last)) * copying / speed

    def ready_shares(self, first: int, last: int, rows: float, num_buckets: int) -> tuple[float, ...]:
        """For each bucket the share of backward after which its gradients are complete.

        Buckets are equal in bytes and go from the last layer to the first, as backward does:

            layers    conv1 conv2 │ fc1        backward runs from right to left
            buckets   └──── 1 ────┴─┘└── 0 ──┘  bucket 1 waits for conv1, bucket 0 for fc1
        """
        sums = self.row_sums(rows).backward
        total_s, end_s = sums[last] - sums[first], sums[last]
        if not self.parameter_bytes(first, last) or total_s <= 0:
            return (1.0,) * num_buckets
        return tuple([(end_s - sums[low]) / total_s for low in self._bucket_layers(first, last, num_buckets)])

    def _bucket_layers(self, first: int, last: int, num_buckets: int) -> tuple[int, ...]:
        """For each bucket the layer in which its last byte lies: its parameters begin at or before it."""
        key = (first, last, num_buckets)
        if key not in self._buckets:
            size = self.parameter_bytes(first, last)
            ends = [self._parameters[last] - size * (number + 1) / num_buckets for number in range(num_buckets)]
            lows = (min(max(bisect_left(self._parameters, end + 1e-6) - 1, first), last - 1) for end in ends)
            self._buckets[key] = tuple(lows)
        return self._buckets[key]

    # wires

    def transfer_s(self, num_bytes: float, source: DeviceId, target: DeviceId) -> float:
        """One transfer alone on its path: Σ latency + bytes / slowest link."""
        return self.wires.latency_s(source, target) + num_bytes / self.wires.rate(source, target)

    def exchange_s(self, moves: Iterable[tuple[DeviceId, DeviceId, float]]) -> float:
        """Transfers that start together and share links."""
        return self.wires.exchange_s(moves)

    def reduce_s(self, num_bytes: float, devices: Sequence[DeviceId], num_buckets: int = 1) -> float:
        """An all-reduce among devices, alone on the wires, in buckets one after the other."""
        way = self.wires.collective(devices, num_bytes / num_buckets)
        return 0.0 if way is None else num_buckets * way.seconds(num_bytes / num_buckets)

    # bytes

    def parameter_bytes(self, first: int, last: int) -> int:
        """Bytes of the parameters, which are also those of their gradients."""
        return self._parameters[last] - self._parameters[first]

    def saved_bytes(self, first: int, last: int) -> float:
        """Bytes a row that forward leaves behind for backward."""
        return self._saved[last] - self._saved[first]

    def workspace_bytes(self, first: int, last: int) -> float:
        """Bytes a row that come and go: those of the layer that needs most."""
        return max(self._workspaces[first:last], default=0)

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
        device: Device | None = None,
    ) -> StageBytes:
        """The most that one replica of a stage holds, `rows` being those of its largest microbatch share.

        weights      parameters P and buffers           versions   (K − 1) P
        gradients    P; 2 P where reductions of one     optimizer  state_copies · P
                     batch overlap the next (K > 1)
        activations  rows · held · saved; with recompute only inputs are held, and one microbatch in full; held is at
                     least K on a device that sets memory aside for every batch that may be under way
        buffers      rows · (inputs and outputs, twice each: one on the wire, one at work); P more to reduce from
        workspace    rows · that of the hungriest layer     framework  as the device says
        """
        parameters = self.parameter_bytes(first, last)
        entering = self.crossings[first] if first else 0.0
        wire = 2 * rows * (entering + self.crossings[last])
        many = num_replicas > 1
        held = max(held, versions) if device is not None and device.sets_aside else held
        return StageBytes(
            weights=parameters + self._buffers[last] - self._buffers[first],
            versions=(versions - 1) * parameters,
            gradients=parameters * (2 if versions > 1 and many else 1),
            optimizer=self.state_copies * parameters,
            activations=math.ceil(rows * self.held_bytes(first, last, held, recompute, device)),
            buffers=math.ceil(wire) + (parameters if many else 0),
            workspace=math.ceil(rows * self.workspace_bytes(first, last)),
            framework=device.framework_bytes if device is not None else 0,
        )

    def held_bytes(
        self, first: int, last: int, held: int, recompute: bool = False, device: Device | None = None
    ) -> float:
        """Bytes a row of `held` microbatches' activations."""
        saved = self.saved_bytes(first, last) * (device.saved_factor if device is not None else 1.0)
        return held * self.crossings[first] + saved if recompute and held else held * saved


def _sums(values: Sequence[Number]) -> tuple[Number, ...]:
    return tuple(accumulate(values, initial=type(values[0])(0)))


def num_buckets(gradient_bytes: int) -> int:
    """How many buckets a stage's gradients make: several, so that only a small last one outlasts backward.

    None is larger than `BUCKET_BYTES`, and where there are not `BUCKETS` of these, none is smaller than a message that
    is worth sending.
    """
    return max(math.ceil(gradient_bytes / BUCKET_BYTES), min(BUCKETS, gradient_bytes // LEAST_BUCKET_BYTES), 1)


def held_microbatches(plan: Plan, stage: int) -> int:
    """How many microbatches' activations a replica of a stage holds at most, before `hold` bounds it.

        gpipe              all that it handles in a batch
        1f1b, zero-bubble  warm-up + 1: num_stages − stage under `split`, ceil(later replicas / own) + 1 under `rotate`
        interleaved        as 1f1b over all stages that are still to come
        no flush (K > 1)   at least the K batches that are under way

    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021, section 2.2, with the uneven warm-up.
    """
    later = plan.replicas[stage + 1 :]
    return held_count(plan, plan.replicas[stage], len(later), sum(later), plan.versions[stage])


class Pace(Protocol):
    """What a plan and a planner's setting share: how batches are cut up and ordered."""

    @property
    def num_microbatches(self) -> int: ...
    @property
    def route(self) -> Route: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def hold(self) -> int | None: ...


def held_count(pace: Pace, replicas: int, later_stages: int, later_replicas: int, versions: int) -> int:
    """`held_microbatches` of a stage with so many replicas, when only what comes after it is known."""
    count = pace.num_microbatches
    own = -(-count // replicas) if pace.route == "rotate" else count
    if pace.policy in ("gpipe", "dynamic"):
        wanted = own
    elif pace.route == "rotate":
        wanted = min(own, -(-later_replicas // replicas) + 1)
    else:
        wanted = min(own, later_stages + 1)
    wanted = max(wanted, versions)
    return wanted if pace.hold is None else min(wanted, pace.hold)
