"""`stagewright models`: what comes with the library, from a file of counts, so that nothing has to be built."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stagewright.errors import ModelError
from stagewright.planning.counted import Model, find_model, read_models


def _complete_model(incomplete: str) -> list[str]:
    """The names that begin like this, for the shell."""
    return [name for name in read_models() if name.startswith(incomplete)]


def models(
    name: Annotated[
        str | None, typer.Argument(help="A model; all of them if not given.", autocompletion=_complete_model)
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show the layers by name, in order.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show the models that come with the library, and their layers.

    Example: stagewright models vgg16 --layers
    """
    if layers and name is None:
        raise ModelError("--layers needs the name of a model", "for example: stagewright models vgg16 --layers")
    chosen = list(read_models().values()) if name is None else [find_model(name)]
    if as_json:
        typer.echo(json.dumps([_describe(model, layers) for model in chosen], ensure_ascii=False, indent=2))
        return
    console = Console(highlight=False, markup=False)
    console.print()
    console.print(_layer_table(chosen[0]) if layers else _model_table(chosen))
    if layers:
        console.print(f"\n  {chosen[0].name}: {chosen[0].about}")


def _describe(model: Model, layers: bool) -> dict[str, object]:
    """A model for machines, with its layers where they were asked for."""
    return model.summary() | ({"layers": [layer._asdict() for layer in model.layers]} if layers else {})


def _model_table(chosen: list[Model]) -> Table:
    """A line a model."""
    table = _make_table("model", "parameters", "layers", "forward FLOPs\na sample", "about")
    for model in chosen:
        table.add_row(
            model.name, f"{model.parameters:,}", str(len(model.layers)), _short(model.forward_flops), model.about
        )
    return table


def _layer_table(model: Model) -> Table:
    """A line a layer, and one for all of them."""
    table = _make_table("layer", "parameters", "forward FLOPs\na sample")
    for layer in model.layers:
        table.add_row(layer.name, f"{layer.parameters:,}", _short(layer.forward_flops))
    table.add_section()
    table.add_row("all", f"{model.parameters:,}", _short(model.forward_flops))
    return table


def _short(number: int) -> str:
    """`30.9 G`: a number of operations with three digits."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:#.3g} {letter}".replace(". ", " ")
    return f"{number}  "


def _make_table(*titles: str) -> Table:
    """An empty table whose first and last words stand left, and its numbers right."""
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    for title in titles:
        words = title in ("model", "layer", "about")
        table.add_column(title, justify="left" if words else "right", no_wrap=title != "about")
    return table
