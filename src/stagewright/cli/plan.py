"""`stagewright plan`: the best split for a profile on a cluster, its rivals, and the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from stagewright.cluster import Cluster, find_cluster
from stagewright.errors import UsageError
from stagewright.noun import dump_json
from stagewright.plan import POLICIES, ROUTES, Plan, Policy, Route
from stagewright.planning.choose import Choice
from stagewright.planning.options import PlanOptions, RatioOf
from stagewright.planning.reasons import shape
from stagewright.planning.search import Search, make_plan
from stagewright.profile import Precision, Profile
from stagewright.profiling.drawing import describe_devices
from stagewright.report.figures import rate, seconds, size
from stagewright.simulation import simulator

WIDTH = 140
"""Of a table that goes into a file."""


def plan(
    what: Annotated[str, typer.Argument(metavar="PROFILE|MODEL", help="A profile file, or a model's name.")],
    cluster: Annotated[str, typer.Option(help="A cluster's name or file.")] = "titan-v-8",
    batch: Annotated[int | None, typer.Option(help="Rows of a step, over all devices.")] = None,
    batch_per_device: Annotated[
        int | None, typer.Option(help="Rows of a replica of the first stage; with --placement.")
    ] = None,
    placement: Annotated[str | None, typer.Option(help="Fix the devices of each stage: 0:0-6.0:7.")] = None,
    ratio: Annotated[str | None, typer.Option(help="Fix how the stages' costs stand, such as 11:7.")] = None,
    ratio_of: Annotated[str, typer.Option(help="What the ratio is of: time, flops, params, layers.")] = "time",
    cut: Annotated[str | None, typer.Option(help="Fix the layers that begin new stages, such as fc1.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Fix the microbatches a batch.")] = None,
    staleness: Annotated[
        str | None, typer.Option(help="0: exact (default). ssp, 2bw, 2,1: allow stale weights. any: the fastest.")
    ] = None,
    policy: Annotated[str | None, typer.Option("--schedule", help=f"Fix the order: {', '.join(POLICIES)}.")] = None,
    route: Annotated[str | None, typer.Option(help=f"Fix the route: {', '.join(ROUTES)}.")] = None,
    hold: Annotated[int | None, typer.Option(help="Microbatches' activations a replica may hold.")] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute/--no-recompute", help="Fix whether; else where memory needs it.")
    ] = None,
    buckets: Annotated[int | None, typer.Option(help="Pieces the gradients are reduced in.")] = None,
    precision: Annotated[str, typer.Option(help="With a model's name: fp32, bf16 or fp16.")] = "fp32",
    estimate_only: Annotated[bool, typer.Option("--no-simulate", help="Rank by the estimate alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plans as JSON.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Save the best plan here.")] = None,
) -> None:
    """Find the fastest plan that fits.

    Example: stagewright plan vgg16.profile.json --cluster titan-v-8 --batch 224 -o plan.json
    """
    options = PlanOptions(
        batch=batch,
        batch_per_device=batch_per_device,
        placement=placement,
        ratio=ratio,
        ratio_of=cast(RatioOf, ratio_of),
        cut=tuple(cut.split(",")) if cut else (),
        num_microbatches=microbatches,
        staleness=staleness,
        policy=cast("Policy | None", policy),
        route=cast("Route | None", route),
        hold=hold,
        recompute=recompute,
        num_buckets=buckets,
    )
    hardware = find_cluster(cluster)
    profile = load_profile(what, hardware, options, precision)
    found = make_plan(profile, hardware, options, None if estimate_only else simulator(profile, hardware))
    if out is not None:
        found.best.plan.save(out)
    if as_json:
        typer.echo(dump_json(summary(found)), nl=False)
    else:
        show(found, hardware, out)


def load_profile(what: str, cluster: Cluster, options: PlanOptions, precision: str) -> Profile:
    """The profile in a file, or an analytic one of the cluster's first kind of device."""
    if Path(what).suffix in (".json", ".yaml", ".yml"):
        return Profile.load(what)
    if precision not in ("fp32", "bf16", "fp16"):
        raise UsageError(f"--precision is {precision!r}: expected fp32, bf16 or fp16")
    from stagewright.profiling.analytic import profile_by_name

    batch = options.batch or (options.batch_per_device or 0) * len(cluster.device_ids)
    if not batch:
        raise UsageError("the batch is not given", "add --batch ROWS")
    share = max(batch // len(cluster.device_ids), 2)
    sizes = tuple(sorted({max(share // 4, 2), share, max(batch // 2, 2), max(batch, 2)}))
    return profile_by_name(what, cluster.hosts[0].devices[0].kind, sizes, cast(Precision, precision))


def show(found: Search, cluster: Cluster, out: Path | None) -> None:
    """The plans as a table, the best one first, and why it is."""
    console = Console(highlight=False, width=None if Console().is_terminal else WIDTH)
    best = found.best.plan
    devices = " · ".join(dict.fromkeys(describe_devices(host.devices) for host in cluster.hosts))
    hosts = "one host" if len(cluster.hosts) == 1 else f"{len(cluster.hosts)} hosts"
    title = f"{best.model}, {best.batch} images a step, {devices} ({hosts})"
    how = f"weighed {found.num_plans:,} plans, simulated {found.num_simulated:,}, in {found.seconds:.1f} s"
    console.print(f"\n  {title}    {how}\n", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("  plan", "step", "images/s", "memory first / last", "limited by"):
        table.add_column(head, justify="right" if head in ("step", "images/s") else "left")
    table.add_row(*cells(found.best, "▸ "))
    for choice in found.others:
        table.add_row(*cells(choice))
    if found.data_parallel is not None and found.data_parallel.plan.stages != best.stages:
        table.add_row(*cells(found.data_parallel))
    elif found.data_parallel is None:
        table.add_row("  data parallel", "–", "–", "–", found.why_no_data_parallel)
    console.print(table)
    console.print(f"\n  {found.reason}", soft_wrap=True)
    console.print(f"  {settings(best)}", soft_wrap=True)
    if out is not None:
        console.print(
            f"  saved {out} · next: stagewright simulate {out} · stagewright train {best.model} --plan {out}",
            soft_wrap=True,
        )


def cells(choice: Choice, mark: str = "  ") -> tuple[str, str, str, str, str]:
    """One line of the table."""
    first, last = choice.peak_bytes[0], choice.peak_bytes[-1]
    memory = size(first) if len(choice.peak_bytes) == 1 else f"{size(first)} / {size(last)}"
    return mark + shape(choice.plan), seconds(choice.step_s), rate(choice.images_per_s), memory, choice.limit


def settings(plan: Plan) -> str:
    """What else the plan says: `placement 0:0-6.0:7, 4 microbatches, split, 1f1b, versions 2,1`."""
    many = f"{plan.num_microbatches} microbatch" + ("" if plan.num_microbatches == 1 else "es")
    versions = "" if plan.is_synchronous else f", versions {','.join(map(str, plan.versions))}"
    again = [str(number) for number, stage in enumerate(plan.stages) if stage.recompute]
    recompute = f", recompute in stage {', '.join(again)}" if again else ""
    return f"placement {plan.placement}, {many}, {plan.route}, {plan.policy}{versions}{recompute}"


def summary(found: Search) -> dict[str, object]:
    """The figures that `--json` prints."""
    return {
        "best": as_plain(found.best),
        "others": [as_plain(choice) for choice in found.others],
        "data_parallel": None if found.data_parallel is None else as_plain(found.data_parallel),
        "why_no_data_parallel": found.why_no_data_parallel,
        "reason": found.reason,
        "num_plans": found.num_plans,
        "seconds": found.seconds,
        "num_simulated": found.num_simulated,
        "plan": found.best.plan.to_dict(),
    }


def as_plain(choice: Choice) -> dict[str, object]:
    """One plan's figures."""
    return {
        "shape": shape(choice.plan),
        "placement": choice.plan.placement,
        "cuts": [stage.layers[0] for stage in choice.plan.stages[1:]],
        "step_s": choice.step_s,
        "images_per_s": choice.images_per_s,
        "peak_bytes": list(choice.peak_bytes),
        "limit": choice.limit,
        "settings": settings(choice.plan),
    }
