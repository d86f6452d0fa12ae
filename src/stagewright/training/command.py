"""From the options of `stagewright train` to a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from stagewright.cluster import Cluster, Device, count, make_cluster, parse_placement
from stagewright.errors import PlacementError, UsageError
from stagewright.models import Layered, build_model, forward_flops, parameter_counts
from stagewright.plan import Plan
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.planning.ratio import LayerTable
from stagewright.record import Record
from stagewright.runtime.launch import host_commands, is_worker, launch_hosts, new_run_folder, this_command
from stagewright.runtime.settings import Settings
from stagewright.scheduling import make_schedule
from stagewright.training.data import DataFeed, open_feed
from stagewright.training.job import Job
from stagewright.training.loop import train
from stagewright.training.optimizers import Recipe

Options = Mapping[str, Any]
DEFAULT_ROWS = 32
"""Rows a device, where no batch is given."""
DEFAULT_STEPS = 20


def run_command(options: Options, console: Console) -> Record | None:
    """Trains as the options say; None where there is nothing to record (a dry run, other hosts)."""
    settings = settings_of(options)
    feed = open_feed(options["data"], options) if options["data"] != "synthetic" else None
    model = model_of(options, feed)
    cluster = local_cluster(options, settings)
    plan = plan_of(options, model, cluster)
    check_devices(plan, cluster, settings, options["share"])
    if options["nodes"] and not is_worker():
        run_on_hosts(options, plan, console)
        return None
    schedule = make_schedule(plan, agree=settings.agrees)
    job, evaluation = job_of(options, plan, feed), None
    if options["evaluation_data"]:
        evaluation = open_feed(options["evaluation_data"], options, is_training=False)
        job = replace(job, evaluation_rows=evaluation.num_rows)
    if feed is not None:
        feed.settle(plan, settings)
    if evaluation is not None:
        evaluation.settle(plan, settings)
    return train(
        schedule, model, data=feed, recipe=recipe_of(options, job), job=job, settings=settings, evaluation=evaluation,
        cluster=cluster.name, folder=options["folder"], console=console if shows_lines(plan) else None,
    )  # fmt: skip


def shows_lines(plan: Plan) -> bool:
    """Whether this process prints the log itself: the one that starts workers follows their events instead."""
    return not is_worker() or len(plan.devices) == 1


def settings_of(options: Options) -> Settings:
    """How the run computes."""
    device: Any = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    keys = ("precision", "clip_norm", "sync_batch_norm", "channels_last", "compile", "seed", "on_nan", "threads")
    return Settings(device=device, timeout_s=options["timeout"], **{key: options[key] for key in keys})


def model_of(options: Options, feed: DataFeed | None) -> Layered:
    """The model, the same on every worker."""
    classes = options["num_classes"] or (feed.num_classes if feed is not None else None)
    return build_model(
        options["model"], seed=options["seed"], num_classes=classes, image_size=options["image_size"],
        **({"label_smoothing": options["label_smoothing"]} if options["label_smoothing"] else {}),
    )  # fmt: skip


def local_cluster(options: Options, settings: Settings) -> Cluster:
    """The devices of this machine; on the CPU as many workers as the options name."""
    named = parse_placement(options["placement"]) if options["placement"] else ()
    hosts = max((id.host for stage in named for id in stage), default=0) + 1
    most = max((id.device for stage in named for id in stage), default=0) + 1
    if settings.device == "cpu":
        number = options["devices"] or (most if named else 1)
        device = Device(kind="cpu", memory_bytes=4 << 30)
    else:
        number = options["devices"] or torch.cuda.device_count() * options["share"]
        properties = torch.cuda.get_device_properties(0)
        device = Device(kind=properties.name, memory_bytes=properties.total_memory // options["share"])
    one = make_cluster(max(1, number), device=device)
    return replace(one, hosts=one.hosts * hosts)


def layer_table(model: Layered, name: str) -> LayerTable:
    """What cuts by ratio need of each layer; time goes by the layers' operations."""
    sizes = [4 * number for number in parameter_counts(model)]
    return LayerTable(model=name, names=model.names, flops=forward_flops(model), parameter_bytes=tuple(sizes))


def plan_of(options: Options, model: Layered, cluster: Cluster) -> Plan:
    """The plan in a file, or the one that the options describe."""
    if options["plan_file"] is not None:
        plan = Plan.load(options["plan_file"])
        if plan.layers != model.names:
            raise UsageError(
                f"{options['plan_file']} is for {plan.model} with layers {plan.layers[0]} … {plan.layers[-1]}, "
                f"not for {options['model']}",
                "make a plan for this model with `stagewright plan`",
            )
        return plan
    batch = options["batch"]
    if batch is None and options["batch_per_device"] is None:
        batch = DEFAULT_ROWS * len(cluster.device_ids)
    wanted = PlanOptions(
        batch=batch, batch_per_device=options["batch_per_device"], placement=options["placement"] or None,
        ratio=options["ratio"], ratio_of=options["ratio_of"], cut=tuple(options["cut"] or ()),
        num_microbatches=options["microbatches"], staleness=options["staleness"], policy=options["schedule"],
        route=options["route"], hold=options["hold"], recompute=options["recompute"], num_buckets=options["buckets"],
    )  # fmt: skip
    return fixed_plan(layer_table(model, options["model"]), wanted, cluster)


def check_devices(plan: Plan, cluster: Cluster, settings: Settings, share: int) -> None:
    """Refuses a placement that this machine does not have."""
    if settings.device != "cuda":
        return
    cards = torch.cuda.device_count()
    most = max(id.device for id in plan.devices) + 1
    if most > cards * share:
        raise PlacementError(
            f"placement {plan.placement} names device {most - 1} of a host, but this one has {count(cards, 'card')}",
            f"use fewer devices, or let several workers share a card with --share {-(-most // max(cards, 1))}",
        )


def job_of(options: Options, plan: Plan, feed: DataFeed | None) -> Job:
    """How long the run goes on."""
    per_epoch = feed.num_rows // plan.batch if feed is not None else None
    if per_epoch == 0:
        raise UsageError(
            f"{options['data']} holds {feed.num_rows if feed else 0:,} images, fewer than the batch of {plan.batch}",
            "use a smaller --batch",
        )
    steps = options["steps"]
    if steps is None and options["epochs"] and per_epoch:
        steps = options["epochs"] * per_epoch
    steps = steps or DEFAULT_STEPS
    return Job(
        name=options["model"], steps=steps, warm_up=min(options["warm_up"], max(0, steps - 2)),
        log_every=options["log_every"], steps_per_epoch=per_epoch,
        epoch_images=per_epoch * plan.batch if per_epoch else None,
        evaluate_every=1 if options["evaluation_data"] else None,
    )  # fmt: skip


def recipe_of(options: Options, job: Job) -> Recipe:
    """Optimizer and learning rate."""
    keys = ("optimizer", "learning_rate", "momentum", "weight_decay", "decay", "warm_up_steps", "label_smoothing")
    return Recipe(total_steps=job.steps, **{key: options[key] for key in keys})


def run_on_hosts(options: Options, plan: Plan, console: Console) -> None:
    """Starts the workers of every host over ssh; with --dry-run only prints the commands."""
    hosts = options["nodes"].split(",")
    needed = max(id.host for id in plan.devices) + 1
    if len(hosts) != needed:
        raise UsageError(f"--nodes names {count(len(hosts), 'host')}, but the placement uses {needed}")
    workers = [sum(id.host == number for id in plan.devices) for number in range(needed)]
    command = ["-m", "stagewright", *this_command()[3:]]
    commands = host_commands(command, hosts, workers, port=29_400)
    if options["dry_run"]:
        for each in commands:
            console.print(shlex.join(each), highlight=False, markup=False, soft_wrap=True)
        return
    launch_hosts(commands, new_run_folder(options["model"], options["folder"]))
