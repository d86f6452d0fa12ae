"""`stagewright train`: trains a model for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stagewright.errors import UsageError

Text = Annotated[str | None, typer.Option()]


def train(
    model: Annotated[str, typer.Argument(help="a model of `stagewright models`")],
    batch: Annotated[int | None, typer.Option(help="rows of one optimizer step, over all devices")] = None,
    batch_per_device: Annotated[int | None, typer.Option(help="rows of one replica of the first stage")] = None,
    placement: Annotated[str, typer.Option(help="stages on devices: 0:0-6.0:7; empty is data parallelism")] = "",
    ratio: Annotated[str | None, typer.Option(help="how the stages' costs stand, such as 11:7")] = None,
    ratio_of: Annotated[str, typer.Option(help="what the ratio is of: time, flops, params or layers")] = "time",
    cut: Annotated[list[str] | None, typer.Option(help="a layer that begins a new stage; may be repeated")] = None,
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
    evaluation_data: Annotated[str | None, typer.Option(help="a folder to evaluate on after every epoch")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the data")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one")] = None,
    share: Annotated[int, typer.Option(help="workers that share one card, under CUDA MPS where it can be started")] = 1,
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64")] = "fp32",
    clip_norm: Annotated[float | None, typer.Option(help="largest norm of all gradients together")] = None,
    sync_batch_norm: Annotated[bool, typer.Option(help="batch norm over all replicas' rows")] = False,
    channels_last: Annotated[bool, typer.Option(help="images with their channels last in memory")] = False,
    compile: Annotated[bool, typer.Option(help="compile the stages with torch.compile")] = False,
    optimizer: Annotated[str, typer.Option(help="sgd, adam, adamw or rmsprop")] = "sgd",
    learning_rate: Annotated[float, typer.Option(help="the learning rate after warm-up")] = 0.01,
    momentum: Annotated[float, typer.Option(help="of sgd and rmsprop")] = 0.9,
    weight_decay: Annotated[float, typer.Option()] = 0.0,
    decay: Annotated[str, typer.Option(help="none, cosine, step, polynomial or exponential")] = "none",
    warm_up_steps: Annotated[int, typer.Option(help="steps over which the learning rate rises")] = 0,
    label_smoothing: Annotated[float, typer.Option()] = 0.0,
    image_size: Annotated[int | None, typer.Option(help="side of the images")] = None,
    num_classes: Annotated[int | None, typer.Option(help="classes that the model tells apart")] = None,
    log_every: Annotated[int, typer.Option(help="steps between log lines")] = 10,
    warm_up: Annotated[int, typer.Option(help="first steps that are not measured")] = 2,
    threads: Annotated[int | None, typer.Option(help="CPU threads a worker; by default its share of the cores")] = None,
    timeout: Annotated[float, typer.Option(help="seconds that anyone waits for anyone")] = 300.0,
    seed: Annotated[int, typer.Option()] = 0,
    on_nan: Annotated[str, typer.Option(help="stop or skip")] = "stop",
    nodes: Annotated[str | None, typer.Option(help="hosts to start over ssh, such as host1,host2")] = None,
    dry_run: Annotated[bool, typer.Option(help="print each host's command, start nothing")] = False,
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
    if record is None:
        return
    if as_json:
        typer.echo(json.dumps(record.summary()))
    elif record.images_per_s:
        epoch = f" · epoch {record.epoch_s:,.1f} s ({record.epoch_images:,} images)" if record.epoch_s else ""
        console.print(
            f"\n{record.plan.model} on {record.plan.placement}: {record.images_per_s:,.1f} images/s · "
            f"step {record.median_step_s * 1e3:,.1f} ms (median of {len(record.step_s)}){epoch}"
        )


__all__ = ["UsageError", "train"]
