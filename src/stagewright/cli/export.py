"""`stagewright export`: the whole model out of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.errors import CheckpointError, UsageError, visible


def export(
    source: Annotated[Path, typer.Argument(help="the folder of a run (--out) or of one checkpoint")],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="model.safetensors, model.pt, or a folder for adapters as peft reads them"),
    ],
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="Add a run's adapters to the weights.")] = False,
) -> None:
    """Writes the unsplit model's weights under its own names, or a run's adapters in peft's own format.

    Example: stagewright export results/vgg16 -o vgg16.safetensors
    """
    from stagewright.runtime.checkpoint.resuming import find_checkpoint, save_model
    from stagewright.training.adapters import export_adapters, has_adapters, merging

    if out.suffix not in ("", ".safetensors", ".pt", ".pth"):
        raise _no_format(out)
    found = find_checkpoint(source, lambda text: typer.echo(visible(text), err=True))
    if found is None:
        raise CheckpointError(f"{source}: no good checkpoint was found", "train with --checkpoint-every N --out FOLDER")
    checkpoint, manifest = found
    is_adapted = has_adapters(manifest["tensors"])
    if merge_lora and not is_adapted:
        raise UsageError(f"{source} has no adapters to merge", "leave --merge-lora out")
    if is_adapted and not merge_lora and not out.suffix:
        number = export_adapters(checkpoint, out)
        typer.echo(
            visible(f"{out}: adapters of {number:,} numbers for {manifest['model']} after step {manifest['step']}")
        )
        return
    if not out.suffix:
        raise _no_format(out)
    number = save_model(checkpoint, out, merging(checkpoint) if merge_lora else None)
    typer.echo(visible(f"{out}: {number:,} numbers of {manifest['model']} after step {manifest['step']}"))


def _no_format(out: Path) -> UsageError:
    """What is wrong with a file's name."""
    return UsageError(f"{out}: the ending {out.suffix!r} says no format", "use .safetensors, or .pt for a state dict")
