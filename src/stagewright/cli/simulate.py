"""`stagewright simulate`: what a plan would do on hardware that is not here, and where its time would go."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field

from stagewright.cli.options import Hardware, names_file, takes
from stagewright.cli.show import saved, show, show_json, table
from stagewright.cluster import Cluster, format_devices, format_placement
from stagewright.errors import PlanError, UsageError
from stagewright.memory import in_words
from stagewright.plan import Plan
from stagewright.planning import PlanOptions
from stagewright.record import Record
from stagewright.report import chrome_trace, timeline_svg
from stagewright.report.figures import alike, amount, rate_unit, seconds, speed, too_full
from stagewright.schema import schema, write_whole
from stagewright.simulation import faster_links
from stagewright.simulation.run import IMAGENET_IMAGES
from stagewright.simulation.whatif import Point, Scenario, knee, parse_factors, plot_svg

_Counts = tuple[Annotated[int, Field(ge=1)], ...]


@schema(error=UsageError)
class _Simulation(Hardware):
    profile: Path | None = None
    """a profile file; else an analytic one of the devices"""
    batch: _Counts = ()
    """rows of a step; several, 256,512, are a sweep"""
    data: Literal["synthetic", "records"] = "synthetic"
    """made up, or limited by the hosts' decode rate"""
    epoch_images: int = Field(default=IMAGENET_IMAGES, ge=1)
    """images of an epoch"""
    bandwidth: str | None = None
    """links ×2, or a sweep: x1,x2,x4"""
    devices: _Counts = ()
    """data parallel on the first n: 8, or 1,2,4,8"""
    json: bool = False
    """print the figures as JSON"""
    trace: Path | None = None
    """save a Chrome/Perfetto trace here"""
    timeline: Path | None = None
    """save a picture of the timeline (SVG) here"""
    plot: Path | None = None
    """save a plot of the sweep (SVG) here"""
    out: Path | None = None
    """save the record here"""


@takes()
def simulate(
    what: Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="a plan file, or a model's name")],
    *, plan: PlanOptions, own: _Simulation,
) -> None:  # fmt: skip
    """Predict time and memory.

    Example: stagewright simulate vgg16 --cluster titan-v-8 --placement 0:0-6.0:7 --cut fc1 --batch 224 --staleness ssp
    """
    plan = replace(plan, placement=plan.placement or "", recompute=bool(plan.recompute))
    hardware = own.load_cluster()
    profile = own.load_profile(own.profile, hardware)
    made = Plan.load(what) if names_file(what) else None
    setting = Scenario(
        model=what if made is None else made.model, plan=made, profile=profile, precision=own.precision, data=own.data,
        adapt=own.adapters, prepare=own.with_optimizer, epoch_images=own.epoch_images, system=own.load_system(),
    )  # fmt: skip
    points = list(_sweep(setting, hardware, plan, own))
    if len(points) > 1:
        _show_sweep(points, hardware, own)
        _refuse_what_does_not_fit([point.record for point in points], hardware)
        return
    record = points[0].record
    if profile is not None and (notes := own.assumed(profile, record.plan)):
        record = replace(record, notes=(*record.notes, *notes))
    if own.trace is not None:
        write_whole(own.trace, json.dumps(chrome_trace(record)))
    if own.timeline is not None:
        write_whole(own.timeline, timeline_svg(record))
    if own.out is not None:
        record.save(own.out)
    if own.json:
        told = {"limit": record.limit, "notes": record.notes, "fits": not too_full(record, hardware)}
        show_json(record.summary() | told)
    else:
        _show(record, hardware, saved(own.trace, own.timeline, own.out))
    _refuse_what_does_not_fit([record], hardware)


def _sweep(setting: Scenario, hardware: Cluster, fixed: PlanOptions, own: _Simulation) -> Iterator[Point]:
    """One point for each value of the option that has several; a single point where none has."""
    factors = parse_factors(own.bandwidth) if own.bandwidth else (1.0,)
    values = (own.batch or (None,), factors, own.devices or (None,))
    if sum(len(each) > 1 for each in values) > 1:
        raise UsageError(
            "more than one of --batch, --bandwidth and --devices has several values", "sweep one at a time"
        )
    if own.devices and (setting.plan is not None or fixed.placement):
        raise UsageError("--devices is for data parallelism", "leave --placement and the plan file out")
    many = max(map(len, values)) > 1
    detail = not many and (not own.json or bool(own.trace or own.timeline or own.out))
    for rows, factor, count in product(*values):
        options = replace(fixed, batch=rows, batch_per_device=None if rows else fixed.batch_per_device)
        if count is not None:
            ids = hardware.device_ids
            if count > len(ids):
                raise UsageError(f"--devices {count}: {hardware.name} has {len(ids)}", "give another --cluster")
            options = replace(options, placement=format_placement([ids[:count]]))
        cluster = faster_links(hardware, factor) if factor != 1 else hardware
        value, label = factor, f"links ×{factor:g}"
        if len(own.batch) > 1:
            value, label = float(rows or 0), f"batch {rows}"
        elif len(own.devices) > 1:
            value, label = float(count or 0), f"{count} devices"
        yield Point(value, label, setting.record(cluster, options, detail=detail))


def _show(record: Record, cluster: Cluster, saved: Sequence[str]) -> None:
    """The figures, a bar a group of devices, and where the time goes."""
    epoch = (
        f" · epoch {seconds(record.epoch_s)} ({record.epoch_samples:,} {record.sample_name})" if record.epoch_s else ""
    )
    step = f"step {seconds(record.median_step_s)} · {speed(record.samples_per_s, record)}{epoch}"
    groups = list(alike(record, cluster))
    width = max(len(format_devices(ids)) for ids, _ in groups)
    bars, kinds = [], []
    for ids, use in groups:
        bar = "█" * round(use.busy_share * 40)
        memory = f"{use.peak_bytes / 2**30:.1f} of {cluster.device(ids[0]).memory_bytes / 2**30:.1f} GiB"
        kinds.append(f"memory of {format_devices(ids)}: {in_words(use.peak_parts)}")
        bars.append(f"{format_devices(ids):<{width}}   {bar:<40}  {use.busy_share:>4.0%} busy   {memory}")
    helps = [f": {text}" for begin, text in _ADVICE.items() if record.limit.startswith(begin)]
    show(step, bars, [*kinds, *record.notes, f"limited by {record.limit}{''.join(helps)}", *saved])


def _refuse_what_does_not_fit(records: list[Record], cluster: Cluster) -> None:
    """Ends the command with an error where no record is of a run that the devices' memory can hold."""
    short = [too_full(record, cluster) for record in records]
    if all(short):
        raise PlanError(
            f"the plan does not fit: {short[0]}",
            "use a smaller --batch, more --microbatches, --recompute, or more or larger devices",
        )


_ADVICE = {
    "compute": "more or faster devices there would help, faster links would not",
    "data": "more CPU cores would help, faster devices and links would not",
    "transfer": "faster links would help, faster devices would not",
    "all-reduce": "faster links would help, faster devices would not",
}
"""What would help, by how the limit begins."""


def _show_sweep(points: list[Point], cluster: Cluster, own: _Simulation) -> None:
    """The sweep as a table with bars, and where more stops helping; what does not fit is told, and has no bar."""
    short = {point.label: too_full(point.record, cluster) for point in points}
    if own.plot is not None:
        write_whole(own.plot, plot_svg(points))
    if own.json:
        told = ({"setting": point.label, "fits": not short[point.label]} for point in points)
        show_json([{**one, **point.record.summary()} for one, point in zip(told, points)])
        return
    fitting = [point for point in points if not short[point.label]]
    best = max((point.record.samples_per_s for point in fitting), default=1.0)
    rows = []
    for point in points:
        record, why = point.record, short[point.label]
        bar = "" if why else "█" * max(round(20 * record.samples_per_s / best), 1)
        limit = f"does not fit: {why}" if why else record.limit
        rows.append((point.label, seconds(record.median_step_s), amount(record.samples_per_s, record), bar, limit))
    turn = knee(fitting)
    told_turn = [f"more stops helping after {turn.label}" if turn else "more goes on helping"] if fitting else []
    show(table(f"! | step> | {rate_unit(points[0].record)}> | ! | limited by", rows), [*told_turn, *saved(own.plot)])
