"""A plan's routing, microbatch by microbatch: who works on it, and who passes rows to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stagewright.plan import Plan, overlaps
from stagewright.schedule import Kind

_Peers = Sequence[Sequence[dict[int, tuple[int, ...]]]]

Result = tuple[bool, int, int, int]
"""What a replica makes of a microbatch: (whether forward, stage, microbatch, replica)."""


class Routes(NamedTuple):
    """Who works on each microbatch, and who passes rows on to whom."""

    own: Sequence[Sequence[tuple[int, ...]]]
    """own[stage][microbatch]: the replicas that work on it."""
    sources: _Peers
    """sources[stage][microbatch]: for each replica those of the stage before that it receives from."""
    targets: _Peers
    """targets[stage][microbatch]: for each replica those of the next stage that it sends to."""

    def needs(self, kind: Kind, stage: int, microbatch: int, replica: int) -> list[Result]:
        """What compute waits for; the weights' half of backward waits for nothing that others make."""
        if kind is Kind.BACKWARD_WEIGHT:
            return []
        is_forward = kind is Kind.FORWARD
        peers, other = (self.sources, stage - 1) if is_forward else (self.targets, stage + 1)
        return [(is_forward, other, microbatch, peer) for peer in peers[stage][microbatch].get(replica, ())]

    def users(self, kind: Kind, stage: int, microbatch: int, replica: int) -> tuple[int, tuple[int, ...]]:
        """The stage that waits for what an action makes, and the replicas there."""
        if kind not in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return stage, ()
        peers, other = (self.targets, stage + 1) if kind is Kind.FORWARD else (self.sources, stage - 1)
        return other, peers[stage][microbatch].get(replica, ())


def make_routes(plan: Plan) -> Routes:
    """The routing of every microbatch; those of equal size share one pattern."""
    known = {pattern: _route(plan, number) for pattern, number in dict(zip(plan.patterns, range(plan.batch))).items()}
    found = [known[pattern] for pattern in plan.patterns]
    stages = range(len(plan.stages))
    return Routes(*([[one[part][stage] for one in found] for stage in stages] for part in range(3)))  # type: ignore[arg-type]


def _route(plan: Plan, microbatch: int) -> tuple[list[object], list[object], list[object]]:
    """One microbatch's part of `Routes`, by stage."""
    shares = [plan.shares(stage, microbatch) for stage in range(len(plan.stages))]
    own: list[object] = [tuple(one.replica for one in some) for some in shares]
    links = [[part[:2] for part in overlaps(*two)] for two in zip(shares, shares[1:])]
    sources = [{}, *(_grouped((target, source) for source, target in pairs) for pairs in links)]
    return own, list(sources), [*map(_grouped, links), {}]


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """For each first number the second ones that stand with it."""
    table: dict[int, tuple[int, ...]] = {}
    for first, second in pairs:
        table[first] = (*table.get(first, ()), second)
    return table
