"""`stagewright train`: trains a model for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stagewright.errors import UsageError
from stagewright.record import Record

_Text = Annotated[str | None, typer.Option()]


def train(
    model: Annotated[str, typer.Argument(help="a model of `stagewright models`")],
    batch: Annotated[int | None, typer.Option(help="rows of one optimizer step, over all devices")] = None,
    batch_per_device: Annotated[int | None, typer.Option(help="rows of one replica of the first stage")] = None,
    placement: Annotated[str, typer.Option(help="stages on devices: 0:0-6.0:7; empty is data parallelism")] = "",
    ratio: Annotated[str | None, typer.Option(help="how the stages' costs stand, such as 11:7")] = None,
    ratio_of: Annotated[str, typer.Option(help="what the ratio is of: time, flops, params or layers")] = "time",
    cut: Annotated[
        list[str] | None, typer.Option(help="the layers that begin new stages, such as fc1,fc2; may be repeated")
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="a plan file instead of all of these")] = None,
    devices: Annotated[int | None, typer.Option(help="local devices for data parallelism without a placement")] = None,
    microbatches: Annotated[int | None, typer.Option(help="pieces of a batch that follow one another")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe, 1f1b, interleaved, zero-bubble or dynamic")] = None,
    staleness: Annotated[str | None, typer.Option(help="0, ssp, 2bw, or versions a stage such as 2,1")] = None,
    hold: Annotated[int | None, typer.Option(help="microbatches whose activations a stage may hold")] = None,
    route: Annotated[str | None, typer.Option(help="split or rotate")] = None,
    recompute: Annotated[bool, typer.Option(help="run forward again instead of keeping activations")] = False,
    buckets: Annotated[int | None, typer.Option(help="pieces that a stage's gradients are reduced in")] = None,
    data: Annotated[str, typer.Option(help="synthetic, or a folder of records, tar shards or images")] = "synthetic",
    evaluation_data: Annotated[str | None, typer.Option(help="synthetic, or a folder to evaluate on")] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="epochs between evaluations; one comes at the end as well")
    ] = None,
    on_corrupt: Annotated[str, typer.Option(help="images that cannot be read: stop or skip")] = "stop",
    recipe: Annotated[
        str | None, typer.Option(help="a recipe file or name (resnet50, alexnet, vgg16); other options override it")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps, at most")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the data")] = None,
    epoch_images: Annotated[
        int | None, typer.Option(help="images of an epoch of synthetic data; ImageNet's by default")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one")] = None,
    share: Annotated[int, typer.Option(help="workers that share one card, under CUDA MPS where it can be started")] = 1,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 with a dynamic loss scale, or fp64")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="largest norm of all gradients together")] = None,
    sync_batch_norm: Annotated[bool, typer.Option(help="batch norm over all replicas' rows")] = False,
    channels_last: Annotated[bool, typer.Option(help="images with their channels last in memory")] = False,
    compile: Annotated[bool, typer.Option(help="compile the stages with torch.compile")] = False,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam, adamw or rmsprop")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="the learning rate after warm-up")] = None,
    momentum: Annotated[float | None, typer.Option(help="of sgd and rmsprop")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="how strongly weights are drawn to 0")] = None,
    decay_all: Annotated[
        bool | None, typer.Option("--decay-all/--no-decay-all", help="weight decay of norms and biases too")
    ] = None,
    decay: Annotated[
        str | None, typer.Option(help="of the rate: none, cosine, step, polynomial or exponential")
    ] = None,
    decay_rate: Annotated[
        float | None, typer.Option(help="what step multiplies with, and exponential over the run")
    ] = None,
    decay_power: Annotated[float | None, typer.Option(help="of polynomial")] = None,
    decay_steps: Annotated[str | None, typer.Option(help="when step multiplies, such as 1000,2000")] = None,
    decay_epochs: Annotated[str | None, typer.Option(help="the same in epochs, such as 30,60,80")] = None,
    warm_up_steps: Annotated[int | None, typer.Option(help="steps over which the learning rate rises")] = None,
    warm_up_epochs: Annotated[float | None, typer.Option(help="the same in epochs")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="share of a label that goes to all classes")] = None,
    crop_area: Annotated[float | None, typer.Option(help="smallest share of an image that a random crop keeps")] = None,
    image_size: Annotated[int | None, typer.Option(help="side of the images")] = None,
    num_classes: Annotated[int | None, typer.Option(help="classes that the model tells apart")] = None,
    log_every: Annotated[int, typer.Option(help="steps between log lines")] = 10,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="log for TensorBoard too")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="log to Weights & Biases too")] = False,
    mlflow: Annotated[bool, typer.Option("--mlflow", help="log to MLflow too")] = False,
    warm_up: Annotated[int, typer.Option(help="first steps that are not measured")] = 2,
    transport: Annotated[
        str, typer.Option(help="between cards: nccl, staged in pinned memory, or auto: staged where cards are shared")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads a worker; by default its share of the cores")] = None,
    timeout: Annotated[float, typer.Option(help="seconds that anyone waits for anyone")] = 300.0,
    start_timeout: Annotated[float, typer.Option(help="seconds that workers may take to start")] = 300.0,
    save_timeout: Annotated[float, typer.Option(help="seconds that a checkpoint may take to be written")] = 1800.0,
    seed: Annotated[int, typer.Option()] = 0,
    on_nan: Annotated[str, typer.Option(help="numbers that are not finite: stop, or skip the step")] = "stop",
    self_check: Annotated[bool, typer.Option(help="compare the first step's gradients with plain autograd's")] = True,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="steps between checkpoints, in the folder of --out")
    ] = None,
    keep: Annotated[int, typer.Option(help="checkpoints that are kept, the newest ones")] = 3,
    save_final: Annotated[
        bool, typer.Option("--save-final/--no-save-final", help="save the last step, even where no other is saved")
    ] = True,
    resume: Annotated[str | None, typer.Option(help="auto, or the folder of a run or of a checkpoint")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="remove the run that is in the folder first")] = False,
    max_restarts: Annotated[int, typer.Option(help="times that a run whose worker died starts again by itself")] = 0,
    replan: Annotated[bool, typer.Option(help="go on without a device that failed for good")] = False,
    nodes: Annotated[str | None, typer.Option(help="hosts to start over ssh, such as host1,host2")] = None,
    remote_python: Annotated[
        str | None, typer.Option(help="the Python of those hosts; by default the path of the one that runs here")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="print the plan and the commands that would run, start nothing")
    ] = False,
    folder: Annotated[Path | None, typer.Option("-o", "--out", help="folder for logs and the record")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the record's figures as JSON")] = False,
) -> None:
    """Trains a model: data parallel, in a synchronous pipeline, or in a stale-synchronous one.

    Example: stagewright train tiny-cnn --batch 64 --placement 0:0-2.0:3 --cut fc1 --steps 20 --device cpu
    """
    options = dict(locals())
    from stagewright.training.command import run_command

    console = Console(stderr=as_json)
    record = run_command(options, console)
    if record is not None:
        show_record(record, as_json, console)


def show_record(record: Record, as_json: bool, console: Console) -> None:
    """Prints what a run came to: one line, or its figures as JSON; from one process, however many there are."""
    from stagewright.runtime.launch import is_main

    if not is_main():
        return
    if as_json:
        typer.echo(json.dumps(record.summary()))
    elif record.samples_per_s:
        epoch = f" · epoch {record.epoch_s:,.1f} s ({record.epoch_samples:,} images)" if record.epoch_s else ""
        console.print(
            f"\n{record.plan.model} on {record.plan.placement}: {record.samples_per_s:,.1f} images/s · "
            f"step {record.median_step_s * 1e3:,.1f} ms (median of {len(record.step_s)}){epoch}"
        )


__all__ = ["UsageError", "train"]
