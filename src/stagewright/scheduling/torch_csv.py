"""Schedules in the CSV format of torch.distributed.pipelining: a row a rank, cells such as `0F3`, `1SEND_B2`.

That format knows one worker a stage, one batch, and no rows. A schedule whose stages all have the same number of
replicas, each with its own share of every microbatch, is so many pipelines side by side; one of them is written.
"""

from __future__ import annotations

import csv
import io

from stagewright.errors import ScheduleError
from stagewright.plan import Plan
from stagewright.schedule import COMPUTE, TRANSFERS, Action, Kind, Schedule

_COMMS = {
    Kind.SEND_FORWARD: "SEND_F",
    Kind.RECEIVE_FORWARD: "RECV_F",
    Kind.SEND_BACKWARD: "SEND_B",
    Kind.RECEIVE_BACKWARD: "RECV_B",
}


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
