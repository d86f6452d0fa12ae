"""Finding a run's checkpoints again, and putting a worker where one stands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright.errors import CheckpointError, FileError
from stagewright.runtime.checkpoint.snapshot import optimizer_name, restore_random, restore_stage, wanted_keys
from stagewright.runtime.checkpoint.storage import Tensors, read_manifest, read_tensors, write_tensors
from stagewright.runtime.run_folder import MANIFEST, checkpoints_in, is_of_run
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, gather_json


def find_checkpoint(
    folder: Path, tell: Callable[[str], None], world: World | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint and its manifest; `folder` is that of a run, which must be its run, or a checkpoint.

    Of those that are torn, damaged or of another run `tell` hears why they are passed over. With a world all of its
    workers must ask: each looks at its share of the files, and all find the same.
    """
    worker, size, group = (world.worker, world.size, world.control) if world else (0, 1, None)
    for path in map(Path, gather_json([str(path) for path in checkpoints_in(folder)], group, size)[0]):
        manifest, fault = None, f"checkpoint {path} is of another run"
        if is_of_run(path, folder):
            try:
                manifest, fault = read_manifest(path, worker, size), ""
            except CheckpointError as found:
                fault = found.what
        faults = gather_json(fault, group, size)
        if manifest is not None and not any(faults):
            return path, manifest
        tell(f"{next(filter(None, faults))}; it is passed over")
    return None


def restore(worker: Worker, folder: Path, manifest: Mapping[str, Any], *, options: bool) -> int:
    """Puts a worker where a checkpoint stands, and returns the step."""
    _check_fits(worker, manifest)
    known, step, world = manifest["tensors"], int(manifest["step"]), worker.world
    same = manifest["placement"] == worker.plan.placement
    randoms = [key for key in known if same and key.startswith(f"random/{world.worker}/")]
    wanted = {stage: wanted_keys(here, known) for stage, here in worker.replicas.items()}
    keys = {key for each in wanted.values() for key in each.values()}.union(randoms)
    tensors = read_tensors(folder, manifest, sorted(keys))
    for stage, here in worker.replicas.items():
        own = {key: tensors[source] for key, source in wanted[stage].items()}
        restore_stage(here, step, own, manifest, options=options)
    restore_random(world.worker, world.device, tensors)
    if worker.scale.is_on:
        worker.scale.restore(step, *manifest["loss_scale"])
    return step


def _check_fits(worker: Worker, manifest: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose data position or optimizer means something else here."""
    plan, optimizer = worker.plan, optimizer_name(worker.replicas.values())
    here = {"model": plan.model, "batch": plan.batch, "seed": worker.settings.seed, "optimizer": optimizer}
    for key, value in here.items():
        saved = manifest.get(key)
        if saved != value and (key != "optimizer" or None not in (saved, value)):
            option = f", or go on with --{key} {saved}" if key != "model" else ""
            raise CheckpointError(
                f"the checkpoint is of a run with {key} {saved}, this one has {value}",
                f"start anew without --resume{option}",
            )


def give_back(model: nn.Module, run_folder: Path) -> bool:
    """Copies the weights of a run's newest checkpoint, which it has just written, into the caller's model."""
    newest = next(iter(checkpoints_in(run_folder, own=True)), None)
    if newest is None:
        return False
    named = _named_tensors(newest, json.loads((newest / MANIFEST).read_text(encoding="utf-8")))
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in named and not tensor.is_meta:
                tensor.copy_(named[name])
    return True


def whole_model(folder: Path) -> Tensors:
    """The unsplit model's tensors under its own names, of a checkpoint that must be good."""
    return _named_tensors(folder, read_manifest(folder))


def _named_tensors(folder: Path, manifest: Mapping[str, Any]) -> Tensors:
    keys = [key for key in manifest["tensors"] if key.startswith("model/")]
    tensors = read_tensors(folder, manifest, keys)
    named = {key.removeprefix("model/"): tensor.contiguous() for key, tensor in tensors.items()}
    return named | {name: named[of] for name, of in manifest["aliases"].items()}


def save_model(checkpoint: Path, out: Path, change: Callable[[Tensors], Tensors] | None = None) -> int:
    """Writes the unsplit model, changed where asked, whole or not at all, and returns how many numbers it has.

    A file that ends in .safetensors has every tensor once more under each of its names; .pt is what `torch.load` with
    weights_only=True and `load_state_dict` take.
    """
    tensors = whole_model(checkpoint)
    tensors = tensors if change is None else change(tensors)
    part = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".safetensors":
            write_tensors(part, {name: tensor.clone() for name, tensor in tensors.items()})
        else:
            torch.save(tensors, part)
        os.replace(part, out)
    except OSError as fault:
        part.unlink(missing_ok=True)
        raise FileError(f"{out}: {fault.strerror}", "give a path that can be written") from None
    return sum(tensor.numel() for tensor in tensors.values())
