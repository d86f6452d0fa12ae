"""What all stages of a plan share, and what all estimates for a cluster do: groups that are wired alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, Self

from stagewright.cluster import DeviceId, Devices
from stagewright.cost import Costs
from stagewright.plan import DEFAULT_POLICY, Plan, Policy, Route, overlaps, parse_staleness
from stagewright.policy import RULES, held

FLUSHED = "0"
"""The staleness of exact training."""


class Savings(NamedTuple):
    """What a stage does without to hold less."""

    recompute: bool = False
    shard_optimizer: bool = False

    @classmethod
    def to_try(cls, recompute: bool | None, shard_optimizer: bool | None) -> Iterator[Self]:
        """Those that a wish leaves open, the cheapest first: sharing states out costs next to nothing."""
        for again in (False, True) if recompute is None else (recompute,):
            for shards in (False, True) if shard_optimizer is None else (shard_optimizer,):
                yield cls(again, shards)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all stages of a plan share."""

    batch: int
    num_microbatches: int = 1
    route: Route = "split"
    policy: Policy = DEFAULT_POLICY
    hold: int | None = None
    recompute: bool | None = None
    """None: in the stages that would not fit otherwise."""
    staleness: str = FLUSHED
    shard_optimizer: bool | None = None
    """None: in the stages that would not fit otherwise."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The setting of a plan."""
        return cls(
            batch=plan.batch, num_microbatches=plan.num_microbatches, route=plan.route, policy=plan.policy,
            hold=plan.hold, staleness=",".join(map(str, plan.versions)),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """Rows of the largest microbatch."""
        return -(-self.batch // self.num_microbatches)

    @cached_property
    def listed_versions(self) -> tuple[int, ...] | None:
        """Versions that are given stage by stage."""
        known = self.staleness in (FLUSHED, "none", "ssp", "2bw")
        return None if known else parse_staleness(self.staleness, self.staleness.count(",") + 1)

    def versions(self, later: int) -> int | None:
        """K of a stage with so many stages after it; None where none is given."""
        if self.listed_versions is not None:
            return self.listed_versions[-1 - later] if later < len(self.listed_versions) else None
        return parse_staleness(self.staleness, later + 1)[0]

    def reach(self, later: int) -> int:
        """Of how many batches a stage with so many after it may have activations, as `policy.reach` says."""
        if self.listed_versions is not None:
            return min(self.listed_versions[: len(self.listed_versions) - later])
        return self.versions(later) or 1

    def held(self, later: int, replicas: int, later_replicas: int) -> int:
        """`policy.holds` of one stage, for a search that goes from the last stage on and so knows only later ones.

        The same number, with two exceptions that only the whole plan can tell: with `hold` it is no less than the
        truth, and with a backward in halves it is what 1f1b holds there.
        """
        num, depth = self.num_microbatches, self.reach(later)
        width, after = (replicas, later_replicas) if self.route == "rotate" else (1, later)
        if RULES[self.policy].all_forwards_first:
            return -(-num // width) * depth
        if self.hold is not None and later:
            return min(self.hold, -(-num // width) * depth)
        return held(num, width, -(-after // width) * width, depth)

    def is_flushed(self, num_stages: int) -> bool:
        """Whether every stage keeps one version."""
        return all(self.versions(later) == 1 for later in range(num_stages))


class ClusterRates:
    """What estimators of one cluster share, whatever their settings: devices wired alike, rates between groups."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.twins = costs, find_twins(costs)
        self.reduce_s = cache(costs.reduce_s)
        """An all-reduce of bytes among devices in buckets, alone on the wires."""
        self.looks = cache(lambda devices: tuple(self.twins[id][0] for id in devices))
        """The first twin of each device: equal for groups that take as long for anything."""
        self.lowest = cache(self._lowest)
        self.split_rates, self.rotate_rates = cache(self._split_rates), cache(self._rotate_rates)

    def _lowest(self, devices: Devices) -> Devices:
        """The group that is wired alike and has the lowest numbers."""
        members = (id for twins, count in Counter(self.twins[id] for id in devices).items() for id in twins[:count])
        return tuple(sorted(members))

    def _split_rates(
        self, sources: Devices, targets: Devices, left: tuple[float, ...], right: tuple[float, ...]
    ) -> tuple[float, float, float]:
        """Latency, and seconds a byte of a microbatch and of a batch, where replicas hold rows between such edges."""
        parts = (list(zip(ids, edges, edges[1:])) for ids, edges in ((sources, left), (targets, right)))
        moves = [(source, target, stop - start) for source, target, start, stop in overlaps(*parts)]
        latency = self.costs.network.exchange_s((source, target, 0.0) for source, target, _ in moves)
        unit = self.costs.network.exchange_s(moves) - latency
        return latency, unit, unit

    def _rotate_rates(self, sources: Devices, targets: Devices, num_microbatches: int) -> tuple[float, float, float]:
        """The same, where whole microbatches go round the replicas: the slowest pair, and all pairs together."""
        network, count = self.costs.network, min(num_microbatches, math.lcm(len(sources), len(targets)))
        pairs = [(sources[n % len(sources)], targets[n % len(targets)]) for n in range(count)]
        latency = max(network.latency_s(*pair) for pair in pairs)
        every = network.exchange_s((*pair, 1 / count) for pair in pairs) - latency
        return latency, max(1 / network.rate(*pair) for pair in pairs), every


def find_twins(costs: Costs) -> dict[DeviceId, Devices]:
    """For each device those that could take its place: of one kind, with equal wires to the same nodes."""
    cluster = costs.cluster
    looks: dict[object, list[DeviceId]] = {}
    wires: dict[str, list[tuple[str, float, float]]] = {}
    for link in cluster.wires:
        for here, there in (link.ends, link.ends[::-1]):
            wires.setdefault(here, []).append((there, link.bytes_per_s, link.latency_s))
    for id in cluster.device_ids:
        look = (id.host, cluster.device(id), tuple(sorted(wires.get(str(id), []))))
        looks.setdefault(look, []).append(id)
    return {id: tuple(twins) for twins in looks.values() for id in twins}
