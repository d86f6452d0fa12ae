"""The models that come with the library, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from stagewright.errors import ModelError
from stagewright.models import alexnet, gpt, resnet, tiny, vgg
from stagewright.models.huggingface import HUGGING_FACE, Adapt, build_pretrained
from stagewright.models.layered import Layered
from stagewright.models.loss import smoothed
from stagewright.models.making import make_layered
from stagewright.models.own import PYTHON, build_own
from stagewright.models.recipe import Recipe


@dataclass(frozen=True)
class _Entry:
    """A model of the zoo: how it is built, and with which options."""

    name: str
    build: Callable[..., Recipe]

    @property
    def about(self) -> str:
        """What the model is, in one line."""
        return (inspect.getdoc(self.build) or self.name).splitlines()[0]

    @property
    def options(self) -> Mapping[str, Any]:
        """The options and their defaults."""
        return {name: p.default for name, p in inspect.signature(self.build).parameters.items()}

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one row of the input, with the default options."""
        if "image_size" in self.options:
            return (3, self.options["image_size"], self.options["image_size"])
        return (self.options["context"],)


MODELS: Mapping[str, _Entry] = {
    name: _Entry(name, build)
    for name, build in (
        ("alexnet", alexnet.alexnet),
        ("alexnet-of", alexnet.alexnet_of),
        ("vgg16", vgg.vgg16),
        ("vgg16-bn", vgg.vgg16_bn),
        ("resnet18", resnet.resnet18),
        ("resnet50", resnet.resnet50),
        ("resnet101", resnet.resnet101),
        ("gpt2-small", gpt.gpt2_small),
        ("gpt2-small-untied", gpt.gpt2_small_untied),
        ("gpt-tiny", gpt.gpt),
        ("tiny-cnn", tiny.tiny_cnn),
        ("mlp", tiny.mlp),
    )
}


def build_model(
    name: str,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    num_classes: int | None = None,
    image_size: int | None = None,
    label_smoothing: float = 0.0,
    adapt: Adapt | None = None,
    from_scratch: bool = False,
    sequence_length: int | None = None,
    check: bool = True,
    load: bool = True,
    **options: Any,
) -> Layered:
    """A model by its name as layers, with the same weights wherever it is built with the same seed.

    The name is one of the zoo, `hf:FOLDER` or `python:FILE.py:FUNCTION`. On the device "meta" it has shapes and no
    weights, and takes neither time nor memory; without `load` weights that are in a folder stay there until a stage
    asks for its own. `adapt` changes the module before its layers are looked for.
    """
    if name.startswith((HUGGING_FACE, PYTHON)):
        given = {"image_size": image_size, **options}
        if name.startswith(PYTHON):
            given |= {"sequence_length": sequence_length, "from_scratch": from_scratch or None}
        for option, value in given.items():
            if value is not None:
                raise ModelError(f"'{name}' has no option '{option}'", "what a model is like stands in its own files")
    if name.startswith(HUGGING_FACE):
        is_real = torch.device(device).type != "meta"
        made = build_pretrained(
            name, seed=seed, num_classes=num_classes, sequence_length=sequence_length,
            from_scratch=from_scratch or not is_real, label_smoothing=label_smoothing, adapt=adapt, check=check,
        )  # fmt: skip
        return made.loaded(device) if load and is_real else made
    if name.startswith(PYTHON):
        return build_own(name, seed=seed, adapt=adapt)
    if sequence_length is not None:
        options["context"] = sequence_length
    entry = _find_entry(name)
    sizes = {"num_classes": num_classes, "image_size": image_size}
    recipe = _build(entry, options | {k: v for k, v in sizes.items() if v is not None}, seed, device)
    loss = smoothed(recipe.loss, label_smoothing) if label_smoothing else recipe.loss
    module = adapt(recipe.module) if adapt is not None else recipe.module
    return make_layered(module, recipe.inputs, loss=loss, targets=recipe.targets, names=recipe.layers)


def _find_entry(name: str) -> _Entry:
    """The zoo's entry of a name."""
    if name not in MODELS:
        close = get_close_matches(name, MODELS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(MODELS)}"
        raise ModelError(f"no model is called '{name}'", hint)
    return MODELS[name]


def _build(entry: _Entry, options: Mapping[str, Any], seed: int, device: torch.device | str) -> Recipe:
    unknown = [option for option in options if option not in entry.options]
    if unknown:
        raise ModelError(f"'{entry.name}' has no option '{unknown[0]}'", f"it has {', '.join(entry.options)}")
    on = torch.device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with on if on.type == "meta" else torch.device("cpu"):
            recipe = entry.build(**options)
    return recipe if on.type in ("meta", "cpu") else recipe.on(on)
