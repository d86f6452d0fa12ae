"""`stagewright export`: the whole model out of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.errors import CheckpointError, UsageError, visible

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = dict[str, Tensor]


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
    from stagewright.runtime.checkpoint.resuming import save_model
    from stagewright.runtime.checkpoint.storage import find_checkpoint
    from stagewright.training.adapters import export_adapters, has_adapters, merging

    is_file = out.suffix in (".safetensors", ".pt", ".pth")
    found = find_checkpoint(source, lambda text: typer.echo(visible(text), err=True))
    if found is None and (is_file or not out.suffix):
        raise CheckpointError(f"{source}: no good checkpoint was found", "train with --checkpoint-every N --out FOLDER")
    is_adapted = found is not None and has_adapters(found[1]["tensors"])
    if found is None or not (is_file or is_adapted or found[1]["model"].startswith("hf:")):
        raise UsageError(
            f"{out}: the ending {out.suffix!r} says no format",
            "use .safetensors, or .pt for a state dict; a folder is for models named hf:FOLDER, and for adapters",
        )
    if merge_lora and not is_adapted:
        raise UsageError(f"{source} has no adapters to merge", "leave --merge-lora out")
    checkpoint, manifest = found
    change, what = merging(checkpoint) if merge_lora else None, "numbers"
    if is_file:
        number = save_model(checkpoint, out, change)
    elif is_adapted and change is None:
        number, what = export_adapters(checkpoint, out), "numbers of adapters"
    else:
        number = _save_folder(source, checkpoint, out, change)
    typer.echo(visible(f"{out}: {number:,} {what} of {manifest['model']} after step {manifest['step']}"))


def _save_folder(source: Path, checkpoint: Path, out: Path, change: Callable[[Tensors], Tensors] | None) -> int:
    """Writes the folder of a transformers model, changed where asked, and returns how many numbers it has."""
    from stagewright.models.huggingface import save_folder
    from stagewright.runtime.checkpoint.resuming import whole_model
    from stagewright.runtime.checkpoint.storage import read_manifest
    from stagewright.training.config import CONFIG_FILE, Config

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already", "name a new folder")
    tensors = whole_model(checkpoint)
    tensors = tensors if change is None else change(tensors)
    files = (folder / CONFIG_FILE for folder in (source, *checkpoint.parents[:2]))
    config = next((Config.load(file) for file in files if file.is_file()), None)
    name = str(read_manifest(checkpoint)["model"])
    save_folder(name, tensors, out, num_classes=config.model.num_classes if config else None)
    return sum(tensor.numel() for tensor in tensors.values())
