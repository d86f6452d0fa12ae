"""Schedules in the CSV format of torch.distributed.pipelining: a row a rank, cells such as `0F3`, `1SEND_B2`.

That format knows one worker a stage, one batch, and no rows. A schedule whose stages all have the same number of
replicas, each with its own share of every microbatch, is so many pipelines side by side; one of them is written.
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Iterator

from stagewright.cluster import DeviceId
from stagewright.errors import ScheduleError
from stagewright.plan import Plan
from stagewright.schedule import COMPUTE, TRANSFERS, Action, Kind, Schedule
from stagewright.scheduling.lower import lower
from stagewright.scheduling.routing import make_routes
from stagewright.scheduling.sketch import placed_plan
from stagewright.scheduling.timing import Timed, Timing, unit_costs

_COMMS = {
    Kind.SEND_FORWARD: "SEND_F",
    Kind.RECEIVE_FORWARD: "RECV_F",
    Kind.SEND_BACKWARD: "SEND_B",
    Kind.RECEIVE_BACKWARD: "RECV_B",
}
_CELL = re.compile(r"(\d{1,6})(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d{0,6})", re.ASCII)
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def write_csv(schedule: Schedule, comms: bool = False) -> str:
    """The schedule of one pipeline, with sends and receipts if wanted."""
    column = _one_pipeline(schedule.plan)
    text = io.StringIO()
    writer = csv.writer(text)
    for worker in column:
        wanted = COMPUTE | TRANSFERS if comms else COMPUTE
        writer.writerow([_cell(action) for action in schedule.orders[worker] if action.kind in wanted])
    return text.getvalue()


def _one_pipeline(plan: Plan) -> list[int]:
    """The workers of the first replicas, by their first stage; refuses a plan that is not rectangular."""
    todo = "write the schedule itself with -o, or use one replica a stage"
    if not plan.is_synchronous:
        raise ScheduleError(
            f"the CSV format knows one batch with a flush, but the plan keeps versions {plan.versions}", todo
        )
    if len(set(plan.replicas)) > 1 or (plan.route == "rotate" and plan.replicas[0] > 1):
        raise ScheduleError(
            f"the CSV format knows one worker a stage, but the plan has {plan.replicas} with route {plan.route}", todo
        )
    homes = {(worker, replica) for workers in plan.workers for replica, worker in enumerate(workers)}
    passing = (part for stage in range(len(plan.stages) - 1) for part in plan.transfers(stage, 0))
    if len(homes) > len(plan.devices) or any(source != target for source, target, _, _ in passing):
        raise ScheduleError(f"placement {plan.placement} does not fall into pipelines side by side", todo)
    return list(dict.fromkeys(workers[0] for workers in plan.workers))


def _cell(action: Action) -> str:
    """`0F3`; a receipt is written with the stage that receives."""
    kind, stage, _, number, _ = action
    if kind is Kind.RECEIVE_FORWARD:
        stage += 1
    elif kind is Kind.RECEIVE_BACKWARD:
        stage -= 1
    return f"{stage}{_COMMS.get(kind, kind.value)}{number}"


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
    plan = placed_plan(
        [(DeviceId(0, ranks[0]),) for ranks in homes],
        num_microbatches=num,
        batch=batch,
        policy="zero-bubble" if halves else "interleaved" if len(orders) < len(stages) else "1f1b",
    )
    timing = _time_orders(plan, [order for order in orders if order])
    return Schedule(plan=plan, orders=lower(plan, make_routes(plan), timing))


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
    timed: list[Timed] = []
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
            raise ScheduleError(f"row {row} of the CSV file waits for ever at {_cell(queues[row][0])}")
    lasts = [max(one.stop for one in timed if one.stage == stage) for stage in range(len(plan.stages))]
    timed += (Timed(last, last, Kind.UPDATE, stage, 0, -1) for stage, last in enumerate(lasts))
    return Timing(timed, 0, [], max(lasts))


def _ready(action: Action, stops: dict[tuple[Kind, int, int], int], num_stages: int) -> int | None:
    """When the input of an action is there, None if nobody has made it yet."""
    kind, stage, _, number, _ = action
    if kind is Kind.FORWARD:
        return stops.get((Kind.FORWARD, stage - 1, number)) if stage else 0
    if kind is Kind.BACKWARD_WEIGHT or stage == num_stages - 1:
        return 0
    return stops.get((Kind.BACKWARD, stage + 1, number))


def _timed(action: Action, start: int) -> Timed:
    stop = start + round(unit_costs(action.kind, action.stage, 0))
    return Timed(start, stop, action.kind, action.stage, 0, action.microbatch)
