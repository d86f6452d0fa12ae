"""What a checkpoint holds of a stage, by the unsplit model's names."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagewright.runtime.checkpoint.storage import Tensors
from stagewright.runtime.compiling import COMPILED
from stagewright.runtime.replica import Replica
from stagewright.runtime.weights import Versions, is_alike


def _own_share(tensors: Tensors, replica: int, num_replicas: int) -> Tensors:
    """The tensors that this replica saves: all replicas hold the same ones and share the work by size."""
    loads, mine = [0] * num_replicas, {}
    for key in sorted(tensors):
        owner = loads.index(min(loads))
        loads[owner] += tensors[key].numel() * tensors[key].element_size()
        if owner == replica:
            mine[key] = tensors[key]
    return mine


def stage_tensors(here: Replica, num_replicas: int) -> Tensors:
    """What this replica saves of its stage, not copied: its part of what all have, and what it alone has."""
    found, buffers, alone = dict[str, Tensor](), stage_buffers(here), dict[str, Tensor]()
    elsewhere = {name for tied in here.tied if tied.owner != here.stage for name in tied.names}
    for name, tensor in here.weights.newest().state_dict().items():
        key = name_in_model(here, name)
        if f"model/{name.removeprefix(COMPILED)}" not in buffers and key not in elsewhere:
            found[f"model/{key}"] = tensor
    for versions in _saved(here):
        if versions.is_ahead:  # what its newest slot holds is for batches to come
            found.update({f"model/{name}": tensor for name, tensor in zip(versions.names, versions.moved)})
        found.update({f"moves/{name}": tensor for name, tensor in zip(versions.names, versions.moves)})
        for back in range(not versions.is_ahead, versions.num_versions):
            slot = versions.parameters[versions.slot(versions.num_updates - 1 - back)]
            found.update({f"version-{back}/{name}": tensor for name, tensor in zip(versions.names, slot)})
        states = {key: value for key, _, _, value in _optimizer_values(versions) if isinstance(value, Tensor)}
        (found if versions.pieces is None else alone).update(states)
    return _own_share(found, here.replica, num_replicas) | alone


def _saved(here: Replica) -> list[Versions]:
    """What a stage saves: its own parameters, and those that it is the first of several to use."""
    return [here.weights, *(tied for tied in here.tied if tied.owner == here.stage)]


def name_in_model(here: Replica, name: str) -> str:
    """The first name that the model has for a tensor of a stage, without what torch.compile adds."""
    plain = name.removeprefix(COMPILED)
    return here.names.get(plain, plain)


def stage_buffers(here: Replica) -> Tensors:
    """The stage's buffers that are saved with a model; they follow each replica's own rows."""
    module = here.weights.newest()
    names, saved = {name for name, _ in module.named_buffers()}, module.state_dict()
    return {f"model/{name.removeprefix(COMPILED)}": tensor for name, tensor in saved.items() if name in names}


def _optimizer_values(versions: Versions) -> Iterator[tuple[str, str, str, Any]]:
    """(key, parameter, kind, value) of everything that the optimizer keeps; what shares have in common once."""
    for number, (moved, name) in enumerate(zip(versions.moved, versions.moved_names)):
        for kind, value in versions.optimizer.state.get(moved, {}).items() if versions.optimizer else ():
            piece = None if versions.pieces is None else versions.pieces[number]
            is_cut = piece is not None and moved.numel() < versions.parameters[0][piece.parameter].numel()
            if piece is not None and is_cut and is_alike(value, moved):
                yield f"share-{piece.start}/{kind}/{name}", name, kind, value
            elif piece is None or piece.start == 0:
                yield f"optimizer/{kind}/{name}", name, kind, value


def optimizer_name(stages: Iterable[Replica]) -> str | None:
    """What the stages' optimizer is called, as --optimizer names it; None where no stage has one."""
    made = (here.weights.optimizer for here in stages)
    return next((type(optimizer).__name__.lower() for optimizer in made if optimizer is not None), None)


def add_numbers(here: Replica, about: dict[str, Any]) -> None:
    """Adds what is no tensor: the optimizer's plain numbers and its groups' options by parameter, the scheduler."""
    for versions in _saved(here):
        for group in versions.optimizer.param_groups if versions.optimizer is not None else ():
            plain = {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
            options = {key: value.item() if isinstance(value, Tensor) else value for key, value in plain.items()}
            about["options"].update((parameter.stagewright_name, options) for parameter in group["params"])
        strides = zip(versions.names, versions.parameters[0]) if versions.pieces is not None else ()
        about["layouts"].update((name, list(each.stride())) for name, each in strides if not each.is_contiguous())
        for _, name, kind, value in _optimizer_values(versions):
            if isinstance(value, int | float | bool):
                about["numbers"].setdefault(name, {})[kind] = value
    if here.weights.scheduler is not None and not about["scheduler"]:
        state = here.weights.scheduler.state_dict().items()
        about["scheduler"] = {key: value for key, value in state if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value, itself or as a list of numbers."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, bool | int | float | str)


def random_tensors(worker: int, device: torch.device) -> Tensors:
    """The state of this process's generators."""
    plain = {"python": random.getstate(), "numpy": [np.asarray(part).tolist() for part in np.random.get_state()]}
    texts = {kind: bytearray(json.dumps(state).encode()) for kind, state in plain.items()}
    found = {kind: torch.frombuffer(text, dtype=torch.uint8) for kind, text in texts.items()}
    found["torch"] = torch.get_rng_state()
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return {f"random/{worker}/{kind}": state for kind, state in found.items()}
