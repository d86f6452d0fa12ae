"""`stagewright simulate`: what a plan would do on hardware that is not here, and where its time would go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stagewright.cli.options import COMPUTED, Given, computed, read_section, takes
from stagewright.cluster import Cluster, DeviceId, format_devices, format_placement
from stagewright.errors import PlanError, UsageError
from stagewright.plan import Plan
from stagewright.planning import PlanOptions
from stagewright.profile import Profile
from stagewright.profiling.detect import cluster_or_here
from stagewright.record import DeviceUse, Record
from stagewright.report import chrome_trace, timeline_svg
from stagewright.report.figures import rate, seconds, size
from stagewright.simulation import faster_links
from stagewright.simulation.run import IMAGENET_IMAGES
from stagewright.simulation.setting import Scenario
from stagewright.simulation.whatif import Point, knee, parse_counts, parse_factors, plot_svg
from stagewright.training.recipes import RecipeFile

_BAR = 40
_GIB = 1 << 30


@takes({"plan": PlanOptions, "recipe": RecipeFile}, without=("batch", *COMPUTED))
def simulate(
    what: Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="A plan file, or a model's name.")],
    /,
    *,
    given: Given,
    cluster: Annotated[str | None, typer.Option(help="A cluster's name or file; this machine if left out.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A profile file; else an analytic one of the devices.")] = None,
    assume_kind: Annotated[
        str | None, typer.Option(help="Take the profile for one of this kind of device, such as titan-v.")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Rows of a step; several, 256,512, are a sweep.")] = None,
    data: Annotated[str, typer.Option(help="synthetic, or records: limited by the hosts' decode rate.")] = "synthetic",
    epoch_images: Annotated[int, typer.Option(help="Images of an epoch.")] = IMAGENET_IMAGES,
    bandwidth: Annotated[str | None, typer.Option(help="Links ×2, or a sweep: x1,x2,x4.")] = None,
    devices: Annotated[str | None, typer.Option(help="Data parallel on the first n: 8, or 1,2,4,8.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Save a Chrome/Perfetto trace here.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Save a picture of the timeline (SVG) here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Save a plot of the sweep (SVG) here.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Save the record here.")] = None,
) -> None:
    """Predict time and memory.

    Example: stagewright simulate vgg16 --cluster titan-v-8 --placement 0:0-6.0:7 --cut fc1 --batch 224 --staleness ssp
    """
    options = read_section(PlanOptions, {"placement": "", "recompute": False, **given["plan"]})
    hardware = cluster_or_here(cluster)
    setting = _setting_of(what, profile, assume_kind, computed(given), data, epoch_images)
    detail = not as_json or bool(trace or timeline or out)
    points = list(_sweep(setting, hardware, options, batch, bandwidth, devices, detail=detail))
    if len(points) > 1:
        _show_sweep(points, hardware, as_json, plot)
        _refuse_what_does_not_fit([point.record for point in points], hardware)
        return
    record = points[0].record
    if setting.profile is not None and assume_kind is not None:
        record = replace(record, notes=(*record.notes, setting.profile.notes[-1]))
    saved = _save(record, trace, timeline, out)
    if as_json:
        told = {"limit": record.limit, "notes": record.notes, "fits": not _too_full(record, hardware)}
        typer.echo(json.dumps(record.summary() | told, ensure_ascii=False))
    else:
        _show(record, hardware, saved)
    _refuse_what_does_not_fit([record], hardware)


def _setting_of(
    what: str, profile: Path | None, assume_kind: str | None, recipe: RecipeFile, data: str, epoch_images: int
) -> Scenario:
    """What is simulated: the plan in a file, or a model."""
    if data not in ("synthetic", "records"):
        raise UsageError(f"--data is {data!r}: expected synthetic or records")
    plan = Plan.load(what) if Path(what).suffix in (".json", ".yaml", ".yml") else None
    return Scenario(
        model=what if plan is None else plan.model, plan=plan, profile=_load_profile(profile, assume_kind),
        precision=recipe.precision, states=recipe.states, data=data, epoch_images=epoch_images,
    )  # fmt: skip


def _load_profile(file: Path | None, assume_kind: str | None) -> Profile | None:
    """The profile in a file, taken for one of another kind of device where that is said."""
    if file is None and assume_kind is not None:
        raise UsageError(f"--assume-kind {assume_kind} goes with --profile FILE", "leave it out, or add the profile")
    profile = None if file is None else Profile.load(file)
    return profile if profile is None or assume_kind is None else profile.assumed(assume_kind)


def _sweep(
    setting: Scenario,
    hardware: Cluster,
    fixed: PlanOptions,
    batch: str | None,
    bandwidth: str | None,
    devices: str | None,
    *,
    detail: bool,
) -> Iterator[Point]:
    """One point for each value of the option that has several; a single point where none has."""
    batches = parse_counts(batch, "--batch") if batch else (None,)
    factors = parse_factors(bandwidth) if bandwidth else (1.0,)
    counts = parse_counts(devices, "--devices") if devices else (None,)
    if sum(len(values) > 1 for values in (batches, factors, counts)) > 1:
        raise UsageError(
            "more than one of --batch, --bandwidth and --devices has several values", "sweep one at a time"
        )
    many = len(batches) * len(factors) * len(counts) > 1
    for rows in batches:
        for factor in factors:
            for count in counts:
                options = replace(fixed, batch=rows, batch_per_device=None if rows else fixed.batch_per_device)
                if count is not None:
                    if setting.plan is not None or fixed.placement:
                        raise UsageError("--devices is for data parallelism", "leave --placement and the plan file out")
                    options = replace(options, placement=_first_devices(hardware, count))
                cluster = faster_links(hardware, factor) if factor != 1 else hardware
                value = float(rows or 0) if len(batches) > 1 else float(count or 0) if len(counts) > 1 else factor
                label = (
                    f"batch {rows}"
                    if len(batches) > 1
                    else f"{count} devices"
                    if len(counts) > 1
                    else f"links ×{factor:g}"
                )
                yield Point(value, label, setting.record(cluster, options, detail=detail and not many))


def _first_devices(cluster: Cluster, count: int) -> str:
    """Data parallelism over the cluster's first devices."""
    ids = cluster.device_ids
    if count > len(ids):
        raise UsageError(f"--devices {count}: {cluster.name} has {len(ids)}", "give another --cluster")
    return format_placement([ids[:count]])


def _save(record: Record, trace: Path | None, timeline: Path | None, out: Path | None) -> list[str]:
    """Writes the files that were asked for; their names."""
    for path in (trace, timeline):
        if path is not None:
            text = json.dumps(chrome_trace(record)) if path is trace else timeline_svg(record)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if out is not None:
        record.save(out)
    return [str(path) for path in (trace, timeline, out) if path is not None]


def _show(record: Record, cluster: Cluster, saved: list[str]) -> None:
    """The figures, a bar a group of devices, and where the time goes."""
    console = Console(highlight=False, markup=False)
    epoch = f" · epoch {seconds(record.epoch_s)} ({record.epoch_samples:,} images)" if record.epoch_s else ""
    console.print(f"\n  step {seconds(record.median_step_s)} · {rate(record.samples_per_s)} images/s{epoch}\n")
    groups = [(tuple(ids), uses) for ids, uses in _alike(record, cluster)]
    width = max(len(format_devices(ids)) for ids, _ in groups)
    for ids, use in groups:
        bar = "█" * round(use.busy_share * _BAR)
        memory = f"{use.peak_bytes / _GIB:.1f} of {cluster.device(ids[0]).memory_bytes / _GIB:.1f} GiB"
        console.print(f"  {format_devices(ids):<{width}}   {bar:<{_BAR}}  {use.busy_share:>4.0%} busy   {memory}")
    console.print()
    for note in record.notes:
        console.print(f"  {note}", soft_wrap=True)
    console.print(f"  {_advice(record)}", soft_wrap=True)
    if saved:
        console.print(f"  saved {' · '.join(saved)}", soft_wrap=True)


def _alike(record: Record, cluster: Cluster) -> Iterator[tuple[list[DeviceId], DeviceUse]]:
    """Neighbouring devices of the same stages and memory that are about as busy and full, together."""

    def likeness(use: DeviceUse) -> tuple[object, ...]:
        has = cluster.device(DeviceId.parse(use.device)).memory_bytes
        return use.stages, round(use.busy_share, 2), round(use.peak_bytes / _GIB, 1), has, use.peak_bytes > has

    for _, uses in groupby(record.devices, key=likeness):
        members = list(uses)
        yield [DeviceId.parse(use.device) for use in members], members[0]


def _too_full(record: Record, cluster: Cluster) -> str:
    """`0:0-7 need 17.1 GiB, and have 11.8 GiB`: the first devices whose memory does not suffice; empty if it does."""
    for ids, use in _alike(record, cluster):
        has = cluster.device(ids[0]).memory_bytes
        if use.peak_bytes > has:
            needs, have = ("needs", "has") if len(ids) == 1 else ("need", "have")
            return f"{format_devices(ids)} {needs} {size(use.peak_bytes)}, and {have} {size(has)}"
    return ""


def _refuse_what_does_not_fit(records: list[Record], cluster: Cluster) -> None:
    """Ends the command with an error where no record is of a run that the devices' memory can hold."""
    short = [_too_full(record, cluster) for record in records]
    if all(short):
        raise PlanError(
            f"the plan does not fit: {short[0]}",
            "use a smaller --batch, more --microbatches, --recompute, or more or larger devices",
        )


def _advice(record: Record) -> str:
    """What would help, from what limits."""
    limit = record.limit
    if limit.startswith("compute"):
        return f"limited by {limit}: more or faster devices there would help, faster links would not"
    if limit.startswith("data"):
        return f"limited by {limit}: more CPU cores would help, faster devices and links would not"
    if limit.startswith(("transfer", "all-reduce")):
        return f"limited by {limit}: faster links would help, faster devices would not"
    return f"limited by {limit}"


def _show_sweep(points: list[Point], cluster: Cluster, as_json: bool, plot: Path | None) -> None:
    """The sweep as a table with bars, and where more stops helping; what does not fit is told, and has no bar."""
    short = {point.label: _too_full(point.record, cluster) for point in points}
    if plot is not None:
        plot.write_text(plot_svg(points), encoding="utf-8")
    if as_json:
        told = ({"setting": point.label, "fits": not short[point.label]} for point in points)
        typer.echo(json.dumps([{**one, **point.record.summary()} for one, point in zip(told, points)]))
        return
    console = Console(highlight=False, markup=False)
    fitting = [point for point in points if not short[point.label]]
    best = max((point.record.samples_per_s for point in fitting), default=1.0)
    table = Table(box=None, pad_edge=False)
    for title in ("", "step", "images/s", "", "limited by"):
        table.add_column(title, justify="right" if title in ("step", "images/s") else "left")
    for point in points:
        record, why = point.record, short[point.label]
        bar = "" if why else "█" * max(round(20 * record.samples_per_s / best), 1)
        limit = f"does not fit: {why}" if why else record.limit
        table.add_row(point.label, seconds(record.median_step_s), rate(record.samples_per_s), bar, limit)
    console.print()
    console.print(table)
    turn = knee(fitting)
    if fitting:
        console.print(f"\n  {'more goes on helping' if turn is None else f'more stops helping after {turn.label}'}")
    if plot is not None:
        console.print(f"  saved {plot}")
