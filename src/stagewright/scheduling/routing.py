"""Which replica handles which rows, and which rows travel between which replicas.

stage 0, two replicas   │ rows 0 1 2 │ rows 3 4 5 │
stage 1, three replicas │ rows 0 1 │ 2 3 │ 4 5 │        0 → 0, 0 → 1, 1 → 1, 1 → 2: each row once
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stagewright.errors import ScheduleError
from stagewright.plan import Plan, Share, microbatch_rows
from stagewright.schedule import SENDS, TRANSFERS, Action, Kind


class Transfer(NamedTuple):
    """The rows start … stop − 1 of a batch, from one replica of a stage to one of the next."""

    source: int
    target: int
    start: int
    stop: int


_Peers = tuple[tuple[dict[int, tuple[int, ...]], ...], ...]


class Routes(NamedTuple):
    """A plan's routing, microbatch by microbatch, for those who need all of it."""

    own: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    """own[stage][microbatch]: (replica, number of rows) of everyone who works on it."""
    links: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    """links[stage][microbatch]: (replica of the stage, replica of the next stage) wherever rows pass."""
    targets: _Peers
    """targets[stage][microbatch]: for each replica those of the next stage that it sends to."""
    sources: _Peers
    """sources[stage][microbatch]: for each replica of the next stage those of the stage that it receives from."""


def overlaps(sources: Sequence[Share], targets: Sequence[Share]) -> tuple[Transfer, ...]:
    """The rows that each pair of shares has in common; both lists are in the order of the rows."""
    found: list[Transfer] = []
    left = right = 0
    while left < len(sources) and right < len(targets):
        source, target = sources[left], targets[right]
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            found.append(Transfer(source.replica, target.replica, start, stop))
        if source.stop <= target.stop:
            left += 1
        if target.stop <= source.stop:
            right += 1
    return tuple(found)


def transfers(plan: Plan, boundary: int, microbatch: int, rows: int | None = None) -> tuple[Transfer, ...]:
    """What passes from stage `boundary` to the next for a microbatch, parts that stay on one worker included.

    `rows` is the size of the batch where it differs from the plan's.
    """
    return overlaps(plan.shares(boundary, microbatch, rows), plan.shares(boundary + 1, microbatch, rows))


def rows_between(
    plan: Plan, boundary: int, microbatch: int, source: int, target: int, rows: int | None = None
) -> tuple[int, int]:
    """First row and end of what replica `source` of a stage sends to `target` of the next; (0, 0) is nothing."""
    for transfer in transfers(plan, boundary, microbatch, rows):
        if transfer.source == source and transfer.target == target:
            return transfer.start, transfer.stop
    return 0, 0


def action_rows(plan: Plan, worker: int, action: Action, rows: int | None = None) -> tuple[int, int]:
    """First row and end of what an action of a worker computes on, sends or receives; (0, 0) is nothing."""
    kind, stage, _, microbatch, peer = action
    if kind not in TRANSFERS:
        mine, shares = _replica_of(plan, stage, worker), plan.shares(stage, microbatch, rows)
        return next(((share.start, share.stop) for share in shares if share.replica == mine), (0, 0))
    # The stage is the sender's at both ends; activations go to the stage after it, gradients to the one before.
    sender, receiver = (worker, peer) if kind in SENDS else (peer, worker)
    if kind is Kind.SEND_FORWARD or kind is Kind.RECEIVE_FORWARD:
        ends = _replica_of(plan, stage, sender), _replica_of(plan, stage + 1, receiver)
        return rows_between(plan, stage, microbatch, *ends, rows)
    ends = _replica_of(plan, stage - 1, receiver), _replica_of(plan, stage, sender)
    return rows_between(plan, stage - 1, microbatch, *ends, rows)


def _replica_of(plan: Plan, stage: int, worker: int) -> int:
    """Which replica of a stage a worker holds."""
    if not 0 <= stage < len(plan.stages) or worker not in plan.workers[stage]:
        raise ScheduleError(f"worker {worker} holds no replica of stage {stage}: the placement is {plan.placement}")
    return plan.workers[stage].index(worker)


def make_routes(plan: Plan) -> Routes:
    """The routing of every microbatch; those of equal size share one pattern."""
    kinds = [_pattern(plan, number) for number in range(plan.num_microbatches)]
    first = {kind: number for number, kind in enumerate(kinds)}
    known = {kind: _route(plan, number) for kind, number in first.items()}
    found = [known[kind] for kind in kinds]
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
    passing = [overlaps(some, others) for some, others in zip(shares, shares[1:])]
    links = [tuple((part.source, part.target) for part in parts) for parts in passing]
    back = [[(target, source) for source, target in pairs] for pairs in links]
    return _Route(own, links, list(map(_grouped, links)), list(map(_grouped, back)))


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """For each first number the second ones that stand with it."""
    table: dict[int, tuple[int, ...]] = {}
    for first, second in pairs:
        table[first] = (*table.get(first, ()), second)
    return table


def _pattern(plan: Plan, microbatch: int) -> tuple[int, int]:
    """What the routing of a microbatch depends on: its size and, where microbatches go round, its number."""
    start, stop = microbatch_rows(plan.batch, plan.num_microbatches, microbatch)
    return stop - start, microbatch if plan.route == "rotate" else 0
