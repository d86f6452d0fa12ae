"""Writes `models/counts.json`: what `stagewright models` shows without building the models.

Run it after a change to the zoo; a test compares the file with the models.
"""

from __future__ import annotations

from pathlib import Path

import stagewright
from stagewright.models import MODELS, build_model, forward_flops, parameter_counts
from stagewright.schema import dump_json

FILE = Path(stagewright.__file__).parent / "models" / "counts.json"


def count_model(name: str) -> dict[str, object]:
    """What the file says of one model: [layer, parameters, forward operations a row] for each layer."""
    model = build_model(name, device="meta")
    layers = zip((layer.name for layer in model.layers), parameter_counts(model), forward_flops(model))
    sample, about = list(model.inputs[0].shape_per_row), MODELS[name].about
    return {"about": about, "sample": sample, "layers": [list(layer) for layer in layers]}


if __name__ == "__main__":
    FILE.write_text(dump_json({name: count_model(name) for name in MODELS}), encoding="utf-8")
    print(f"saved {FILE.name}: {len(MODELS)} models")
