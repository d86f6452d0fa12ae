"""From the options of `stagewright train` to a run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from stagewright.cluster import Cluster, Device, count, make_cluster, parse_placement
from stagewright.errors import DataError, PlacementError, UsageError
from stagewright.models import Layered, build_model, forward_flops, parameter_counts
from stagewright.plan import Plan
from stagewright.planning import PlanOptions, fixed_plan
from stagewright.planning.options import parse_cuts, spelled
from stagewright.planning.ratio import LayerTable
from stagewright.record import Record, Source
from stagewright.runtime.feed import Feed
from stagewright.runtime.hosts import OverSsh, host_commands
from stagewright.runtime.launch import PORT, Hosts, expand_hosts, is_main, is_worker
from stagewright.runtime.preflight import JudgeMemory, check_hosts, needed_bytes, too_little_memory
from stagewright.runtime.run_folder import is_held
from stagewright.runtime.settings import Settings
from stagewright.scheduling import make_schedule
from stagewright.training.checks import check_counts, check_device, check_hosts_here, check_packages
from stagewright.training.display import nothing_left, plan_lines
from stagewright.training.job import Job
from stagewright.training.optimizers import Recipe
from stagewright.training.recipes import RecipeFile, find_recipe, with_options
from stagewright.training.sinks import chosen_sinks
from stagewright.training.start import states_of, train

if TYPE_CHECKING:
    from stagewright.data.source import Dataset

_Options = Mapping[str, Any]
_DEFAULT_ROWS = 32
"""Rows a device, where no batch is given."""
_DEFAULT_STEPS = 20
_SYNTHETIC = "synthetic"
_IMAGENET_IMAGES = 1_281_167
"""An epoch of made-up images, where one is asked for and its size is not."""
_EVALUATION_BATCHES = 10
"""Batches of made-up images that an evaluation has."""


def run_command(
    options: _Options,
    console: Console,
    *,
    cluster: Cluster | None = None,
    hosts: Hosts | OverSsh | None = None,
    source: Source = "measured",
    words: Sequence[str] | None = None,
) -> Record | None:
    """Trains as the options say; None where there is nothing to record (a dry run, no step left).

    A cluster and hosts are given where they are not this machine itself but emulated; `words` follow `stagewright` on
    the workers' command line, this process's own by default.
    """
    check_counts(options)
    check_packages(options)
    recipe = recipe_of(options)
    settings = settings_of(options, recipe)
    if not options["nodes"]:
        check_device(settings)
    dataset, evaluation_set = _dataset_of("data", options), _dataset_of("evaluation_data", options)
    model = _model_of(options, recipe, dataset)
    cluster = cluster or _local_cluster(options, settings)
    plan = _plan_of(options, recipe, model, cluster)
    _check_devices(plan, cluster, settings, options["share"])
    if source == "measured" and not options["nodes"]:
        check_hosts_here(plan, options)
    job = _job_of(options, recipe, plan, dataset, evaluation_set)
    if options["dry_run"]:
        if is_main():
            _show_dry_run(options, plan, job, settings, console)
        return None
    if options["nodes"] and not is_worker():
        hosts = over_ssh = _hosts_of(options, plan)
        needed = needed_bytes(plan, model, settings, states_of(_steps_of(options, recipe, plan, job)))
        _ask_hosts(options, over_ssh, lambda machines: too_little_memory(plan, needed, settings, machines))
    done = _steps_done(job, options["folder"])
    if done >= job.steps:
        console.print(nothing_left(done, job.steps), highlight=False, markup=False, soft_wrap=True)
        return None
    if is_main():
        _say_what_is_skipped(console, dataset, evaluation_set)
    return train(
        make_schedule(plan, agree=settings.agrees), model, data=_feed_of(dataset, model, options, recipe),
        evaluation=_feed_of(evaluation_set, model, options, recipe, is_training=False),
        recipe=_steps_of(options, recipe, plan, job), job=job, settings=settings,
        cluster=cluster.name, source=source, folder=options["folder"], console=console, hosts=hosts,
        command=[sys.executable, *_worker_words(words)] if hosts is not None else None, share=options["share"],
    )  # fmt: skip


def _steps_done(job: Job, folder: Path | None) -> int:
    """How many steps the checkpoint has behind it that a run would go on from; 0 where it begins anew."""
    if job.resume is None or is_worker():  # the one who started this worker has looked, or all will look together
        return 0
    from stagewright.runtime.resuming import find_checkpoint

    source = folder if job.resume == "auto" else Path(job.resume)
    if source is None or is_held(source):
        return 0
    found = find_checkpoint(source, lambda text: None)
    return 0 if found is None else int(found[1]["step"])


def recipe_of(options: _Options) -> RecipeFile:
    """The recipe by name, or the plain one, with what the other options say in its place."""
    file = find_recipe(options["recipe"]) if options["recipe"] else RecipeFile()
    return with_options(file, {**options, "decay_epochs": _numbers_of(options, "decay_epochs")})


def _numbers_of(options: _Options, key: str) -> tuple[int, ...] | None:
    """The whole numbers of an option such as 30,60,80."""
    if options[key] is None:
        return None
    try:
        return tuple(int(part) for part in options[key].split(","))
    except ValueError:
        raise UsageError(f"{spelled(key)} is {options[key]!r}: expected whole numbers such as 30,60,80") from None


def settings_of(options: _Options, recipe: RecipeFile) -> Settings:
    """How the run computes."""
    device: Any = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    keys = (
        "sync_batch_norm", "channels_last", "compile", "seed", "on_nan", "self_check", "threads",
        "transport",
    )  # fmt: skip
    chosen = {key: options[key] for key in keys}
    return Settings(
        device=device,
        timeout_s=options["timeout"],
        start_timeout_s=options["start_timeout"],
        save_timeout_s=options["save_timeout"],
        precision=recipe.precision,
        clip_norm=recipe.clip_norm,
        **chosen,
    )


def _dataset_of(key: str, options: _Options) -> Dataset | None:
    """The images in the folder that an option names; None for made-up ones, which are made on the device."""
    if options[key] is None or options[key] == _SYNTHETIC:
        return None
    from stagewright.data.opening import open_dataset  # needs the extra `data`

    try:
        return open_dataset(options[key], on_corrupt=options["on_corrupt"])
    except DataError as fault:
        raise DataError(f"{spelled(key)} {options[key]}: {fault.what}", fault.todo) from None


def _say_what_is_skipped(console: Console, *datasets: Dataset | None) -> None:
    """Prints how many records were left out, and the first of them."""
    faults = [fault for dataset in datasets if dataset is not None for fault in dataset.faults]
    if faults:
        console.print(f"data: {count(len(faults), 'record')} skipped; the first: {faults[0]}", markup=False)


def _feed_of(
    dataset: Dataset | None, model: Layered, options: _Options, recipe: RecipeFile, *, is_training: bool = True
) -> Feed | None:
    """The images as the model takes them; None where they are made up."""
    if dataset is None:
        return None
    from stagewright.training.data import DataFeed  # needs the extra `data`

    shape = model.inputs[0].shape_per_row
    if len(shape) != 3:
        raise UsageError(f"{options['model']} takes rows of shape {shape}, not images", "use --data synthetic")
    return DataFeed(
        dataset, size=shape[-1], seed=options["seed"], is_training=is_training, crop_area=recipe.crop_area,
        on_corrupt=options["on_corrupt"],
    )  # fmt: skip


def _model_of(options: _Options, recipe: RecipeFile, dataset: Dataset | None) -> Layered:
    """The model, the same on every worker."""
    classes = options["num_classes"] or (dataset.num_classes if dataset is not None else None)
    return build_model(
        options["model"], seed=options["seed"], num_classes=classes, image_size=options["image_size"],
        label_smoothing=recipe.label_smoothing,
    )  # fmt: skip


def _local_cluster(options: _Options, settings: Settings) -> Cluster:
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


def _layer_table(model: Layered, name: str) -> LayerTable:
    """What cuts by ratio need of each layer; time goes by the layers' operations."""
    sizes = [4 * number for number in parameter_counts(model)]
    return LayerTable(model=name, names=model.names, flops=forward_flops(model), parameter_bytes=tuple(sizes))


def _plan_of(options: _Options, recipe: RecipeFile, model: Layered, cluster: Cluster) -> Plan:
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
    return fixed_plan(_layer_table(model, options["model"]), plan_options(options, recipe), cluster)


def plan_options(options: _Options, recipe: RecipeFile) -> PlanOptions:
    """What the options say about the plan."""
    return PlanOptions(
        batch=options["batch"], batch_per_device=_rows_a_device(options, recipe),
        placement=options["placement"] or None, ratio=options["ratio"], ratio_of=options["ratio_of"],
        cut=parse_cuts(options["cut"]), num_microbatches=options["microbatches"], staleness=options["staleness"],
        policy=options["schedule"], route=options["route"], hold=options["hold"], recompute=options["recompute"],
        num_buckets=options["buckets"],
    )  # fmt: skip


def _rows_a_device(options: _Options, recipe: RecipeFile) -> int | None:
    """Rows of one replica of the first stage, from the option, the recipe or the default; --batch comes first."""
    if options["batch"] is not None:
        return options["batch_per_device"]  # type: ignore[no-any-return]
    return recipe.batch_per_device or _DEFAULT_ROWS


def _check_devices(plan: Plan, cluster: Cluster, settings: Settings, share: int) -> None:
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


def _job_of(
    options: _Options, recipe: RecipeFile, plan: Plan, dataset: Dataset | None, evaluation_set: Dataset | None
) -> Job:
    """How long the run goes on: so many epochs, but no more than so many steps."""
    per_epoch = _steps_an_epoch(options, recipe, plan, dataset)
    whole = recipe.epochs * per_epoch if recipe.epochs and per_epoch else None
    steps = min(number for number in (whole, options["steps"] or (None if whole else _DEFAULT_STEPS)) if number)
    rows = _evaluation_rows(options, plan, dataset, evaluation_set)
    return Job(
        name=options["model"], steps=steps, warm_up=min(options["warm_up"], max(0, steps - 2)),
        log_every=options["log_every"], steps_per_epoch=per_epoch,
        epoch_images=per_epoch * plan.batch if per_epoch else None,
        evaluate_every=(recipe.evaluate_every or 1) if rows else None, evaluation_rows=rows,
        sinks=chosen_sinks(options),
        **{key: options[key] for key in ("checkpoint_every", "keep", "save_final", "resume", "overwrite")},
        **{key: options[key] for key in ("max_restarts", "replan")},
    )  # fmt: skip


def _steps_an_epoch(options: _Options, recipe: RecipeFile, plan: Plan, dataset: Dataset | None) -> int | None:
    """How many whole batches an epoch has; None where nobody counts in epochs."""
    images: int | None = options["epoch_images"] if dataset is None else len(dataset)
    if images is None and not recipe.needs_epochs:
        return None
    images = images or _IMAGENET_IMAGES
    if images < plan.batch:
        raise UsageError(
            f"an epoch of {options['data']} has {images:,} images, fewer than the batch of {plan.batch:,}",
            "use a smaller --batch",
        )
    return images // plan.batch


def _evaluation_rows(options: _Options, plan: Plan, dataset: Dataset | None, evaluation_set: Dataset | None) -> int:
    """How many images an evaluation has; 0 where none is asked for."""
    if evaluation_set is not None:
        return len(evaluation_set)
    if options["evaluation_data"] is None and options["evaluate_every"] is None:
        return 0
    if dataset is not None:
        raise UsageError("--evaluate-every needs images to evaluate on", "add --evaluation-data FOLDER")
    return _EVALUATION_BATCHES * plan.batch


def _steps_of(options: _Options, recipe: RecipeFile, plan: Plan, job: Job) -> Recipe:
    """The recipe in steps; with epochs the learning rate follows them, even where --steps ends the run before."""
    total = recipe.epochs * job.steps_per_epoch if recipe.epochs and job.steps_per_epoch else job.steps
    return recipe.in_steps(
        batch=plan.batch, per_epoch=job.steps_per_epoch, total_steps=total,
        warm_up_steps=options["warm_up_steps"], decay_steps=_numbers_of(options, "decay_steps"),
    )  # fmt: skip


def _worker_words(words: Sequence[str] | None = None) -> list[str]:
    """What a host's launcher runs: this command, which finds itself to be a worker there."""
    given = sys.argv[1:] if words is None else words
    return ["-m", "stagewright", *(word for word in given if word != "--dry-run")]


def _show_dry_run(options: _Options, plan: Plan, job: Job, settings: Settings, console: Console) -> None:
    """Prints what would run: the plan, where it computes, and the commands that would start it."""
    commands = [["stagewright", *_worker_words()[2:]]]
    if options["nodes"]:
        hosts = _hosts_of(options, plan)
        commands = host_commands(_worker_words(), hosts, hosts.workers(plan), PORT)
    images = f"{options['data']} data, {settings.precision}, on {settings.device}"
    lines = [*plan_lines(plan), f"{count(job.steps, 'step')}, {images}", "not started:", *map(shlex.join, commands)]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _hosts_of(options: _Options, plan: Plan) -> OverSsh:
    """The hosts that --nodes names, as many as the plan uses."""
    hosts = OverSsh(expand_hosts(options["nodes"]), options["remote_python"] or sys.executable)
    needed = max(id.host for id in plan.devices) + 1
    if len(hosts.names) != needed:
        raise UsageError(
            f"--nodes {options['nodes']} names {count(len(hosts.names), 'host')}, but the placement uses {needed}",
            f"name {count(needed, 'host')}, or change --placement",
        )
    return hosts


def _ask_hosts(options: _Options, hosts: OverSsh, too_small: JudgeMemory) -> None:
    """Refuses hosts that do not fit together, or have not the data or the memory."""
    data = [options[key] for key in ("data", "evaluation_data") if options[key] not in (None, _SYNTHETIC)]
    names = hosts.names
    check_hosts(
        names, [os.getcwd(), *data], PORT,
        lambda host, words: hosts.reach(names.index(host), [hosts.python, "-m", *words]),
        too_small,
    )  # fmt: skip
