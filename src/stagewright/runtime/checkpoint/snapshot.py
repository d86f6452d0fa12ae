"""A stage's whole state as tensors under the unsplit model's names, and back, under this plan or another.

model/NAME               the newest weights, and buffers
version-1/NAME …         the weights one update before, and so on, where a stage keeps several versions
optimizer/KIND/NAME      what the optimizer keeps for a parameter: momentum_buffer, exp_avg …
random/WORKER/…          the state of a worker's generators
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stagewright.errors import CheckpointError
from stagewright.runtime.checkpoint.storage import Tensors
from stagewright.runtime.compiling import COMPILED
from stagewright.runtime.replica import Replica
from stagewright.runtime.weights import Versions


def stage_tensors(here: Replica) -> Tensors:
    """The state of a stage that all its replicas have in common, not copied."""
    found, buffers = {}, stage_buffers(here)
    elsewhere = {name for tied in here.tied if tied.owner != here.stage for name in tied.names}
    for name, tensor in here.weights.newest().state_dict().items():
        key = _name_in_model(here, name)
        if f"model/{_plain(name)}" not in buffers and key not in elsewhere:
            found[f"model/{key}"] = tensor
    for versions in _saved(here):
        for back in range(1, versions.num_versions):
            slot = versions.parameters[versions.slot(versions.num_updates - 1 - back)]
            found.update({f"version-{back}/{name}": tensor for name, tensor in zip(versions.names, slot)})
        for name, kind, value in _optimizer_values(versions):
            if isinstance(value, Tensor):
                found[f"optimizer/{kind}/{name}"] = value
    return found


def _saved(here: Replica) -> list[Versions]:
    """What a stage saves: its own parameters, and those that it is the first of several to use."""
    return [here.weights, *(tied for tied in here.tied if tied.owner == here.stage)]


def _name_in_model(here: Replica, name: str) -> str:
    """The first name that the model has for a tensor of a stage."""
    return here.names.get(_plain(name), _plain(name))


def stage_buffers(here: Replica) -> Tensors:
    """The stage's buffers that are saved with a model; they follow each replica's own rows."""
    module = here.weights.newest()
    names, saved = {name for name, _ in module.named_buffers()}, module.state_dict()
    return {f"model/{_plain(name)}": tensor for name, tensor in saved.items() if name in names}


def _plain(name: str) -> str:
    """A name without what torch.compile adds."""
    return name.removeprefix(COMPILED)


def _optimizer_values(weights: Versions) -> Iterator[tuple[str, str, Any]]:
    """(parameter, kind, value) of everything that the optimizer keeps."""
    if weights.optimizer is None:
        return
    for parameter, name in zip(weights.moved, weights.names):
        for kind, value in weights.optimizer.state.get(parameter, {}).items():
            yield name, kind, value


def optimizer_name(stages: Iterable[Replica]) -> str | None:
    """What the stages' optimizer is called, as --optimizer names it; None where no stage has one."""
    made = (here.weights.optimizer for here in stages)
    return next((type(optimizer).__name__.lower() for optimizer in made if optimizer is not None), None)


def stage_numbers(here: Replica) -> dict[str, Any]:
    """What the optimizer keeps that is no tensor: plain numbers by parameter, and the options of its groups."""
    numbers: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for versions in _saved(here):
        options |= _group_options(versions.optimizer)
        for name, kind, value in _optimizer_values(versions):
            if isinstance(value, int | float | bool):
                numbers.setdefault(name, {})[kind] = value
    scheduler = here.weights.scheduler
    state = {key: value for key, value in scheduler.state_dict().items() if _is_plain(value)} if scheduler else {}
    return {"numbers": numbers, "options": options, "scheduler": state}


def _group_options(optimizer: Optimizer | None) -> dict[str, dict[str, Any]]:
    """For each parameter the options of its group, where they are plain."""
    found = {}
    for group in optimizer.param_groups if optimizer is not None else ():
        plain = {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
        options = {key: value.item() if isinstance(value, Tensor) else value for key, value in plain.items()}
        for parameter in group["params"]:
            found[parameter.stagewright_name] = options
    return found


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value, itself or as a list of numbers."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return (
        value is None or isinstance(value, bool | int | float | str) or (isinstance(value, Tensor) and value.dim() == 0)
    )


# Back again


def wanted_keys(here: Replica, known: Mapping[str, Any]) -> dict[str, str]:
    """For each tensor of the stage the key that it is restored from; `known` are the keys of the checkpoint."""
    all_names = [_name_in_model(here, name) for name in here.weights.newest().state_dict()]
    wanted = {f"model/{name}": f"model/{name}" for name in all_names}
    names = set()
    for versions in (here.weights, *here.tied):
        names.update(versions.names)
        for back, name in product(range(1, versions.num_versions), versions.names):
            # Another plan may have kept fewer versions: the oldest it had comes nearest.
            kept = next((old for old in range(back, 0, -1) if f"version-{old}/{name}" in known), 0)
            wanted[f"version-{back}/{name}"] = f"version-{kept}/{name}" if kept else f"model/{name}"
    kinds = (key.split("/", 2) for key in known if key.startswith("optimizer/"))
    wanted.update({f"optimizer/{kind}/{name}": f"optimizer/{kind}/{name}" for _, kind, name in kinds if name in names})
    lost = next((key for key in wanted.values() if key not in known), None)
    if lost is not None:
        raise CheckpointError(
            f"the checkpoint has no {lost.removeprefix('model/')}, which stage {here.stage} needs",
            "it is of another model: give the folder of a run of this one",
        )
    return wanted


@torch.no_grad()
def restore_stage(here: Replica, step: int, tensors: Tensors, numbers: Mapping[str, Any], *, options: bool) -> None:
    """Puts a stage where it stood after `step` updates; with `options` the optimizer's groups get theirs back too."""
    for module in here.weights.modules:
        for name, tensor in module.state_dict().items():
            key = _name_in_model(here, name)
            _fill(tensor, tensors[f"model/{key}"], key)
    for versions in (here.weights, *here.tied):
        versions.num_updates = step
        for slot in range(versions.num_versions):
            _restore_slot(versions, slot, step, tensors)
        if versions.optimizer is not None:
            _restore_optimizer(versions, versions.optimizer, tensors, numbers)
        if versions.optimizer is not None and options:
            for group in versions.optimizer.param_groups:
                for key, value in numbers["options"].get(group["params"][0].stagewright_name, {}).items():
                    if key in group and not isinstance(group[key], Tensor):
                        group[key] = tuple(value) if isinstance(group[key], tuple) else value
        if versions.scheduler is not None and numbers.get("scheduler"):
            # Rates of groups stay its own, which another plan may have more or fewer of.
            own = versions.scheduler.state_dict()
            kept = numbers["scheduler"].items()
            same = {key: value for key, value in kept if not isinstance(value, list) or len(value) == len(own[key])}
            versions.scheduler.load_state_dict({**own, **same})


def _restore_slot(versions: Versions, slot: int, step: int, tensors: Tensors) -> None:
    """Fills a slot with the version that the next batch in it uses; batch b uses version b − K + 1."""
    count = versions.num_versions
    batch = next(batch for batch in range(step, step + count) if versions.slot(batch) == slot)
    back = step - max(0, batch - count + 1)
    for name, tensor in zip(versions.names, versions.parameters[slot]):
        _fill(tensor, tensors.get(f"version-{min(back, count - 1)}/{name}", tensors[f"model/{name}"]), name)


def _fill(target: Tensor, value: Tensor, name: str) -> None:
    """Copies a restored value into its place."""
    if target.shape != value.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(value.shape)} in the checkpoint, but {tuple(target.shape)} in the model",
            "it is of another model: give the folder of a run of this one",
        )
    target.copy_(value)


def _restore_optimizer(weights: Versions, optimizer: Optimizer, tensors: Tensors, numbers: Mapping[str, Any]) -> None:
    """Gives the optimizer back what it kept, each tensor where and how it wants it."""
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found: dict[str, dict[str, Any]] = {name: dict(numbers["numbers"].get(name, {})) for name in weights.names}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, kind, name = key.split("/", 2)
            if name in found:
                found[name][kind] = value
    state = {
        index: {kind: _laid_out(value, parameter) for kind, value in found[parameter.stagewright_name].items()}
        for index, parameter in enumerate(members)
    }
    whole = optimizer.state_dict()
    optimizer.load_state_dict({**whole, "state": {index: kept for index, kept in state.items() if kept}})


def _laid_out(value: Any, parameter: nn.Parameter) -> Any:
    """A tensor of the parameter's shape in the parameter's memory layout too, as fused steps want it."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def random_tensors(worker: int, device: torch.device) -> Tensors:
    """The state of this process's generators."""
    found = {f"random/{worker}/torch": torch.get_rng_state()}
    version, numbers, gauss = random.getstate()
    found[f"random/{worker}/python"] = _as_tensor([version, list(numbers), gauss])
    found[f"random/{worker}/numpy"] = _as_tensor([np.asarray(part).tolist() for part in np.random.get_state()])
    if device.type == "cuda":
        found[f"random/{worker}/cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_random(worker: int, device: torch.device, tensors: Tensors) -> None:
    """Puts this process's generators where they stood."""
    if f"random/{worker}/torch" in tensors:
        torch.set_rng_state(tensors[f"random/{worker}/torch"])
    if f"random/{worker}/python" in tensors:
        version, numbers, gauss = json.loads(bytes(tensors[f"random/{worker}/python"].tolist()))
        random.setstate((version, tuple(numbers), gauss))
    if f"random/{worker}/numpy" in tensors:
        np.random.set_state(tuple(json.loads(bytes(tensors[f"random/{worker}/numpy"].tolist()))))
    if device.type == "cuda" and f"random/{worker}/cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"random/{worker}/cuda"], device)


def _as_tensor(value: object) -> Tensor:
    """A plain value as bytes in a tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
