"""`stagewright models`: what comes with the library, from a file of counts, so that nothing has to be built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from stagewright.errors import ModelError


class Layer(NamedTuple):
    """One line of `--layers`."""

    name: str
    parameters: int
    forward_flops: int


class Model(NamedTuple):
    """One line of the table."""

    name: str
    about: str
    sample_shape: tuple[int, ...]
    layers: tuple[Layer, ...]

    @property
    def parameters(self) -> int:
        """All parameters, shared ones once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward_flops(self) -> int:
        """Operations of one row's forward pass; a multiply-add is two."""
        return sum(layer.forward_flops for layer in self.layers)

    def summary(self) -> dict[str, object]:
        """The figures that `--json` prints."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "num_layers": len(self.layers),
            "forward_flops": self.forward_flops,
            "sample_shape": self.sample_shape,
            "about": self.about,
        }


def read_models() -> Mapping[str, Model]:
    """The models in the file of counts, by name."""
    plain = json.loads((files("stagewright") / "models" / "counts.json").read_text(encoding="utf-8"))
    return {name: make_model(name, entry) for name, entry in plain.items()}


def make_model(name: str, entry: dict[str, Any]) -> Model:
    """The model that one entry of the file describes."""
    return Model(name, entry["about"], tuple(entry["sample"]), tuple(Layer(*layer) for layer in entry["layers"]))


def find_model(name: str) -> Model:
    """The model of this name."""
    known = read_models()
    if name not in known:
        close = get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
        raise ModelError(f"no model is called '{name}'", hint)
    return known[name]


def complete_model(incomplete: str) -> list[str]:
    """The names that begin like this, for the shell."""
    return [name for name in read_models() if name.startswith(incomplete)]


def models(
    name: Annotated[
        str | None, typer.Argument(help="A model; all of them if not given.", autocompletion=complete_model)
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
        typer.echo(json.dumps([describe(model, layers) for model in chosen], ensure_ascii=False, indent=2))
        return
    console = Console(highlight=False, markup=False)
    console.print()
    console.print(layer_table(chosen[0]) if layers else model_table(chosen))
    if layers:
        console.print(f"\n  {chosen[0].name}: {chosen[0].about}")


def describe(model: Model, layers: bool) -> dict[str, object]:
    """A model for machines, with its layers where they were asked for."""
    return model.summary() | ({"layers": [layer._asdict() for layer in model.layers]} if layers else {})


def model_table(chosen: list[Model]) -> Table:
    """A line a model."""
    table = make_table("model", "parameters", "layers", "forward FLOPs\na sample", "about")
    for model in chosen:
        table.add_row(
            model.name, f"{model.parameters:,}", str(len(model.layers)), short(model.forward_flops), model.about
        )
    return table


def layer_table(model: Model) -> Table:
    """A line a layer, and one for all of them."""
    table = make_table("layer", "parameters", "forward FLOPs\na sample")
    for layer in model.layers:
        table.add_row(layer.name, f"{layer.parameters:,}", short(layer.forward_flops))
    table.add_section()
    table.add_row("all", f"{model.parameters:,}", short(model.forward_flops))
    return table


def short(number: int) -> str:
    """`30.9 G`: a number of operations with three digits."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:#.3g} {letter}".replace(". ", " ")
    return f"{number}  "


def make_table(*titles: str) -> Table:
    """An empty table whose first and last words stand left, and its numbers right."""
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    for title in titles:
        words = title in ("model", "layer", "about")
        table.add_column(title, justify="left" if words else "right", no_wrap=title != "about")
    return table
