"""`stagewright rehearse`: trains on hosts that this machine emulates, or on slices of one card."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from stagewright.cli.train import show_record, train
from stagewright.cluster import Cluster, find_cluster
from stagewright.errors import UsageError
from stagewright.plan import Plan
from stagewright.planning.options import PlanOptions
from stagewright.profile import Profile
from stagewright.record import Record

if TYPE_CHECKING:
    from stagewright.rehearsal import EmulatedHosts

NOT_HERE = ("nodes", "remote_python", "save_final", "dry_run", "devices", "share")
"""Options of `train` that say where workers run: the cluster file does that here."""


def _own_options(
    cluster: Annotated[
        str | None, typer.Option(help="a cluster's name or file: hosts with one device, links and CPU shares")
    ] = None,
    slices: Annotated[int | None, typer.Option(help="cut one card into so many workers, instead of --cluster")] = None,
    rate: Annotated[
        str | None, typer.Option(help="with --slices: how fast each slice sends, such as 1gbit or 125e6 (bytes/s)")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="measure layers and links inside the hosts first, plan with them, predict")
    ] = False,
) -> None:
    """The options that `train` does not have."""


def _signature() -> tuple[inspect.Signature, dict[str, Any]]:
    """The options of `train`, without those that mean nothing here, and the own ones."""
    known, own = inspect.signature(train).parameters, inspect.signature(_own_options).parameters
    hints = get_type_hints(train, include_extras=True) | get_type_hints(_own_options, include_extras=True)
    kept = [each for name, each in known.items() if name not in NOT_HERE]
    merged = [each.replace(annotation=hints[each.name]) for each in (kept[0], *own.values(), *kept[1:])]
    return inspect.Signature(merged), {each.name: hints[each.name] for each in merged}


def _with_signature(function: Callable[..., None]) -> Callable[..., None]:
    """The function with that signature, as typer reads it."""
    function.__signature__, function.__annotations__ = _signature()  # type: ignore[attr-defined]
    return function


@_with_signature
def rehearse(**options: Any) -> None:
    """Trains on hosts that this machine emulates, each with its own address, link rate, latency and share of the CPU.

    Needs root on Linux with iproute2. With --slices N, one card plays the part of N.

    Example: stagewright rehearse alexnet --cluster hosts-4 --batch 64 --placement 0:0,1:0,2:0.3:0 --cut fc1
    """
    own = {name: options.pop(name) for name in inspect.signature(_own_options).parameters}
    options |= {
        "nodes": None,
        "remote_python": None,
        "dry_run": False,
        "devices": None,
        "share": 1,
        "save_final": False,
    }
    console = Console(stderr=options["as_json"])
    if (own["cluster"] is None) == (own["slices"] is None):
        raise UsageError("a rehearsal is on the hosts of a file or on slices of a card", "give --cluster or --slices")
    from stagewright.training.checks import check_packages

    check_packages(options)
    if own["slices"] is not None:
        record = _on_slices(options, own["slices"], own["rate"], console)
    elif own["rate"] is not None:
        raise UsageError("--rate goes with --slices", "write the rates of hosts' links into the cluster file")
    else:
        record = _on_hosts(options, find_cluster(own["cluster"]), own["measure"], console)
    if record is not None:
        show_record(record, options["as_json"], console)


def _on_hosts(options: dict[str, Any], cluster: Cluster, measure: bool, console: Console) -> Record | None:
    """The record of a run in the cluster's emulated hosts; inside of them, as one of the workers."""
    from stagewright.rehearsal import emulated_hosts
    from stagewright.rehearsal.tools import check_tools
    from stagewright.runtime.launch import is_worker

    if options["device"] not in (None, "cpu"):
        raise UsageError(f"--device is {options['device']!r}: emulated hosts compute on the CPU", "use --slices N")
    options["device"] = "cpu"
    if not is_worker():
        check_tools()
    from stagewright.training.command import run_command

    if is_worker():
        return run_command(options, console, cluster=cluster, source="rehearsed")
    with emulated_hosts(cluster) as hosts:
        if not hosts.has_latency:
            console.print("this kernel has no netem: latencies are those of the machine itself", style="dim")
        if measure:
            return _measured_first(options, cluster, hosts, console)
        return run_command(options, console, cluster=cluster, hosts=hosts, source="rehearsed")


def _measured_first(options: dict[str, Any], cluster: Cluster, hosts: EmulatedHosts, console: Console) -> Record | None:
    """The record of a run whose plan and prediction come from what the hosts themselves showed."""
    from stagewright.rehearsal.measuring import measure_hosts
    from stagewright.runtime.run_folder import new_folder
    from stagewright.simulation import simulator
    from stagewright.training.command import plan_options, recipe_of, run_command, settings_of

    recipe = recipe_of(options)
    settings = settings_of(options, recipe)
    folder = options["folder"] = options["folder"] or new_folder(options["model"])
    sizes = {key: options[key] for key in ("image_size", "num_classes") if options[key] is not None}
    wanted = plan_options(options, recipe)
    batch = wanted.rows(len(cluster.hosts))
    rows = tuple(sorted({max(batch // part, 2) for part in (16, 4, 1)}))
    console.print(f"measuring layers and links inside {len(cluster.hosts)} emulated hosts", style="dim")
    profile, measured = measure_hosts(
        cluster, hosts, folder / "measured", model=options["model"], options=sizes, batch_sizes=rows,
        threads=settings.threads or 1,
    )  # fmt: skip
    profile.save(folder / "profile.json")
    measured.save(folder / "cluster.yaml")
    plan = _plan_of(options, replace(wanted, batch=batch, batch_per_device=None), profile, measured)
    predicted = simulator(profile, measured)(plan)
    options["plan_file"] = plan.save(folder / "plan.json")
    words = [word for word in sys.argv[1:] if word != "--measure"] + ["--plan", str(folder / "plan.json")]
    record = run_command(options, console, cluster=cluster, hosts=hosts, source="rehearsed", words=words)
    if record is not None:
        error = predicted.median_step_s / record.median_step_s - 1
        console.print(f"predicted: {predicted.samples_per_s:,.1f} images/s, the step {error:+.1%} off")
    return record


def _plan_of(options: Mapping[str, Any], wanted: PlanOptions, profile: Profile, cluster: Cluster) -> Plan:
    """The plan in a file, the one that the options fix, or the best that the search finds for what was measured."""
    from stagewright.planning.fixed import fixed_plan
    from stagewright.simulation import make_plan

    if options["plan_file"] is not None:
        return Plan.load(options["plan_file"])
    if wanted.placement is not None:
        return fixed_plan(profile, wanted, cluster)
    return make_plan(profile, cluster, wanted).best.plan


def _on_slices(options: dict[str, Any], slices: int, rate: str | None, console: Console) -> Record | None:
    """The record of a run on slices of one card; with a rate, each slice is an emulated host as well."""
    from stagewright.rehearsal.slices import check_card, slice_hosts
    from stagewright.runtime.common_memory import APART
    from stagewright.runtime.launch import is_worker
    from stagewright.training.command import run_command

    options |= {"device": "cuda", "share": slices, "devices": slices}
    is_parent = not is_worker()
    if is_parent:
        check_card(slices)
    os.environ[APART] = "1"  # for this worker, or for those that are started here, whatever hosts the placement names
    if not is_parent or rate is None:
        return run_command(options, console, source="rehearsed")
    with slice_hosts(slices, rate) as hosts:
        return run_command(options, console, hosts=hosts, source="rehearsed")
