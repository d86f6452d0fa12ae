"""Compute in order → every action of every worker: receipts, sends, reductions, agreement, updates.

Everything is put in order by its ideal time. A transfer has the time at which its source is ready, at both ends, and
ties are broken by the same key at both ends: so two workers issue what passes between them in the same sequence, and
nothing waits for anything later, whether sends are buffered or must meet their receipts.
"""

from __future__ import annotations

from typing import NamedTuple

from stagewright.plan import Plan
from stagewright.schedule import COMPUTE, TRANSFERS, Action, Kind, Order
from stagewright.scheduling.orders import Timing, users


def _rank(kind: Kind) -> int:
    """What comes first of things that happen at the same time on one worker."""
    return 0 if kind in TRANSFERS else {Kind.REDUCE: 1, Kind.AGREE: 2, Kind.UPDATE: 3}.get(kind, 4)


class _Entry(NamedTuple):
    """An action with the key that orders it: the same at both ends of a transfer."""

    time: int
    rank: int
    is_forward: bool
    stage: int
    microbatch: int
    source: int
    target: int
    kind: Kind
    peer: int


def lower(plan: Plan, timing: Timing, agree: bool = False) -> tuple[Order, ...]:
    """The order of each worker."""
    lists: list[list[_Entry]] = [[] for _ in plan.devices]
    _add_compute(lists, plan, timing)
    _add_reductions(lists, plan, timing)
    starts = [1 << 60] * len(plan.devices)
    # The moment between two turns of a worker is the earliest at which one of its stages is through with one.
    for (stage, replica), end in timing.ends.items():
        worker = plan.workers[stage][replica]
        starts[worker] = min(starts[worker], end - timing.period)
    if agree:
        for entries in lists:
            entries.append(_whole_batch(Kind.AGREE, timing.agreed, -1))
    return tuple(_fold(entries, timing.period, start) for entries, start in zip(lists, starts))


def _add_compute(lists: list[list[_Entry]], plan: Plan, timing: Timing) -> None:
    """Adds forwards, backwards and updates, and a send and a receipt wherever rows pass from one worker to another."""
    for start, stop, kind, stage, replica, number in timing.timed:
        is_forward, source = kind is Kind.FORWARD, plan.workers[stage][replica]
        lists[source].append(_Entry(start, _rank(kind), True, stage, number, -1, -1, kind, -1))
        send = Kind.SEND_FORWARD if is_forward else Kind.SEND_BACKWARD
        receive = Kind.RECEIVE_FORWARD if is_forward else Kind.RECEIVE_BACKWARD
        for target in users(plan, kind, stage, number, replica):
            if source != target:
                lists[source].append(_Entry(stop, 0, is_forward, stage, number, source, target, send, target))
                lists[target].append(_Entry(stop, 0, is_forward, stage, number, source, target, receive, source))


def _add_reductions(lists: list[list[_Entry]], plan: Plan, timing: Timing) -> None:
    """Adds the reductions after each replica's last backward.

    A worker with several stages reduces them in the order in which all of their replicas are done, which is the same
    order on every worker that shares two of them.
    """
    last: dict[tuple[int, int], int] = {}
    for _, stop, kind, stage, replica, _ in timing.timed:
        if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            last[stage, replica] = max(stop, last.get((stage, replica), stop))
    for number, workers in enumerate(plan.workers):
        done = max(stop for (stage, _), stop in last.items() if stage == number)
        for replica, worker in enumerate(workers) if len(workers) > 1 else ():
            # A replica without rows waits for the others, too.
            own = done if len(plan.stages_of[worker]) > 1 else last.get((number, replica), done)
            lists[worker].append(_whole_batch(Kind.REDUCE, own, number))


def _whole_batch(kind: Kind, time: int, stage: int) -> _Entry:
    return _Entry(time, _rank(kind), True, stage, -1, -1, -1, kind, -1)


def _fold(entries: list[_Entry], period: int, start: int) -> Order:
    """The endless list that entries make, repeated every period, cut to the one turn from `start` on."""
    if not period:
        return tuple(Action(one.kind, one.stage, 0, one.microbatch, one.peer) for one in sorted(entries))
    moved = []
    for one in entries:
        batch = -((one.time - start) // period)
        if one.kind not in COMPUTE and (one.time - start) % period == 0:
            # At the moment between two turns compute belongs to the new one, all else to the old one.
            batch += 1
        moved.append((one._replace(time=one.time + batch * period), batch))
    return tuple(Action(one.kind, one.stage, batch, one.microbatch, one.peer) for one, batch in sorted(moved))
