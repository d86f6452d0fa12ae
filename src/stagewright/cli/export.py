"""`stagewright export`: the whole model out of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.errors import visible


def export(
    source: Annotated[Path, typer.Argument(help="the folder of a run (--out) or of one checkpoint")],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="model.safetensors, model.pt for a state dict, or a folder for hf: models"),
    ],
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="add a run's adapters to the weights")] = False,
) -> None:
    """Writes the unsplit model's weights under its own names, or a run's adapters in peft's own format.

    A model that was named hf:FOLDER goes into a folder that from_pretrained reads, with configuration and tokenizer.

    Example: stagewright export results/vgg16 -o vgg16.safetensors
    """
    from stagewright.training.export import export_model

    told = export_model(source, out, merge_lora=merge_lora, tell=lambda text: typer.echo(visible(text), err=True))
    typer.echo(visible(told))
