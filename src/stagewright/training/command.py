"""From the configuration of a run to the run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sized
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console

from stagewright.cluster import Cluster, Device, count, format_devices, make_cluster, parse_placement
from stagewright.data.source import need
from stagewright.errors import PlacementError, UsageError
from stagewright.models import Layered, forward_flops, parameter_counts
from stagewright.plan import Plan
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.planning.fixed import LayerTable
from stagewright.record import Record, Source
from stagewright.runtime.checkpoint.storage import find_checkpoint
from stagewright.runtime.launch.environment import expand_hosts, is_main, is_worker
from stagewright.runtime.launch.local import Hosts
from stagewright.runtime.launch.ssh import OverSsh
from stagewright.runtime.run_folder import RunFolder, is_held
from stagewright.runtime.settings import Settings
from stagewright.scheduling import make_schedule
from stagewright.training.before import check_device
from stagewright.training.config import PYTHON, SYNTHETIC, Config, DataOptions, Job, JobOptions
from stagewright.training.events import check_sinks
from stagewright.training.loop import nothing_left
from stagewright.training.recipes import Recipe
from stagewright.training.rows import data_and_model, feed_for
from stagewright.training.start import train

_DEFAULT_ROWS = 32
"""Rows a device, where no batch is given."""
_IMAGENET_IMAGES = 1_281_167
"""An epoch of made-up images, where one is asked for and its size is not."""
_EVALUATION_BATCHES = 10
"""Batches of made-up images that an evaluation has."""


def run_command(
    config: Config, console: Console, *, cluster: Cluster | None = None, hosts: Hosts | OverSsh | None = None,
    source: Source = "measured", dry_run: bool = False, seen: Callable[[RunFolder], object] = lambda run: None,
) -> Record | None:  # fmt: skip
    """Trains as the configuration says; None where there is nothing to record (a dry run, no step left).

    A cluster and hosts are given where they are not this machine itself but emulated.
    """
    check_packages(config)
    where, settings = config.where, settings_of(config)
    if not where.nodes:
        check_device(settings)
    dataset, evaluation_set, model = data_and_model(config)
    cluster = cluster or local_cluster(config, settings)
    plan = plan_of(config, model, cluster, is_here=source == "measured")
    job = job_of(config, plan, dataset, evaluation_set)
    if dry_run:
        if is_main():
            _show_dry_run(config, plan, job, settings, console)
        return None
    in_steps = recipe_of(config, plan, job)
    if where.nodes and not is_worker():
        hosts = _hosts_of(config, plan)
    done = _steps_done(job, where.out)
    if done >= job.steps:
        console.print(nothing_left(done, job.steps), highlight=False, markup=False, soft_wrap=True)
        return None
    if is_main():
        faults = [fault for rows in (dataset, evaluation_set) if rows is not None for fault in rows.faults]
        if faults:
            console.print(f"data: {count(len(faults), 'record')} skipped; the first: {faults[0]}", markup=False)
    return train(
        make_schedule(plan, agree=settings.agrees), model, data=feed_for(dataset, model, config),
        evaluation=feed_for(evaluation_set, model, config, is_training=False), recipe=in_steps, job=job,
        settings=settings, cluster=cluster.name, source=source, folder=where.out, console=console, hosts=hosts,
        config=config, share=where.share, seen=seen,
    )  # fmt: skip


def settings_of(config: Config) -> Settings:
    """How the run computes."""
    recipe, device = config.recipe, config.where.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Settings(**vars(config.settings), device=device, precision=recipe.precision, clip_norm=recipe.clip_norm)


def recipe_of(config: Config, plan: Plan, job: Job) -> Recipe:
    """The recipe in steps; with epochs the learning rate follows them, even where --steps ends the run before."""
    epochs, per_epoch = config.recipe.epochs, job.steps_per_epoch
    total = epochs * per_epoch if epochs and per_epoch else job.steps
    return config.recipe.in_steps(batch=plan.batch, per_epoch=per_epoch, total_steps=total)


def check_packages(config: Config) -> None:
    """Refuses options that need packages which are not installed, before anything is opened or built."""
    named = {"--data": config.data.data, "--evaluation-data": config.data.evaluation_data}
    for option, folder in () if config.data.is_text else named.items():
        if folder not in (None, SYNTHETIC) and not str(folder).startswith(PYTHON):
            need(f"{option} {folder}", "PIL")
    check_sinks(config.job.sinks)


def planned(config: Config) -> Plan:
    """The plan that a configuration describes, made from its model alone: without its data, and its devices here."""
    if config.plan.file is not None:
        return Plan.load(config.plan.file)
    alone = replace(config, data=DataOptions())
    return _described_plan(alone, data_and_model(alone)[2], local_cluster(alone, Settings(device="cpu")))


# ── cluster and plan ────────────────────────────────────────────────────────────────────────────────────


def local_cluster(config: Config, settings: Settings) -> Cluster:
    """The devices of this machine; on the CPU as many workers as the options name."""
    where = config.where
    named = [id for stage in parse_placement(config.plan.placement) for id in stage] if config.plan.placement else []
    if settings.device == "cpu":
        number = where.devices or max((id.device for id in named), default=0) + 1
        device = Device(kind="cpu", memory_bytes=4 << 30)
    else:
        number = where.devices or torch.cuda.device_count() * where.share
        properties = torch.cuda.get_device_properties(0)
        device = Device(kind=properties.name, memory_bytes=properties.total_memory // where.share)
    one = make_cluster(max(1, number), device=device)
    return replace(one, hosts=one.hosts * (max((id.host for id in named), default=0) + 1))


def plan_of(
    config: Config, model: Layered, cluster: Cluster, given: Plan | None = None, *, is_here: bool = True
) -> Plan:
    """A given plan, the one in a file, or the one that options describe; it is refused where it cannot work.

    Of a model alone time goes by its operations. Hosts that are emulated are not looked for here.
    """
    plan = given or _described_plan(config, model, cluster)
    if plan.layers != model.names:
        raise UsageError(
            f"{config.plan.file or 'the plan'} is for {plan.model} with layers {plan.layers[0]} … {plan.layers[-1]}, "
            f"not for {config.model.name}",
            "make a plan for this model with `stagewright plan`",
        )
    for first, last in pairwise(plan.edges):
        model.stage(first, last)  # which says where it cannot be cut
    _check_devices(plan, settings_of(config), config.where.share)
    if is_here and not config.where.nodes:
        _check_hosts_here(plan, config)
    return plan


def _described_plan(config: Config, model: Layered, cluster: Cluster) -> Plan:
    if config.plan.file is None:
        sizes = tuple(4 * number for number in parameter_counts(model))
        flops = forward_flops(model)
        table = LayerTable(model=config.model.name, names=model.names, flops=flops, parameter_bytes=sizes)
        return fixed_plan(table, plan_options(config), cluster)
    return Plan.load(config.plan.file)


def plan_options(config: Config) -> PlanOptions:
    """What shapes the plan; rows a device come from the option, the recipe or the default where no batch is given."""
    plan = config.plan
    rows = plan.batch_per_device
    if plan.batch is None:
        rows = rows or config.recipe.batch_per_device or _DEFAULT_ROWS
    return replace(plan, batch_per_device=rows, placement=plan.placement or None)


def _check_devices(plan: Plan, settings: Settings, share: int) -> None:
    if settings.device != "cuda":
        return
    cards = torch.cuda.device_count()
    most = max(id.device for id in plan.devices) + 1
    if most > cards * share:
        raise PlacementError(
            f"placement {plan.placement} names device {most - 1} of a host, but this one has {count(cards, 'card')}",
            f"use fewer devices, or let several workers share a card with --share {-(-most // max(cards, 1))}",
        )


def _check_hosts_here(plan: Plan, config: Config) -> None:
    """Refuses a plan with other hosts, or hosts that may come, where nothing starts workers there."""
    if config.job.nnodes is not None and not is_worker():
        told = f"--nnodes {config.job.nnodes} is for several hosts, and this run has only this one"
        raise UsageError(told, "name them with --nodes host1,host2, or start it under torchrun on each of them")
    others = sorted({id.host for id in plan.devices} - {0})
    if others and not is_worker():  # the launcher of a worker knows the hosts
        what = config.plan.file or f"--placement {config.plan.placement}"
        raise PlacementError(
            f"{what} names host {others[0]}, and only host 0, this machine, is here",
            "name the hosts with --nodes host1,host2, start it under torchrun on each of them, or place all on host 0",
        )


# ── job and recipe ──────────────────────────────────────────────────────────────────────────────────────


def job_of(config: Config, plan: Plan, dataset: Sized | None, evaluation_set: Sized | None) -> Job:
    """How long the run goes on: so many epochs, but no more than so many steps."""
    asked, epochs = config.job, config.recipe.epochs
    per_epoch = _steps_an_epoch(config, plan, dataset)
    whole = epochs * per_epoch if epochs and per_epoch else None
    steps = min(number for number in (whole, asked.steps or (None if whole else Job().steps)) if number)
    rows = _evaluation_rows(config, plan, dataset, evaluation_set)
    return Job(**{
        **{each.name: getattr(asked, each.name) for each in fields(JobOptions)},
        "name": config.model.name, "steps": steps, "warm_up": min(asked.warm_up, max(0, steps - 2)),
        "steps_per_epoch": per_epoch, "epoch_images": per_epoch * plan.batch if per_epoch else None,
        "evaluate_every": (asked.evaluate_every or config.recipe.evaluate_every or 1) if rows else None,
        "evaluation_rows": rows,
    })  # fmt: skip


def _steps_an_epoch(config: Config, plan: Plan, dataset: Sized | None) -> int | None:
    """How many whole batches an epoch has; None where nobody counts in epochs."""
    images = config.data.epoch_images if dataset is None else len(dataset)
    if images is None and not config.recipe.needs_epochs:
        return None
    images = images or _IMAGENET_IMAGES
    if images < plan.batch:
        raise UsageError(
            f"an epoch of {config.data.data} has {images:,} {'rows' if config.data.is_text else 'images'}, fewer than "
            f"the batch of {plan.batch:,}",
            "use a smaller --batch",
        )
    return images // plan.batch


def _evaluation_rows(config: Config, plan: Plan, dataset: Sized | None, evaluation_set: Sized | None) -> int:
    """How many rows an evaluation has; 0 where none is asked for."""
    if evaluation_set is not None:
        return len(evaluation_set)
    if config.data.evaluation_data is None and config.job.evaluate_every is None:
        return 0
    if dataset is not None:
        share = "--validation 0.05 or " if config.data.is_text else ""
        raise UsageError("--evaluate-every needs rows to evaluate on", f"add {share}--evaluation-data FOLDER")
    return _EVALUATION_BATCHES * plan.batch


def _steps_done(job: Job, folder: Path | None) -> int:
    """How many steps the checkpoint has behind it that a run would go on from; 0 where it begins anew."""
    # The one who started this worker has looked, or all will look together; in a store a copy may be lacking.
    if job.resume is None or job.checkpoints is not None or is_worker():
        return 0
    source = folder if job.resume == "auto" else Path(job.resume)
    if source is None or is_held(source):
        return 0
    found = find_checkpoint(source, lambda text: None)
    return 0 if found is None else int(found[1]["step"])


# ── dry runs and other hosts ────────────────────────────────────────────────────────────────────────────


def _show_dry_run(config: Config, plan: Plan, job: Job, settings: Settings, console: Console) -> None:
    """Prints what would run: the plan, where it computes, and the commands that would start it."""
    words = [word for word in sys.argv[1:] if word != "--dry-run"]
    commands = [["stagewright", *words]]
    if config.where.nodes:
        hosts = _hosts_of(config, plan)
        commands = hosts.commands(["-m", "stagewright", *words], hosts.workers(plan))
    many = count(plan.num_microbatches, "microbatch", "microbatches")
    versions = "" if plan.is_synchronous else f", versions {','.join(map(str, plan.versions))}"
    ends = [dict.fromkeys((stage.layers[0], stage.layers[-1])) for stage in plan.stages]
    for line in (
        f"{plan.model}, {plan.batch} rows a step in {many}, {plan.route}, {plan.policy}{versions}",
        *(
            f"stage {number} on {format_devices(stage.devices)}: {' … '.join(ends[number])}"
            for number, stage in enumerate(plan.stages)
        ),
        f"{count(len(plan.devices), 'worker')}, one for each device",
        f"{count(job.steps, 'step')}, {config.data.data} data, {settings.precision}, on {settings.device}",
        "not started:",
        *map(shlex.join, commands),
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _hosts_of(config: Config, plan: Plan) -> OverSsh:
    nodes = str(config.where.nodes)
    hosts = OverSsh(expand_hosts(nodes), config.where.remote_python or sys.executable)
    needed = max(id.host for id in plan.devices) + 1
    if config.job.nnodes is not None and config.job.host_limits[1] != needed:
        told = f"--nnodes {config.job.nnodes} is up to {config.job.host_limits[1]}, but the placement uses {needed}"
        raise UsageError(told, "place the stages on as many hosts as there may be at most")
    if len(hosts.names) != needed and config.job.nnodes is None:  # else there may be spare ones
        raise UsageError(
            f"--nodes {nodes} names {count(len(hosts.names), 'host')}, but the placement uses {needed}",
            f"name {count(needed, 'host')}, or change --placement",
        )
    return hosts
