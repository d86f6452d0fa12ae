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
        typer.Option("-o", "--out", help="model.safetensors, model.pt for a state dict, or a folder for hf: models"),
    ],
) -> None:
    """Writes the unsplit model's weights under its own names, as safetensors or as a plain state dict.

    A model that was named hf:FOLDER goes into a folder that from_pretrained reads, with configuration and tokenizer.

    Example: stagewright export results/vgg16 -o vgg16.safetensors
    """
    from stagewright.runtime.resuming import find_checkpoint, save_model

    is_file = out.suffix in (".safetensors", ".pt", ".pth")
    found = find_checkpoint(source, lambda text: typer.echo(visible(text), err=True))
    if found is None and (is_file or not out.suffix):
        raise CheckpointError(f"{source}: no good checkpoint was found", "train with --checkpoint-every N --out FOLDER")
    if not is_file and (found is None or not found[1]["model"].startswith("hf:")):
        raise UsageError(
            f"{out}: the ending {out.suffix!r} says no format",
            "use .safetensors, or .pt for a state dict; a folder is for models named hf:FOLDER",
        )
    assert found is not None
    number = save_model(found[0], out) if is_file else _save_folder(source, found[0], out)
    typer.echo(visible(f"{out}: {number:,} numbers of {found[1]['model']} after step {found[1]['step']}"))


def _save_folder(source: Path, checkpoint: Path, out: Path) -> int:
    """Writes the folder of a transformers model, and returns how many numbers it has."""
    from stagewright.models.huggingface import save_folder
    from stagewright.runtime.resuming import whole_model
    from stagewright.training.config import CONFIG_FILE, Config

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already", "name a new folder")
    tensors, manifest = whole_model(checkpoint)
    files = (folder / CONFIG_FILE for folder in (source, *checkpoint.parents[:2]))
    config = next((Config.load(file) for file in files if file.is_file()), None)
    save_folder(manifest["model"], tensors, out, num_classes=config.model.num_classes if config else None)
    return sum(tensor.numel() for tensor in tensors.values())
