"""Reads the CSV files of torch.distributed.pipelining, its own and ours, as schedules to check and to carry out."""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Iterator

from stagewright.cluster import DeviceId
from stagewright.errors import ScheduleError
from stagewright.plan import Plan
from stagewright.schedule import Action, Kind, Schedule
from stagewright.scheduling.drawing import sketch_plan
from stagewright.scheduling.lower import lower
from stagewright.scheduling.orders import Timing, _flushed, _Timed

_CELL = re.compile(r"(\d{1,6})(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d{0,6})", re.ASCII)
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def read_csv(text: str, batch: int | None = None) -> Schedule:
    """The schedule of a CSV file; sends, receipts and all else but compute are worked out anew."""
    orders = [list(_row_actions(row)) for row in csv.reader(io.StringIO(text)) if row]
    stages = sorted({action.stage for order in orders for action in order})
    if not stages or stages != list(range(len(stages))):
        raise ScheduleError(f"the CSV file names stages {stages}: expected 0, 1, 2 … without gaps")
    homes = [
        [rank for rank, order in enumerate(orders) if any(one.stage == stage for one in order)] for stage in stages
    ]
    for stage, ranks in enumerate(homes):
        if len(ranks) > 1:
            raise ScheduleError(f"stage {stage} is in rows {ranks} of the CSV file: expected one row a stage")
    num = 1 + max(action.microbatch for order in orders for action in order)
    halves = any(action.kind is Kind.BACKWARD_WEIGHT for order in orders for action in order)
    plan = sketch_plan(
        [(DeviceId(0, ranks[0]),) for ranks in homes],
        num_microbatches=num,
        batch=batch,
        policy="zero-bubble" if halves else "interleaved" if len(orders) < len(stages) else "1f1b",
    )
    timing = _time_orders(plan, [order for order in orders if order])
    return Schedule(plan=plan, orders=lower(plan, timing))


def _row_actions(row: list[str]) -> Iterator[Action]:
    """The compute in a row's cells; two that overlap come one after the other."""
    for text in row:
        inner = _OVERLAPPED.fullmatch(text.strip())
        for word in inner[1].split(";") if inner else [text]:
            if not word.strip():
                continue
            match = _CELL.fullmatch(word.strip())
            if match is None:
                raise ScheduleError(f"CSV cell {word[:40]!r} cannot be read: expected one like 0F3, 1B0 or 2SEND_F1")
            if len(match[2]) == 1:
                if not match[3]:
                    raise ScheduleError(f"CSV cell {word!r} lacks its microbatch: expected one like 0F3")
                yield Action(Kind(match[2]), int(match[1]), 0, int(match[3]))


def _time_orders(plan: Plan, orders: list[list[Action]]) -> Timing:
    """The ideal times of given orders of compute, one worker a stage; an order that locks itself is refused."""
    stops: dict[tuple[Kind, int, int], int] = {}
    timed: list[_Timed] = []
    free, queues = [0] * len(orders), [deque(order) for order in orders]
    while any(queues):
        before = len(timed)
        for worker, queue in enumerate(queues):
            while queue and (ready := _ready(queue[0], stops, len(plan.stages))) is not None:
                timed.append(_timed(queue.popleft(), max(ready, free[worker])))
                _, free[worker], kind, stage, _, number = timed[-1]
                stops[Kind.BACKWARD if kind is Kind.BACKWARD_INPUT else kind, stage, number] = free[worker]
        if len(timed) == before:
            row = next(number for number, queue in enumerate(queues) if queue)
            raise ScheduleError(f"row {row} of the CSV file waits for ever at {queues[row][0]}")
    return _flushed(plan, timed)


def _ready(action: Action, stops: dict[tuple[Kind, int, int], int], num_stages: int) -> int | None:
    """When the input of an action is there, None if nobody has made it yet."""
    kind, stage, _, number, _ = action
    if kind is Kind.FORWARD:
        return stops.get((Kind.FORWARD, stage - 1, number)) if stage else 0
    if kind is Kind.BACKWARD_WEIGHT or stage == num_stages - 1:
        return 0
    return stops.get((Kind.BACKWARD, stage + 1, number))


def _timed(action: Action, start: int) -> _Timed:
    stop = start + (2 if action.kind is Kind.BACKWARD else 1)
    return _Timed(start, stop, action.kind, action.stage, 0, action.microbatch)
