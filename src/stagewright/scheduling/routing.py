"""A plan's routing, microbatch by microbatch: who works on it, and who passes rows to whom."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stagewright.plan import Plan, overlaps

_Peers = tuple[tuple[dict[int, tuple[int, ...]], ...], ...]


class Routes(NamedTuple):
    """Who works on each microbatch, and who passes rows on to whom."""

    own: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    """own[stage][microbatch]: (replica, number of rows) of everyone who works on it."""
    links: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    """links[stage][microbatch]: (replica of the stage, replica of the next stage) wherever rows pass."""
    targets: _Peers
    """targets[stage][microbatch]: for each replica those of the next stage that it sends to."""
    sources: _Peers
    """sources[stage][microbatch]: for each replica of the next stage those of the stage that it receives from."""


def make_routes(plan: Plan) -> Routes:
    """The routing of every microbatch; those of equal size share one pattern."""
    known = {pattern: _route(plan, number) for pattern, number in dict(zip(plan.patterns, range(plan.batch))).items()}
    found = [known[pattern] for pattern in plan.patterns]
    stages = range(len(plan.stages))
    return Routes(
        own=tuple(tuple(one.own[stage] for one in found) for stage in stages),
        links=tuple(tuple(one.links[stage] for one in found) for stage in stages[:-1]),
        targets=tuple(tuple(one.targets[stage] for one in found) for stage in stages[:-1]),
        sources=tuple(tuple(one.sources[stage] for one in found) for stage in stages[:-1]),
    )


class _Route(NamedTuple):
    """One microbatch's part of `Routes`, by stage."""

    own: list[tuple[tuple[int, int], ...]]
    links: list[tuple[tuple[int, int], ...]]
    targets: list[dict[int, tuple[int, ...]]]
    sources: list[dict[int, tuple[int, ...]]]


def _route(plan: Plan, microbatch: int) -> _Route:
    shares = [plan.shares(stage, microbatch) for stage in range(len(plan.stages))]
    own = [tuple((one.replica, one.stop - one.start) for one in some) for some in shares]
    links = [tuple((source, target) for source, target, _, _ in overlaps(*two)) for two in zip(shares, shares[1:])]
    back = [[(target, source) for source, target in pairs] for pairs in links]
    return _Route(own, links, list(map(_grouped, links)), list(map(_grouped, back)))


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """For each first number the second ones that stand with it."""
    table: dict[int, tuple[int, ...]] = {}
    for first, second in pairs:
        table[first] = (*table.get(first, ()), second)
    return table
