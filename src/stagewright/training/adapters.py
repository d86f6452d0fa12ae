"""The adapters of a run out of its checkpoint: as peft's files, or added to the weights they stand before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from stagewright.errors import UsageError
from stagewright.models import build_model
from stagewright.models.lora import Lora, is_adapter, merged, save_adapters
from stagewright.runtime.checkpoint.resuming import whole_model
from stagewright.runtime.run_folder import CHECKPOINTS
from stagewright.training.config import CONFIG_FILE, Config

_HUGGING_FACE = "hf:"


def lora_of(config: Config) -> Lora | None:
    """The adapters that a configuration asks for."""
    asked = config.model
    if asked.lora is None:
        return None
    return Lora(rank=asked.lora, targets=asked.lora_targets, alpha=asked.lora_alpha, seed=config.settings.seed)


def has_adapters(tensors: Iterable[str]) -> bool:
    """Whether there are adapters among a checkpoint's tensors."""
    return any(map(is_adapter, tensors))


def export_adapters(checkpoint: Path, out: Path) -> int:
    """Writes the adapters in a checkpoint as peft reads them, and returns how many numbers they have."""
    config, lora = _read(checkpoint)
    name = config.model.name
    base = name.removeprefix(_HUGGING_FACE) if name.startswith(_HUGGING_FACE) else None
    return save_adapters(whole_model(checkpoint), lora, out, base=base)


def merging(checkpoint: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A function from a checkpoint's tensors to those of the model alone, with the adapters added to its weights."""
    config, lora = _read(checkpoint)
    shapes = build_model(
        config.model.name, device="meta", num_classes=config.model.num_classes, image_size=config.model.image_size,
        adapt=lora,
    )  # fmt: skip
    return lambda tensors: merged(shapes.model, tensors)


def _read(checkpoint: Path) -> tuple[Config, Lora]:
    """The configuration of the run that a checkpoint is of, and its adapters."""
    folder = checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent
    if not (folder / CONFIG_FILE).is_file():
        raise UsageError(
            f"{folder} has no {CONFIG_FILE}, which says what the adapters are",
            "in Python, stagewright.models.lora.save_adapters(model.state_dict(), Lora(…), FOLDER) writes them",
        )
    config = Config.load(folder / CONFIG_FILE)
    lora = lora_of(config)
    if lora is None:
        raise UsageError(f"{folder} is of a run without --lora")
    return config, lora
