"""Putting a worker where a checkpoint stands, under this plan or another, and the whole model out of one."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Collection, Mapping
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stagewright.errors import CheckpointError, FileError
from stagewright.runtime.checkpoint.contents import name_in_model, optimizer_name
from stagewright.runtime.checkpoint.storage import (
    MANIFEST,
    Tensors,
    checkpoints_in,
    opened,
    read_manifest,
    write_tensors,
)
from stagewright.runtime.replica import Replica
from stagewright.runtime.weights import Versions, is_alike
from stagewright.runtime.worker import Worker

_Read = Callable[[str], Tensor]
_SHARE = "share-"
"""How the key of a replica's share of a parameter begins."""


def restore(worker: Worker, folder: Path, manifest: Mapping[str, Any], *, options: bool) -> int:
    """Puts a worker where a checkpoint stands, and returns the step.

    With `options` the optimizer's groups get theirs back too.
    """
    _check_fits(worker, manifest)
    step = int(manifest["step"])
    with opened(folder, manifest) as read:
        for here in worker.replicas.values():
            _restore_stage(here, step, manifest, read, options=options)
        if manifest["placement"] == worker.plan.placement:
            own = f"random/{worker.world.worker}/"
            keys = [key for key in manifest["tensors"] if key.startswith(own)]
            _restore_random(worker.world.device, {key.removeprefix(own): read(key) for key in keys})
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


@torch.no_grad()
def _restore_stage(here: Replica, step: int, manifest: Mapping[str, Any], read: _Read, *, options: bool) -> None:
    for module in here.weights.modules:
        for name, tensor in module.state_dict().items():
            key = name_in_model(here, name)
            _fill(tensor, read(f"model/{key}"), key)
    for versions in (here.weights, *here.tied):
        versions.num_updates, count = step, versions.num_versions
        for batch in range(step, step + count):  # the next ones, of which each uses version batch − K + 1 in its slot
            back = step - max(0, batch - count + 1)
            for name, tensor in zip(versions.names, versions.parameters[versions.slot(batch)]):
                # Another plan may have kept fewer versions: the oldest it had comes nearest.
                older = (f"version-{number}/{name}" for number in range(back, -versions.is_ahead, -1))
                key = next((key for key in older if key in manifest["tensors"]), f"model/{name}")
                _fill(tensor, read(key), name)
        for name, moved in zip(versions.names, versions.moved if versions.is_ahead else ()):
            _fill(moved, read(f"model/{name}"), name)
        for name, moves in zip(versions.names, versions.moves):
            kept = read(key) if (key := f"moves/{name}") in manifest["tensors"] else moves
            moves.copy_(kept) if kept.shape == moves.shape else moves.fill_(nan)  # another delay begins anew
        if versions.optimizer is not None:
            _restore_optimizer(versions, versions.optimizer, manifest, read, options=options)
        if versions.scheduler is not None and manifest.get("scheduler"):
            # Rates of groups stay its own, which another plan may have more or fewer of.
            own = versions.scheduler.state_dict()
            kept = manifest["scheduler"].items()
            same = {key: value for key, value in kept if not isinstance(value, list) or len(value) == len(own[key])}
            versions.scheduler.load_state_dict({**own, **same})


def _fill(target: Tensor, value: Tensor, name: str) -> None:
    """Copies a restored value into its place."""
    if target.shape != value.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(value.shape)} in the checkpoint, but {tuple(target.shape)} in the model",
            "it is of another model: give the folder of a run of this one",
        )
    target.copy_(value)


def _restore_optimizer(
    versions: Versions, optimizer: Optimizer, manifest: Mapping[str, Any], read: _Read, *, options: bool
) -> None:
    """Gives the optimizer back what it kept, each tensor where and how it wants it."""
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {id(moved): number for number, moved in enumerate(versions.moved)}
    found = _kept_values(set(versions.moved_names), versions, manifest, read)
    pairs = ((own[id(member)], found[member.stagewright_name]) for member in members)
    state = {
        index: {kind: _laid_out(value, versions, number) for kind, value in kept.items()}
        for index, (number, kept) in enumerate(pairs)
    }
    whole = optimizer.state_dict()
    optimizer.load_state_dict({**whole, "state": {index: kept for index, kept in state.items() if kept}})
    for group in optimizer.param_groups if options else ():
        for key, value in manifest["options"].get(group["params"][0].stagewright_name, {}).items():
            if key in group and not isinstance(group[key], Tensor):
                group[key] = tuple(value) if isinstance(group[key], tuple) else value


def _kept_values(
    names: Collection[str], versions: Versions, manifest: Mapping[str, Any], read: _Read
) -> dict[str, dict[str, Any]]:
    """What the optimizer kept for each of these parameters, shares put together."""
    found: dict[str, dict[str, Any]] = {name: dict(manifest["numbers"].get(name, {})) for name in names}
    shares: dict[tuple[str, str], dict[int, Tensor]] = {}
    for key in manifest["tensors"]:
        what, _, rest = key.partition("/")
        kind, _, name = rest.partition("/")
        if what == "optimizer" and name in found:
            found[name][kind] = read(key)
        elif what.startswith(_SHARE) and name in found:
            shares.setdefault((name, kind), {})[int(what.removeprefix(_SHARE))] = read(key)
    shapes = {name: parameter.shape for name, parameter in zip(versions.names, versions.parameters[0])}
    for (name, kind), parts in shares.items():
        like, layout = next(iter(parts.values())), manifest.get("layouts", {}).get(name)
        whole = like.new_empty(shapes[name])
        whole = whole if layout is None else whole.new_empty_strided(shapes[name], layout)
        for start, part in parts.items():
            whole.as_strided((len(part),), (1,), start).copy_(part)
        found[name][kind] = whole
    return found


def _laid_out(value: Any, versions: Versions, number: int) -> Any:
    """What was kept for a parameter, laid out as it is, as fused steps want it; of the piece that is moved here."""
    piece = None if versions.pieces is None else versions.pieces[number]
    parameter = versions.parameters[0][number if piece is None else piece.parameter]
    if not is_alike(value, parameter):
        return value
    whole = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return whole if piece is None else piece.of(whole).clone()


def _restore_random(device: torch.device, states: Tensors) -> None:
    """Puts this process's generators where they stood."""
    plain = {kind: json.loads(bytes(states[kind].tolist())) for kind in ("python", "numpy") if kind in states}
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in plain:
        version, numbers, gauss = plain["python"]
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in plain:
        np.random.set_state(tuple(plain["numpy"]))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


# The whole model


def give_back(model: nn.Module, run_folder: Path) -> bool:
    """Copies the weights of a run's newest checkpoint, which it has just written, into the caller's model."""
    newest = next(iter(checkpoints_in(run_folder, own=True)), None)
    if newest is None:
        return False
    if all(each.is_meta for each in model.parameters()):  # it was built for its shapes
        return True
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
    with opened(folder, manifest) as read:
        named = {key.removeprefix("model/"): read(key).contiguous() for key in keys}
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
