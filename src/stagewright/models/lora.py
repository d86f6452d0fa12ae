"""Low-rank adapters by the library peft: a model that is frozen but for them, and they in peft's own files.

q_proj ─▶ q_proj.base_layer (frozen)  +  alpha / rank · lora_B · lora_A        W + alpha / rank · B A, once merged
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.errors import ModelError
from stagewright.models.tracing import first_line

_ADAPTER = "default"
"""What peft calls an adapter that nobody named; it stands in the names of its parameters."""
_BASE, _A, _B = ".base_layer.", f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
_PREFIX = "base_model.model."
"""What stands before the names in peft's files."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """What is put into a model."""

    rank: int
    targets: tuple[str, ...] = ()
    """Names of modules, or how they end; those that peft knows for the model's architecture where none are given."""
    alpha: float | None = None
    """Adapters count alpha / rank times; twice the rank if left out."""
    seed: int = 0
    """Adapters are drawn from it and their names, the same ones on every worker and under every plan."""

    def config(self) -> Any:
        """The same as peft has it."""
        try:
            from peft import LoraConfig
        except ImportError:
            raise ModelError("adapters need the package peft, which is not installed", "pip install peft") from None
        targets = self.targets[0] if self.targets == ("all-linear",) else list(self.targets) or None
        alpha: Any = 2 * self.rank if self.alpha is None else self.alpha
        return LoraConfig(r=self.rank, lora_alpha=alpha, target_modules=targets)

    def __call__(self, model: nn.Module) -> nn.Module:
        """The model with adapters in it; the rest is frozen, and what has shapes alone stays so."""
        config = self.config()
        from peft import inject_adapter_in_model
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

        for target in self.targets:
            _check_target(model, target)
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if not self.targets and kind is not None and kind not in KNOWN:
            config.target_modules = "all-linear"
        has_shapes_alone = any(each.is_meta for each in model.parameters())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that Conv1D keeps its weight the other way round
                made: nn.Module = inject_adapter_in_model(config, model, low_cpu_mem_usage=has_shapes_alone)
        except ValueError as fault:
            told = f"no adapters fit the model: {first_line(fault)}"
            raise ModelError(told, "name linear layers with --lora-targets") from None
        for name, parameter in made.named_parameters():  # drawn as peft does, but each from a seed of its own
            if _A in name and not parameter.is_meta:  # what has shapes alone is drawn later
                seed = zlib.crc32(f"{self.seed} {name.removesuffix('.weight')}".encode())
                fresh = torch.empty(parameter.shape)
                nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed))
                with torch.no_grad():
                    parameter.copy_(fresh)
        return made


def _check_target(model: nn.Module, target: str) -> None:
    """Refuses a target that no linear layer answers to."""
    names = [name for name, each in model.named_modules() if type(each).__name__ in ("Linear", "Conv1D")]
    if target == "all-linear" or any(name == target or name.endswith(f".{target}") for name in names):
        return
    known = sorted({name if name.rpartition(".")[2].isdigit() else name.rpartition(".")[2] for name in names})
    raise ModelError(
        f"--lora-targets {target}: no linear layer of the model is called that", f"there are {', '.join(known)}"
    )


# Out again


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return name.endswith((_A, _B))


def save_adapters(tensors: Mapping[str, Tensor], lora: Lora, out: Path, *, base: str | None = None) -> int:
    """Writes the adapters as `PeftModel.from_pretrained` reads them, and returns how many numbers they have."""
    from safetensors.torch import save_file

    own = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
    config = lora.config()
    config.target_modules = set(_targets_in(tensors))
    config.base_model_name_or_path = base
    config.inference_mode = True
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(out))
    plain = {_PREFIX + name.replace(f".{_ADAPTER}.", "."): each.detach().contiguous() for name, each in own.items()}
    save_file(plain, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})
    return sum(each.numel() for each in own.values())


def _targets_in(tensors: Mapping[str, Tensor]) -> list[str]:
    """The modules with adapters by the ends of their names, or by their whole names where others end so too."""
    paths = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    parts = [name.replace(_BASE, ".").split(".")[:-1] for name in tensors if ".lora_" not in name]
    others = {".".join(each[:depth]) for each in parts for depth in range(1, len(each) + 1)} - paths
    ends = {path.rpartition(".")[2] for path in paths}
    return sorted(paths if any(other.rpartition(".")[2] in ends for other in others) else ends)


def merged(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the model as it was before adapters came in, with these added to its weights.

    `model` has the adapters, perhaps as shapes alone; `tensors` are those of a checkpoint, by its names.
    """
    from peft.tuners.lora import LoraLayer

    found = {name.replace(_BASE, "."): each for name, each in tensors.items() if ".lora_" not in name}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer) and path + _A in tensors:
            more = tensors[path + _B].double() @ tensors[path + _A].double() * module.scaling[_ADAPTER]
            weight = found[f"{path}.weight"]
            if getattr(module, "fan_in_fan_out", False):  # an embedding and GPT-2's layers have theirs turned
                more = more.T
            with torch.no_grad():
                found[f"{path}.weight"] = (weight.double() + more).to(weight.dtype)
    return found
