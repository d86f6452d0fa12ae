"""Schedules to look at: of a plan without a model; over time, as text and as a picture; in PyTorch's CSV format."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from html import escape

from stagewright.cluster import DeviceId
from stagewright.errors import PlanError, ScheduleError
from stagewright.plan import DEFAULT_POLICY, Plan, Policy, Route, Stage
from stagewright.schedule import COMPUTE, TRANSFERS, Action, Kind, Schedule
from stagewright.scheduling.ideal import TimedAction, run_ideally

_COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f2a541",
    Kind.BACKWARD_INPUT: "#f2a541",
    Kind.BACKWARD_WEIGHT: "#72a98f",
}


def parse_replicas(text: str) -> tuple[int, ...]:
    """The replicas of each stage that `7,1` names."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 4 for part in parts):
        raise ScheduleError(f"--replicas {text}: expected a number for each stage, such as 7,1")
    return tuple(int(part) for part in parts)


def sketch_plan(
    stages: Sequence[int | Sequence[DeviceId]],
    *,
    num_microbatches: int = 1,
    batch: int | None = None,
    policy: Policy = DEFAULT_POLICY,
    route: Route = "split",
) -> Plan:
    """A plan with a nameless layer a stage, on the given devices or on so many of its own.

    Without `batch` a microbatch has a row for every replica of the widest stage.
    """
    placement: list[tuple[DeviceId, ...]] = []
    for number, stage in enumerate(stages or (0,)):
        first = sum(map(len, placement))
        devices = [DeviceId(0, first + one) for one in range(stage)] if isinstance(stage, int) else stage
        if not devices:
            raise ScheduleError(f"stage {number} has {stage} replicas: expected at least 1 in every stage")
        placement.append(tuple(devices))
    made = tuple(Stage(layers=(f"layer{number}",), devices=devices) for number, devices in enumerate(placement))
    rows = max(1, num_microbatches) * max(map(len, placement)) if batch is None else batch
    try:
        return Plan(
            model="sketch", stages=made, batch=rows, num_microbatches=num_microbatches, policy=policy, route=route
        )
    except PlanError as fault:
        raise ScheduleError(fault.what, fault.todo) from None


def timed_grid(schedule: Schedule, num_batches: int | None = None) -> str:
    """Compute over time with free transfers, forward taking one column, backward two; idle time is blank.

    0 │ F0 F1       B0──  B1──
    1 │    F0 B0── F1 B1──
    """
    num_batches = schedule.num_batches_drawn if num_batches is None else num_batches
    run = run_ideally(schedule, num_batches)
    labels = [
        [(span, schedule.cell(span.action, num_batches)) for span in spans if span.stop > span.start]
        for spans in run.spans
    ]
    unit = 1 + max((len(label) for row in labels for _, label in row), default=1)
    width = len(str(len(labels) - 1))
    return "\n".join(f"{worker:>{width}} │ {_timed_row(row, unit)}".rstrip() for worker, row in enumerate(labels))


def _timed_row(row: list[tuple[TimedAction, str]], unit: int) -> str:
    line = ""
    for span, label in row:
        length = round(span.stop - span.start) * unit - 1
        line += " " * (round(span.start) * unit - len(line)) + label.ljust(length, "─" if length >= unit else " ") + " "
    return line.rstrip()


def draw_svg(schedule: Schedule, num_batches: int | None = None) -> str:
    """The timed grid as an SVG picture: a row a worker, a box an action, its name in the box and in its tooltip."""
    num_batches = schedule.num_batches_drawn if num_batches is None else num_batches
    run = run_ideally(schedule, num_batches)
    scale = 28 / min(
        (span.stop - span.start for spans in run.spans for span in spans if span.stop > span.start), default=1
    )
    width, height = f"{48 + run.length * scale + 4:.0f}", len(run.spans) * 26 + 4
    rows = (_row(schedule, worker, spans, num_batches, scale) for worker, spans in enumerate(run.spans))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(schedule.plan.policy)}, {escape(schedule.plan.placement)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(line for row in rows for line in row),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _row(
    schedule: Schedule, worker: int, spans: list[TimedAction], num_batches: int, scale: float, margin: int = 48
) -> Iterator[str]:
    top = 4 + worker * 26
    yield f'<text x="{margin - 8}" y="{top + 15}" text-anchor="end">{worker}</text>'
    for start, stop, action in spans:
        if stop > start:
            left, width, label = (
                margin + start * scale, (stop - start) * scale, escape(schedule.cell(action, num_batches)),
            )  # fmt: skip
            yield (
                f'<rect x="{left:.1f}" y="{top}" width="{width - 1:.1f}" height="22" rx="2" '
                f'fill="{_COLOURS[action.kind]}"><title>{label} {start:g} – {stop:g}</title></rect>'
                f'<text x="{left + width / 2:.1f}" y="{top + 15}" text-anchor="middle" fill="white">{label}</text>'
            )


_COMMS = {
    Kind.SEND_FORWARD: "SEND_F", Kind.RECEIVE_FORWARD: "RECV_F", Kind.SEND_BACKWARD: "SEND_B",
    Kind.RECEIVE_BACKWARD: "RECV_B",
}  # fmt: skip


def write_csv(schedule: Schedule, comms: bool = False) -> str:
    """The schedule as CSV, with sends and receipts if wanted: a row a rank, cells such as `0F3`, `1SEND_B2`.

    That format knows one worker a stage, one batch, and no rows. A schedule whose stages all have the same number of
    replicas, each with its own share of every microbatch, is so many pipelines side by side; one of them is written.
    """
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
