"""The whole model out of a checkpoint: as a file, as transformers' folder, or its adapters as peft's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagewright.errors import CheckpointError, UsageError
from stagewright.models import build_model
from stagewright.models.lora import Lora, is_adapter, merged, save_adapters
from stagewright.runtime.checkpoint.resuming import save_model, whole_model
from stagewright.runtime.checkpoint.storage import find_checkpoint
from stagewright.training.config import CONFIG_FILE, Config
from stagewright.training.recipes import Adapters

_HUGGING_FACE = "hf:"


def lora_of(asked: Adapters, seed: int = 0) -> Lora | None:
    """The adapters that are asked for."""
    if asked.lora is None:
        return None
    return Lora(rank=asked.lora, targets=asked.lora_targets, alpha=asked.lora_alpha, seed=seed)


def export_model(source: Path, out: Path, *, merge_lora: bool, tell: Callable[[str], None]) -> str:
    """Writes the model of a run or of one checkpoint, and returns a line on what was written.

    A checkpoint that is passed over is told.
    """
    is_file = out.suffix in (".safetensors", ".pt", ".pth")
    found = find_checkpoint(source, tell)
    if found is None and (is_file or not out.suffix):
        raise CheckpointError(f"{source}: no good checkpoint was found", "train with --checkpoint-every N --out FOLDER")
    is_adapted = found is not None and any(map(is_adapter, found[1]["tensors"]))
    if found is None or not (is_file or is_adapted or found[1]["model"].startswith(_HUGGING_FACE)):
        raise UsageError(
            f"{out}: the ending {out.suffix!r} says no format",
            "use .safetensors, or .pt for a state dict; a folder is for models named hf:FOLDER, and for adapters",
        )
    if merge_lora and not is_adapted:
        raise UsageError(f"{source} has no adapters to merge", "leave --merge-lora out")
    checkpoint, manifest = found
    files = (folder / CONFIG_FILE for folder in (source, *checkpoint.parents[:2]))
    is_plain = is_file and not merge_lora  # then nothing need be known of the run
    config = None if is_plain else next((Config.load(file) for file in files if file.is_file()), None)
    lora = _lora_in(config, source) if is_adapted and not is_plain else None
    model, what = str(manifest["model"]), "numbers"

    def changed(tensors: dict[str, Any]) -> dict[str, Any]:
        """The model's tensors, with the adapters added to its weights where that is asked for."""
        if not merge_lora or config is None:
            return tensors
        name, classes, size = config.model.name, config.model.num_classes, config.model.image_size
        shapes = build_model(name, device="meta", num_classes=classes, image_size=size, adapt=lora)
        return merged(shapes.model, tensors)

    if is_file:
        number = save_model(checkpoint, out, changed)
    elif config is not None and lora is not None and not merge_lora:
        name = config.model.name
        base = name.removeprefix(_HUGGING_FACE) if name.startswith(_HUGGING_FACE) else None
        number, what = save_adapters(whole_model(checkpoint), lora, out, base=base), "numbers of adapters"
    else:
        from stagewright.models.huggingface import save_folder

        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} is there already", "name a new folder")
        tensors = changed(whole_model(checkpoint))
        save_folder(model, tensors, out, num_classes=config.model.num_classes if config else None)
        number = sum(tensor.numel() for tensor in tensors.values())
    return f"{out}: {number:,} {what} of {model} after step {manifest['step']}"


def _lora_in(config: Config | None, source: Path) -> Lora:
    if config is None:
        raise UsageError(
            f"{source} has no {CONFIG_FILE}, which says what the adapters are",
            "in Python, stagewright.models.lora.save_adapters(model.state_dict(), Lora(…), FOLDER) writes them",
        )
    lora = lora_of(config.model, config.settings.seed)
    if lora is None:
        raise UsageError(f"{source} is of a run without --lora")
    return lora
