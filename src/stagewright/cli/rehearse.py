"""`stagewright rehearse`: trains on hosts that this machine emulates, or on slices of one card."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from stagewright.cli.options import Given, takes
from stagewright.cli.train import USUAL, Model, Run
from stagewright.cluster import Cluster, find_cluster
from stagewright.errors import UsageError
from stagewright.plan import Plan
from stagewright.record import Record
from stagewright.schema import dump_yaml
from stagewright.training.config import NO_OPTION, SECTIONS, Config, Where

if TYPE_CHECKING:
    from stagewright.rehearsal import EmulatedHosts

_NOT_HERE = ("nodes", "remote_python", "save_final", "devices", "share")
"""Options of `train` that say where workers run: the cluster file does that here."""


@takes(
    sections=SECTIONS, without=(*NO_OPTION, *_NOT_HERE),
    usual={"Rehearsal": ("cluster", "slices", "rate", "measure"), **USUAL},
)  # fmt: skip
def rehearse(model: Model = None, *, run: Run, given: Given) -> None:
    """Trains on hosts that this machine emulates, each with its own address, link rate, latency and share of the CPU.

    Needs root on Linux with iproute2. With --slices N, one card plays the part of N.

    Example: stagewright rehearse alexnet --cluster hosts-4 --batch 64 --placement 0:0,1:0,2:0.3:0 --cut fc1
    """
    config = run.read(model, given)
    own = config.rehearsal
    for key in _NOT_HERE:
        value = getattr(config.where, key, None)
        if value not in (getattr(Where(), key, None), own.slices):
            raise UsageError(f"where.{key} is {value!r}, but a rehearsal has its own hosts", "leave it out")
    config = _with(config, "job", save_final=False)
    if run.print_config:
        typer.echo(dump_yaml(config.to_dict()), nl=False)
        return
    if (own.cluster is None) == (own.slices is None):
        raise UsageError("a rehearsal is on the hosts of a file or on slices of a card", "give --cluster or --slices")
    from stagewright.training.command import check_packages

    check_packages(config)
    if own.slices is not None:
        run.to_the_end(config, lambda seen: _on_slices(config, int(own.slices or 0), own.rate, run.console))
    elif own.rate is not None:
        raise UsageError("--rate goes with --slices", "write the rates of hosts' links into the cluster file")
    else:
        run.to_the_end(config, lambda seen: _on_hosts(config, find_cluster(str(own.cluster)), run.console))


def _with(config: Config, section: str, **values: Any) -> Config:
    return replace(config, **{section: replace(getattr(config, section), **values)})


def _on_hosts(config: Config, cluster: Cluster, console: Console) -> Record | None:
    """The record of a run in the cluster's emulated hosts; inside of them, as one of the workers."""
    from stagewright.rehearsal import emulated_hosts
    from stagewright.rehearsal.tools import check_tools
    from stagewright.runtime.launch.environment import is_worker

    if config.where.device not in (None, "cpu"):
        raise UsageError(f"--device is {config.where.device!r}: emulated hosts compute on the CPU", "use --slices N")
    config = _with(config, "where", device="cpu")
    if not is_worker():
        check_tools()
    from stagewright.training.command import run_command

    if is_worker():
        return run_command(config, console, cluster=cluster, source="rehearsed")
    with emulated_hosts(cluster) as hosts:
        if not hosts.has_latency:
            console.print("this kernel has no netem: latencies are those of the machine itself", style="dim")
        if config.rehearsal.measure:
            return _measured_first(config, cluster, hosts, console)
        return run_command(config, console, cluster=cluster, hosts=hosts, source="rehearsed")


def _measured_first(config: Config, cluster: Cluster, hosts: EmulatedHosts, console: Console) -> Record | None:
    """The record of a run whose plan and prediction come from what the hosts themselves showed."""
    from stagewright.cost import Costs
    from stagewright.planning.estimate import with_prediction
    from stagewright.planning.fixed import fixed_plan
    from stagewright.rehearsal.measuring import measure_hosts
    from stagewright.runtime.run_folder import new_folder
    from stagewright.simulation import make_plan, simulator
    from stagewright.training.command import plan_options, run_command

    folder = config.where.out or new_folder(config.model.name)
    sizes = {"image_size": config.model.image_size, "num_classes": config.model.num_classes}
    wanted = plan_options(config)
    batch = wanted.rows(len(cluster.hosts))
    rows = tuple(sorted({max(batch // part, 2) for part in (16, 4, 1)}))
    console.print(f"measuring layers and links inside {len(cluster.hosts)} emulated hosts", style="dim")
    profile, measured = measure_hosts(
        cluster, hosts, folder / "measured", model=config.model.name, batch_sizes=rows,
        options={key: value for key, value in sizes.items() if value is not None},
        threads=config.settings.threads or 1,
    )  # fmt: skip
    profile.save(folder / "profile.json")
    profile = profile.with_states(config.recipe.states)
    measured.save(folder / "cluster.yaml")
    wanted = replace(wanted, batch=batch, batch_per_device=None)
    if config.plan.file is not None:
        plan = Plan.load(config.plan.file)
    elif wanted.placement is not None:
        plan = fixed_plan(profile, wanted, measured)
    else:
        plan = make_plan(profile, measured, wanted).best.plan
    predicted_s = simulator(profile, measured)(plan).median_step_s
    plan = with_prediction(plan, Costs(profile, measured), predicted_s)
    config = _with(config, "plan", file=plan.save(folder / "plan.json"))
    config = _with(_with(config, "where", out=folder), "rehearsal", measure=False)
    return run_command(config, console, cluster=cluster, hosts=hosts, source="rehearsed")


def _on_slices(config: Config, slices: int, rate: str | None, console: Console) -> Record | None:
    """The record of a run on slices of one card; with a rate, each slice is an emulated host as well."""
    from stagewright.rehearsal import emulated_hosts
    from stagewright.rehearsal.slices import check_card, read_rate, slice_cluster
    from stagewright.runtime.common_memory import APART
    from stagewright.runtime.launch.environment import is_worker
    from stagewright.training.command import run_command

    config = _with(config, "where", device="cuda", share=slices, devices=slices)
    if not is_worker():
        check_card(slices)
    os.environ[APART] = "1"  # for this worker, or for those that are started here, whatever hosts the placement names
    if is_worker() or rate is None:
        return run_command(config, console, source="rehearsed")
    # Workers find one another over the interfaces of these hosts instead of loopback.
    with emulated_hosts(slice_cluster(slices, read_rate(rate))) as hosts:
        return run_command(config, console, hosts=hosts, source="rehearsed")
