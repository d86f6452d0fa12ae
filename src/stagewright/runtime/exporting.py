"""The whole model of a checkpoint as one file for others."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from stagewright.errors import FileError
from stagewright.runtime.resuming import whole_model
from stagewright.runtime.storage import write_tensors


def save_model(checkpoint: Path, out: Path) -> int:
    """Writes the unsplit model, whole or not at all, and returns how many numbers it has.

    A file that ends in .safetensors has every tensor once more under each of its names; .pt is what `torch.load` with
    weights_only=True and `load_state_dict` take.
    """
    tensors, _ = whole_model(checkpoint)
    part = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".safetensors":
            write_tensors(part, tensors)
        else:
            torch.save(tensors, part)
        os.replace(part, out)
    except OSError as fault:
        part.unlink(missing_ok=True)
        raise FileError(f"{out}: {fault.strerror}", "give a path that can be written") from None
    return sum(tensor.numel() for tensor in tensors.values())
