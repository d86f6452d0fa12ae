"""From the configuration of a run to the run."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from rich.console import Console

from stagewright.cluster import Cluster, Device, count, make_cluster, parse_placement
from stagewright.data.packing import TokenRows
from stagewright.errors import DataError, PlacementError, UsageError
from stagewright.models import Layered, build_model, forward_flops, parameter_counts
from stagewright.plan import Plan
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.planning.fixed import LayerTable
from stagewright.planning.options import spelled
from stagewright.record import Record, Source
from stagewright.runtime.feed import Feed
from stagewright.runtime.launch.environment import expand_hosts, is_main, is_worker
from stagewright.runtime.launch.local import Hosts
from stagewright.runtime.launch.ssh import OverSsh
from stagewright.runtime.run_folder import is_held
from stagewright.runtime.safety.preflight import check_hosts
from stagewright.runtime.settings import Settings
from stagewright.scheduling import make_schedule
from stagewright.training.adapters import lora_of
from stagewright.training.checks import check_device, check_hosts_here, check_packages
from stagewright.training.config import SYNTHETIC, Config
from stagewright.training.events import nothing_left, plan_lines
from stagewright.training.job import Job, JobOptions
from stagewright.training.recipes import Recipe
from stagewright.training.start import states_of, train
from stagewright.training.text import TextFeed, check_text_options, text_rows

if TYPE_CHECKING:
    from stagewright.data.source import Dataset

    _Rows: TypeAlias = Dataset | TokenRows
    """Images, or rows of text."""

_DEFAULT_ROWS = 32
"""Rows a device, where no batch is given."""
_IMAGENET_IMAGES = 1_281_167
"""An epoch of made-up images, where one is asked for and its size is not."""
_EVALUATION_BATCHES = 10
"""Batches of made-up images that an evaluation has."""


def run_command(
    config: Config, console: Console, *, cluster: Cluster | None = None, hosts: Hosts | OverSsh | None = None,
    source: Source = "measured", dry_run: bool = False,
) -> Record | None:  # fmt: skip
    """Trains as the configuration says; None where there is nothing to record (a dry run, no step left).

    A cluster and hosts are given where they are not this machine itself but emulated.
    """
    check_packages(config)
    settings, where = _settings_of(config), config.where
    if not where.nodes:
        check_device(settings)
    dataset, evaluation_set, model = _data_and_model(config)
    cluster = cluster or _local_cluster(config, settings)
    plan = _plan_of(config, model, cluster)
    _check_devices(plan, settings, where.share)
    if source == "measured" and not where.nodes:
        check_hosts_here(plan, config)
    job = _job_of(config, plan, dataset, evaluation_set)
    if dry_run:
        if is_main():
            _show_dry_run(config, plan, job, settings, console)
        return None
    recipe = _recipe_of(config, plan, job)
    if where.nodes and not is_worker():
        hosts = over_ssh = _hosts_of(config, plan)
        check_hosts(over_ssh, [os.getcwd(), *config.data.folders], plan, model, settings, states=states_of(recipe))
    done = _steps_done(job, where.out)
    if done >= job.steps:
        console.print(nothing_left(done, job.steps), highlight=False, markup=False, soft_wrap=True)
        return None
    if is_main():
        _say_what_is_skipped(console, dataset, evaluation_set)
    return train(
        make_schedule(plan, agree=settings.agrees), model, data=_feed_of(dataset, model, config),
        evaluation=_feed_of(evaluation_set, model, config, is_training=False), recipe=recipe, job=job,
        settings=settings, cluster=cluster.name, source=source, folder=where.out, console=console, hosts=hosts,
        config=config, share=where.share,
    )  # fmt: skip


def _steps_done(job: Job, folder: Path | None) -> int:
    """How many steps the checkpoint has behind it that a run would go on from; 0 where it begins anew."""
    if job.resume is None or is_worker():  # the one who started this worker has looked, or all will look together
        return 0
    from stagewright.runtime.checkpoint.storage import find_checkpoint

    source = folder if job.resume == "auto" else Path(job.resume)
    if source is None or is_held(source):
        return 0
    found = find_checkpoint(source, lambda text: None)
    return 0 if found is None else int(found[1]["step"])


def _data_and_model(config: Config) -> tuple[_Rows | None, _Rows | None, Layered]:
    """What the run trains on, what it is evaluated on, and the model, which knows how long rows of text are."""
    check_text_options(config)
    if not config.data.is_text:
        dataset, evaluation_set = _dataset_of("data", config), _dataset_of("evaluation_data", config)
        return dataset, evaluation_set, _model_of(config, dataset)
    model = _model_of(config, None)
    return *text_rows(config, model), model


def _settings_of(config: Config) -> Settings:
    """How the run computes."""
    device: Any = config.where.device or ("cuda" if torch.cuda.is_available() else "cpu")
    recipe = config.recipe
    return Settings(**vars(config.settings), device=device, precision=recipe.precision, clip_norm=recipe.clip_norm)


def _dataset_of(key: str, config: Config) -> Dataset | None:
    """The images in the folder that an option names; None for made-up ones, which are made on the device."""
    folder = getattr(config.data, key)
    if folder in (None, SYNTHETIC):
        return None
    from stagewright.data.opening import open_dataset  # needs the extra `data`

    try:
        return open_dataset(folder, on_corrupt=config.data.on_corrupt)
    except DataError as fault:
        raise DataError(f"{spelled(key)} {folder}: {fault.what}", fault.todo) from None


def _say_what_is_skipped(console: Console, *datasets: _Rows | None) -> None:
    """Prints how many records were left out, and the first of them."""
    faults = [fault for dataset in datasets if dataset is not None for fault in dataset.faults]
    if faults:
        console.print(f"data: {count(len(faults), 'record')} skipped; the first: {faults[0]}", markup=False)


def _feed_of(dataset: _Rows | None, model: Layered, config: Config, *, is_training: bool = True) -> Feed | None:
    """The images or the text as the model takes them; None where they are made up."""
    if dataset is None:
        return None
    if isinstance(dataset, TokenRows):
        lengths = config.data.lengths
        return TextFeed(dataset, model, seed=config.settings.seed, is_training=is_training, lengths=lengths)
    from stagewright.training.data import DataFeed  # needs the extra `data`

    shape = model.inputs[0].shape_per_row
    if len(shape) != 3:
        raise UsageError(f"{config.model.name} takes rows of shape {shape}, not images", "use --data synthetic")
    return DataFeed(
        dataset, size=shape[-1], seed=config.settings.seed, is_training=is_training,
        crop_area=config.recipe.crop_area, on_corrupt=config.data.on_corrupt,
    )  # fmt: skip


def _model_of(config: Config, dataset: Dataset | None) -> Layered:
    """The model, the same on every worker."""
    classes = config.model.num_classes or (dataset.num_classes if dataset is not None else None)
    return build_model(
        config.model.name, seed=config.settings.seed, num_classes=classes, image_size=config.model.image_size,
        label_smoothing=config.recipe.label_smoothing, sequence_length=config.model.sequence_length,
        from_scratch=config.model.from_scratch, check=not is_worker(), load=False, adapt=lora_of(config),
    )  # fmt: skip


def _local_cluster(config: Config, settings: Settings) -> Cluster:
    """The devices of this machine; on the CPU as many workers as the options name."""
    where, named = config.where, parse_placement(config.plan.placement) if config.plan.placement else ()
    hosts = max((id.host for stage in named for id in stage), default=0) + 1
    most = max((id.device for stage in named for id in stage), default=0) + 1
    if settings.device == "cpu":
        number = where.devices or (most if named else 1)
        device = Device(kind="cpu", memory_bytes=4 << 30)
    else:
        number = where.devices or torch.cuda.device_count() * where.share
        properties = torch.cuda.get_device_properties(0)
        device = Device(kind=properties.name, memory_bytes=properties.total_memory // where.share)
    one = make_cluster(max(1, number), device=device)
    return replace(one, hosts=one.hosts * hosts)


def _layer_table(model: Layered, name: str) -> LayerTable:
    """What cuts by ratio need of each layer; time goes by the layers' operations."""
    sizes = [4 * number for number in parameter_counts(model)]
    return LayerTable(model=name, names=model.names, flops=forward_flops(model), parameter_bytes=tuple(sizes))


def _plan_of(config: Config, model: Layered, cluster: Cluster) -> Plan:
    """The plan in a file, or the one that the options describe."""
    file = config.plan.file
    if file is not None:
        plan = Plan.load(file)
        if plan.layers != model.names:
            raise UsageError(
                f"{file} is for {plan.model} with layers {plan.layers[0]} … {plan.layers[-1]}, "
                f"not for {config.model.name}",
                "make a plan for this model with `stagewright plan`",
            )
        return plan
    return fixed_plan(_layer_table(model, config.model.name), plan_options(config), cluster)


def plan_options(config: Config) -> PlanOptions:
    """What shapes the plan; rows a device come from the option, the recipe or the default where no batch is given."""
    plan = config.plan
    rows = plan.batch_per_device
    if plan.batch is None:
        rows = rows or config.recipe.batch_per_device or _DEFAULT_ROWS
    return replace(plan, batch_per_device=rows, placement=plan.placement or None)


def _check_devices(plan: Plan, settings: Settings, share: int) -> None:
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


def _job_of(config: Config, plan: Plan, dataset: _Rows | None, evaluation_set: _Rows | None) -> Job:
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


def _steps_an_epoch(config: Config, plan: Plan, dataset: _Rows | None) -> int | None:
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


def _evaluation_rows(config: Config, plan: Plan, dataset: _Rows | None, evaluation_set: _Rows | None) -> int:
    """How many rows an evaluation has; 0 where none is asked for."""
    if evaluation_set is not None:
        return len(evaluation_set)
    if config.data.evaluation_data is None and config.job.evaluate_every is None:
        return 0
    if dataset is not None:
        share = "--validation 0.05 or " if config.data.is_text else ""
        raise UsageError("--evaluate-every needs rows to evaluate on", f"add {share}--evaluation-data FOLDER")
    return _EVALUATION_BATCHES * plan.batch


def _recipe_of(config: Config, plan: Plan, job: Job) -> Recipe:
    """The recipe in steps; with epochs the learning rate follows them, even where --steps ends the run before."""
    epochs = config.recipe.epochs
    total = epochs * job.steps_per_epoch if epochs and job.steps_per_epoch else job.steps
    return config.recipe.in_steps(batch=plan.batch, per_epoch=job.steps_per_epoch, total_steps=total)


def _show_dry_run(config: Config, plan: Plan, job: Job, settings: Settings, console: Console) -> None:
    """Prints what would run: the plan, where it computes, and the commands that would start it."""
    words = [word for word in sys.argv[1:] if word != "--dry-run"]
    commands = [["stagewright", *words]]
    if config.where.nodes:
        hosts = _hosts_of(config, plan)
        commands = hosts.commands(["-m", "stagewright", *words], hosts.workers(plan))
    images = f"{config.data.data} data, {settings.precision}, on {settings.device}"
    lines = [*plan_lines(plan), f"{count(job.steps, 'step')}, {images}", "not started:", *map(shlex.join, commands)]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _hosts_of(config: Config, plan: Plan) -> OverSsh:
    """The hosts that --nodes names, as many as the plan uses."""
    nodes = str(config.where.nodes)
    hosts = OverSsh(expand_hosts(nodes), config.where.remote_python or sys.executable)
    needed = max(id.host for id in plan.devices) + 1
    if len(hosts.names) != needed:
        raise UsageError(
            f"--nodes {nodes} names {count(len(hosts.names), 'host')}, but the placement uses {needed}",
            f"name {count(needed, 'host')}, or change --placement",
        )
    return hosts
