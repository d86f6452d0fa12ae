"""Models by name: those that come with the library from a file of counts, so nothing is built; others from shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from stagewright.errors import ModelError
from stagewright.planning.fixed import LayerTable


class _Layer(NamedTuple):
    """One line of `--layers`."""

    name: str
    parameters: int
    forward_flops: int


class Model(NamedTuple):
    """One line of the table."""

    name: str
    about: str
    sample_shape: tuple[int, ...]
    layers: tuple[_Layer, ...]

    @property
    def parameters(self) -> int:
        """All parameters, shared ones once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward_flops(self) -> int:
        """Operations of one row's forward pass; a multiply-add is two."""
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def table(self) -> LayerTable:
        """What cutting needs to know of the layers, as for training: time goes by their operations."""
        return LayerTable(
            model=self.name, names=tuple(layer.name for layer in self.layers),
            flops=tuple(float(layer.forward_flops) for layer in self.layers),
            parameter_bytes=tuple(4 * layer.parameters for layer in self.layers),
        )  # fmt: skip

    def summary(self) -> dict[str, object]:
        """The figures that `--json` prints."""
        return {
            "name": self.name, "parameters": self.parameters, "num_layers": len(self.layers),
            "forward_flops": self.forward_flops, "sample_shape": self.sample_shape, "about": self.about,
        }  # fmt: skip


def read_models() -> Mapping[str, Model]:
    """The models in the file of counts, by name."""
    plain = json.loads((files("stagewright") / "models" / "counts.json").read_text(encoding="utf-8"))
    return {
        name: Model(name, each["about"], tuple(each["sample"]), tuple(_Layer(*layer) for layer in each["layers"]))
        for name, each in plain.items()
    }


def find_model(name: str) -> Model:
    """The model of this name; one that does not come with the library is looked at, which needs torch."""
    if name.startswith(("hf:", "python:")):
        return _looked_at(name)
    known = read_models()
    if name not in known:
        close = get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
        raise ModelError(f"no model is called '{name}'", hint)
    return known[name]


@cache
def _looked_at(name: str) -> Model:
    from stagewright.models import build_model, forward_flops, parameter_counts

    layered = build_model(name, device="meta")
    counts = zip(layered.names, parameter_counts(layered), forward_flops(layered))
    about = f"{type(layered.model).__name__}, rows of {' × '.join(map(str, layered.inputs[0].shape_per_row))}"
    return Model(name, about, layered.inputs[0].shape_per_row, tuple(_Layer(*layer) for layer in counts))
