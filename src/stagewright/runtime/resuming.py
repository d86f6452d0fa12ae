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
from stagewright.runtime.run_folder import CHECKPOINTS, read_identity
from stagewright.runtime.snapshot import optimizer_name, restore_random, restore_stage, wanted_keys
from stagewright.runtime.storage import MANIFEST, NAME, Tensors, open_plain, read_manifest, read_tensors, write_tensors
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, gather_json

_Found = tuple[Path, dict[str, Any]]
"""A checkpoint with its manifest."""


def path_of(run_folder: Path, step: int) -> Path:
    """The folder of the checkpoint after so many steps."""
    return run_folder / CHECKPOINTS / f"step-{step:08d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, or in the folder of a run, newest first; good or not. One of them is itself."""
    if NAME.fullmatch(folder.name):
        return [folder]
    inside = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    if not inside.is_dir():
        return []
    found = [(int(match[1]), entry) for entry in inside.iterdir() if (match := NAME.fullmatch(entry.name))]
    return [entry for _, entry in sorted(found, reverse=True)]


def run_of(folder: Path) -> str | None:
    """The id of the run that a folder belongs to, where it is known."""
    return (read_identity(folder) or {}).get("id")


def is_of_run(path: Path, run: str | None) -> bool:
    """Whether a checkpoint says that it is of a run; those of older versions do not say, and any is of no run."""
    if run is None:
        return True
    try:
        with open_plain(path / MANIFEST) as file:
            said = json.load(file).get("run")
    except (OSError, ValueError, AttributeError):
        said = None
    return said is None or said == run


def _look(path: Path, run: str | None, worker: int = 0, num_workers: int = 1) -> dict[str, Any] | str:
    """The manifest of a checkpoint that is good and of the run, or why it is passed over."""
    if not is_of_run(path, run):
        return f"checkpoint {path} is of another run"
    try:
        return read_manifest(path, worker, num_workers)
    except CheckpointError as fault:
        return fault.what


def find_checkpoint(folder: Path, tell: Callable[[str], None]) -> _Found | None:
    """The newest good checkpoint; `folder` is that of a run, which must be its run, or a checkpoint itself.

    Of those that are torn, damaged or of another run `tell` hears why they are passed over.
    """
    for path in checkpoints_in(folder):
        found = _look(path, run_of(folder))
        if not isinstance(found, str):
            return path, found
        tell(f"{found}; it is passed over")
    return None


def find_together(world: World, folder: Path, tell: Callable[[str], None]) -> _Found | None:
    """The same by all workers, each of which looks at its share of a checkpoint's files; all must ask."""
    told = gather_json([str(path) for path in checkpoints_in(folder)], world.control, world.size)
    for path in map(Path, told[0]):
        found = _look(path, run_of(folder), world.worker, world.size)
        faults = gather_json(found if isinstance(found, str) else None, world.control, world.size)
        if not isinstance(found, str) and not any(faults):
            return path, found
        tell(f"{next(filter(None, faults))}; it is passed over")
    return None


def restore(worker: Worker, folder: Path, manifest: Mapping[str, Any], *, options: bool) -> int:
    """Puts a worker where a checkpoint stands, and returns the step."""
    _check_fits(worker, manifest)
    known, step, world = manifest["tensors"], manifest["step"], worker.world
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
        worker.scale.restore(int(step), *manifest["loss_scale"])
    return int(step)


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
    newest = next((path for path in checkpoints_in(run_folder) if is_of_run(path, run_of(run_folder))), None)
    if newest is None:
        return False
    if all(each.is_meta for each in model.parameters()):  # it was built for its shapes
        return True
    named, _ = _named_tensors(newest, json.loads((newest / MANIFEST).read_text(encoding="utf-8")))
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in named and not tensor.is_meta:
                tensor.copy_(named[name])
    return True


def whole_model(folder: Path) -> tuple[Tensors, dict[str, Any]]:
    """The unsplit model's tensors under its own names, of a good checkpoint, and the manifest."""
    return _named_tensors(folder, read_manifest(folder))


def _named_tensors(folder: Path, manifest: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    keys = [key for key in manifest["tensors"] if key.startswith("model/")]
    named = {
        key.removeprefix("model/"): tensor.contiguous() for key, tensor in read_tensors(folder, manifest, keys).items()
    }
    named.update({name: named[of] for name, of in manifest["aliases"].items()})
    return named, manifest


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
