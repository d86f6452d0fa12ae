"""`stagewright export`: the whole model out of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.errors import CheckpointError, UsageError, visible


def export(
    source: Annotated[Path, typer.Argument(help="the folder of a run (--out) or of one checkpoint")],
    out: Annotated[Path, typer.Option("-o", "--out", help="model.safetensors, or model.pt for a plain state dict")],
) -> None:
    """Writes the unsplit model's weights under its own names, as safetensors or as a plain state dict.

    Example: stagewright export results/vgg16 -o vgg16.safetensors
    """
    from stagewright.runtime.checkpoint.resuming import find_checkpoint, save_model

    if out.suffix not in (".safetensors", ".pt", ".pth"):
        raise UsageError(
            f"{out}: the ending {out.suffix!r} says no format", "use .safetensors, or .pt for a state dict"
        )
    found = find_checkpoint(source, lambda text: typer.echo(visible(text), err=True))
    if found is None:
        raise CheckpointError(f"{source}: no good checkpoint was found", "train with --checkpoint-every N --out FOLDER")
    number = save_model(found[0], out)
    typer.echo(visible(f"{out}: {number:,} numbers of {found[1]['model']} after step {found[1]['step']}"))
