"""Models by their names: those that come with the library, `hf:FOLDER`, and `python:FILE.py:FUNCTION`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from stagewright.errors import ModelError
from stagewright.models import networks
from stagewright.models.huggingface import HUGGING_FACE, Adapt, build_pretrained
from stagewright.models.layered import Layered
from stagewright.models.loss import smoothed
from stagewright.models.making import make_layered

_PYTHON = "python:"
_FORM = "write python:FILE.py:FUNCTION"


@dataclass(frozen=True)
class _Entry:
    """A model of the zoo: what it is, in one line, and how it is built."""

    about: str
    build: Callable[..., networks.Recipe]


_GPT2 = partial(networks.gpt, num_blocks=12, width=768, num_heads=12, vocabulary=50257, context=1024)

MODELS: Mapping[str, _Entry] = {
    "alexnet": _Entry(
        "torchvision's AlexNet: max pooling, dropout before fc1 and fc2", partial(networks.alexnet, True)
    ),
    "alexnet-of": _Entry(
        "OneFlow's AlexNet: average pooling, dropout after fc1 and fc2", partial(networks.alexnet, False)
    ),
    "vgg16": _Entry("VGG16", partial(networks.vgg16, False)),
    "vgg16-bn": _Entry("VGG16 with a batch norm after each convolution", partial(networks.vgg16, True)),
    "resnet18": _Entry("ResNet-18", partial(networks.resnet, False, (2, 2, 2, 2))),
    "resnet50": _Entry("ResNet-50", partial(networks.resnet, True, (3, 4, 6, 3))),
    "resnet101": _Entry("ResNet-101", partial(networks.resnet, True, (3, 4, 23, 3))),
    "gpt2-small": _Entry("GPT-2 small: the head sharing the embedding's weight", partial(_GPT2, tied=True)),
    "gpt2-small-untied": _Entry("GPT-2 small with weights of its own in the head: cut anywhere", _GPT2),
    "gpt-tiny": _Entry("A GPT of any size, by default a tiny one with weights of its own in the head", networks.gpt),
    "gpt": _Entry("A GPT of any size: --layers, --width, --heads, --vocabulary, --sequence-length", networks.gpt),
    "tiny-cnn": _Entry("conv1, conv2, fc1, fc2: no batch norm, no dropout", networks.tiny_cnn),
    "mlp": _Entry("fc1 … fcN, all of one width", networks.mlp),
}


def build_model(
    name: str, *, seed: int = 0, device: torch.device | str = "cpu", num_classes: int | None = None,
    image_size: int | None = None, label_smoothing: float = 0.0, adapt: Adapt | None = None,
    from_scratch: bool = False, sequence_length: int | None = None, check: bool = True, load: bool = True,
    **options: Any,
) -> Layered:  # fmt: skip
    """A model by its name as layers, with the same weights wherever it is built with the same seed.

    The name is one of the zoo, `hf:FOLDER` or `python:FILE.py:FUNCTION`. On the device "meta" it has shapes and no
    weights, and takes neither time nor memory; without `load` weights that are in a folder stay there until a stage
    asks for its own. `adapt` changes the module before its layers are looked for.
    """
    if name.startswith((HUGGING_FACE, _PYTHON)):
        given = {"image_size": image_size, **options}
        if name.startswith(_PYTHON):
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
    if name.startswith(_PYTHON):
        return _build_own(name, seed, adapt)
    sizes = {"num_classes": num_classes, "image_size": image_size, "context": sequence_length}
    recipe = _build(name, options | {k: v for k, v in sizes.items() if v is not None}, seed, torch.device(device))
    loss = smoothed(recipe.loss, label_smoothing) if label_smoothing else recipe.loss
    module = adapt(recipe.module) if adapt is not None else recipe.module
    return make_layered(module, recipe.inputs, loss=loss, targets=recipe.targets, names=recipe.layers)


def _build(name: str, options: Mapping[str, Any], seed: int, device: torch.device) -> networks.Recipe:
    """A model of the zoo; weights are drawn on the CPU, so they do not depend on the device."""
    if name not in MODELS:
        close = get_close_matches(name, MODELS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(MODELS)}"
        raise ModelError(f"no model is called '{name}'", hint)
    build = MODELS[name].build
    known = inspect.signature(build).parameters
    if unknown := [option for option in options if option not in known]:
        raise ModelError(f"'{name}' has no option '{unknown[0]}'", f"it has {', '.join(known)}")
    with torch.random.fork_rng(devices=[]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.manual_seed(seed)
        recipe = build(**options)
    inputs, targets = (tuple(each.to(device) for each in some) for some in (recipe.inputs, recipe.targets))
    return replace(recipe, module=recipe.module.to(device), inputs=inputs, targets=targets)


def _build_own(name: str, seed: int, adapt: Adapt | None) -> Layered:
    """The layers that a function in a file returns, on the device where it makes them."""
    made = made_by(name, seed)
    if not isinstance(made, Layered):
        raise ModelError(
            f"{name} returned a {type(made).__name__}, not layers",
            "return sw.make_layered(module, (inputs,), loss=…, targets=(labels,))",
        )
    if adapt is None:
        return made
    return make_layered(adapt(made.model), made.sample, loss=made.loss, targets=made.sample_targets)


def made_by(name: str, seed: int) -> Any:
    """What python:FILE.py:FUNCTION returns, the same wherever it is called with the same seed."""
    file, _, called = name.removeprefix(_PYTHON).rpartition(":")
    path = Path(file)
    if not file or not called.isidentifier():
        raise ModelError(f"{name} names no function of a file", _FORM)
    if not path.is_file():
        raise ModelError(f"{name}: there is no file {path.absolute()}", _FORM)
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{name}: {path} is no Python file", _FORM)
    module = sys.modules[path.stem] = module_from_spec(spec)
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    function = getattr(module, called, None)
    if not callable(function):
        raise ModelError(f"{path} has no function {called}", _FORM)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return function()
