"""The weights of a pretrained model: read from its folder tensor by tensor, or drawn.

    model.safetensors.index.json ─▶ which file has which tensor ─▶ the tensors of one stage, straight to its device

What a folder calls a tensor need not be what the model calls it, and several may make one: transformers knows how.
What is drawn follows from the seed and the tensor's name alone, so it is the same in whatever stage the tensor is.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stagewright.errors import ModelError
from stagewright.models.tracing import attribute

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def _read_index(folder: Path) -> dict[str, Path]:
    """For each tensor in a folder the file that holds it; every file is looked at, but nothing is read."""
    if (folder / _INDEX).is_file():
        try:
            listed = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): folder / str(file) for name, file in listed.items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{folder / _INDEX} cannot be read: {error}") from None
    elif (folder / _SINGLE).is_file():
        files = dict.fromkeys(_names_in(folder / _SINGLE), folder / _SINGLE)
    else:
        raise ModelError(
            f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}",
            "save it with save_pretrained, or draw weights with --from-scratch",
        )
    for file in sorted(set(files.values())):
        lost = {name for name, of in files.items() if of == file} - _names_in(file)
        if lost:
            raise ModelError(f"{file} lacks '{min(lost)}', which {_INDEX} says it has", "fetch the folder again")
    return files


def _names_in(file: Path) -> set[str]:
    """The names of the tensors in a file; refuses one that is missing, cut off or no safetensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            return set(opened.keys())
    except FileNotFoundError:
        raise ModelError(f"{file} is missing, though {_INDEX} names it", "fetch the folder again") from None
    except (SafetensorError, OSError) as fault:
        raise ModelError(f"{file} cannot be read: {fault}", "it may have been cut off: fetch it again") from None


class Pretrained:
    """Where the weights of a model come from that has shapes alone."""

    def __init__(self, model: Any, folder: Path, *, seed: int, from_scratch: bool) -> None:
        self._files = {} if from_scratch else _read_index(folder)
        self._seed, self._model, self._plain = seed, model, model.state_dict()
        if self._files and not self._sources.keys() & self._plain.keys():
            raise ModelError(
                f"no tensor in {folder} belongs to a {type(model).__name__}: it has '{min(self._files)}', not "
                f"'{min(self._plain)}'",
                "is config.json of another model?",
            )

    @property
    def drawn(self) -> tuple[str, ...]:
        """The tensors that the folder does not have, though it has others."""
        tied = getattr(self._model, "all_tied_weights_keys", {})
        return tuple(name for name in self._plain if self._files and name not in self._sources and name not in tied)

    @cached_property
    def _sources(self) -> dict[str, tuple[Any, tuple[tuple[str, str], ...]]]:
        """For each tensor of the model the rule that makes it, and the (pattern, name) of each that it is made of."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        made: dict[str, list[tuple[str, str]]] = {}
        rule_of: dict[str, Any] = {}
        prefix = self._model.base_model_prefix
        for name in sorted(self._files, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, self._plain)
            if target not in self._plain and name in self._plain:
                target, pattern = name, None
            rule_of[target] = by_pattern.get(str(pattern))
            made.setdefault(target, []).append((pattern or name, name))
        found = {target: (rule_of[target], tuple(names)) for target, names in made.items()}
        for target, rule in rule_of.items():  # a rule may make several from one: the first stands for them
            for other in rule.target_patterns[1:] if rule is not None else ():
                found[target.replace(rule.target_patterns[0], other)] = found[target]
        return found

    def fill(self, model: nn.Module, names: Iterable[str], device: torch.device | str) -> None:
        """Gives parameters and buffers that have shapes alone their numbers, on a device; others are left alone."""
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        places: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            places.setdefault(id(tensor), []).append(name)
        given = {name: places[id(tensors[name])] for name in sorted(set(names)) if tensors[name].is_meta}
        with ExitStack() as files:
            opened: dict[Path, Any] = {}
            for name, everywhere in given.items():
                known = (each.replace(".base_layer.", ".") for each in everywhere)  # as it is without adapters
                source = next((each for each in known if each in self._sources), None)
                if source is not None and attribute(model, name).is_meta:  # its twin may have been read
                    made = self._read(source, opened, files, device)
                    _put(model, everywhere, made.to(tensors[name].dtype))
        left = {name: everywhere for name, everywhere in given.items() if attribute(model, name).is_meta}
        if left:
            self._draw(model, left, device)

    def _read(self, name: str, opened: dict[Path, Any], files: ExitStack, device: torch.device | str) -> Tensor:
        """One tensor of the model, from those of the folder."""
        rule, sources = self._sources[name]
        rule, read = deepcopy(rule), []
        for pattern, source in sources:
            file = self._files[source]
            if file not in opened:
                opened[file] = files.enter_context(safe_open(file, framework="pt", device=str(device)))
            read.append(opened[file].get_tensor(source))
            if rule is not None:
                rule.add_tensor(name, source, pattern, read[-1])
        made: Any = read[0]
        if rule is not None:
            config = self._model.config
            made = rule.convert(name, model=self._model, config=config, hf_quantizer=None, loading_info=None)[name]
        whole: Tensor = made[0] if isinstance(made, list) else made
        expected = self._plain[name].shape
        if whole.shape != expected:
            raise ModelError(
                f"'{sources[0][1]}' in {self._files[sources[0][1]]} has the shape {tuple(whole.shape)}, the model "
                f"{tuple(expected)}",
                "is config.json of another model?",
            )
        return whole

    def _draw(self, model: nn.Module, names: Mapping[str, Collection[str]], device: torch.device | str) -> None:
        """Draws numbers on the CPU, module by module, each tensor's from a seed of its own; children before parents."""
        for name, everywhere in names.items():
            _put(model, everywhere, torch.empty_like(attribute(model, name), device="cpu"))
        within = {""}
        for owner in {name.rpartition(".")[0] for each in names.values() for name in each}:
            parts = owner.split(".")
            within |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        fresh = {id(attribute(model, name)): name for name in names}
        for tensor in (*model.parameters(), *model.buffers()):
            tensor._is_hf_initialized = id(tensor) not in fresh  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _SeededByName(self._seed, fresh):
            for path in sorted(within, key=lambda each: (each == "", -each.count("."), each)):
                self._draw_module(model, path, fresh)
        for name, everywhere in names.items():
            _put(model, everywhere, attribute(model, name).to(device))

    def _draw_module(self, model: nn.Module, path: str, fresh: Collection[int]) -> None:
        from transformers import PreTrainedModel, initialization

        module, inside = model.get_submodule(path), f".{path}."
        if ".lora_A." in inside or ".lora_B." in inside:
            for each in module.parameters(recurse=False):
                if id(each) in fresh:
                    nn.init.kaiming_uniform_(each, a=math.sqrt(5)) if ".lora_A." in inside else nn.init.zeros_(each)
            return
        parts = path.split(".") if path else []
        owners = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
        owner = next((each for each in owners if isinstance(each, PreTrainedModel)), self._model)
        with initialization.guard_torch_init_functions():
            owner._init_weights(module)


class _SeededByName(TorchFunctionMode):
    """Begins anew, from a seed of its own, whenever one of some tensors is drawn."""

    def __init__(self, seed: int, names: Mapping[int, str]) -> None:
        super().__init__()
        self.seed, self.names = seed, names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (self.names.get(id(each)) for each in (*args, *(kwargs or {}).values()))
        if (name := next(filter(None, given), None)) is not None:
            torch.manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        return func(*args, **(kwargs or {}))


def _put(model: nn.Module, names: Collection[str], tensor: Tensor) -> None:
    """Puts one tensor in all places where the model has it."""
    first = attribute(model, next(iter(names)))
    if isinstance(first, nn.Parameter):
        tensor = nn.Parameter(tensor.detach(), requires_grad=first.requires_grad)
    for name in names:
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        (module._parameters if own in module._parameters else module._buffers)[own] = tensor  # type: ignore[assignment]
