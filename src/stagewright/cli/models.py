"""`stagewright models`: what comes with the library, from a file of counts, so that nothing has to be built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer

from stagewright.cli.options import takes
from stagewright.cli.show import show, table
from stagewright.errors import ModelError
from stagewright.planning.counted import find_model, read_models


@dataclass(frozen=True, kw_only=True)
class _Shown:
    layers: bool = False
    """show the layers by name, in order"""
    json: bool = False
    """print the figures as JSON"""


def _complete_model(incomplete: str) -> list[str]:
    return [name for name in read_models() if name.startswith(incomplete)]


@takes()
def models(
    name: Annotated[
        str | None, typer.Argument(help="a model; all of them if not given", autocompletion=_complete_model)
    ] = None,
    *, own: _Shown,
) -> None:  # fmt: skip
    """Show the models that come with the library, and their layers.

    Example: stagewright models vgg16 --layers
    """
    if own.layers and name is None:
        raise ModelError("--layers needs the name of a model", "for example: stagewright models vgg16 --layers")
    chosen = list(read_models().values()) if name is None else [find_model(name)]
    if own.json:
        layers = [{"layers": [layer._asdict() for layer in model.layers]} if own.layers else {} for model in chosen]
        plain = [{**model.summary(), **more} for model, more in zip(chosen, layers)]
        typer.echo(json.dumps(plain, ensure_ascii=False, indent=2))
    elif own.layers:
        model = chosen[0]
        rows = [(layer.name, f"{layer.parameters:,}", _short(layer.forward_flops)) for layer in model.layers]
        rows.append(("all", f"{model.parameters:,}", _short(model.forward_flops)))
        show(table("layer | parameters> | forward FLOPs\na sample>", rows), f"{model.name}: {model.about}")
    else:
        cells = (
            (each.name, f"{each.parameters:,}", str(len(each.layers)), _short(each.forward_flops), each.about)
            for each in chosen
        )
        show(table("model | parameters> | layers> | forward FLOPs\na sample> | about", cells))


def _short(number: int) -> str:
    """`30.9 G`: a number of operations with three digits."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:#.3g} {letter}".replace(". ", " ")
    return f"{number}  "
