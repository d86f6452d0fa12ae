"""`stagewright data`: makes, converts and inspects sets of labelled images, and turns text into tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from stagewright.data.source import Faults, need
from stagewright.data.writing import IMAGES_PER_FILE, check_format

if TYPE_CHECKING:
    from stagewright.data.inspection import Inspection, Spread
    from stagewright.data.source import Dataset, OnCorrupt
    from stagewright.data.writing import Format

app = typer.Typer(add_completion=False, no_args_is_help=True)

_FORMATS = "folder, ofrecord or tar"
_SHOWN_CLASSES = 12
_SHOWN_FAULTS = 5
_AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
_OnFault = Annotated[str, typer.Option(help="Records that cannot be read: stop or skip.")]
_PerFile = Annotated[int, typer.Option(help="Images of one OFRecord part or tar shard.")]


@app.callback()
def data() -> None:
    """Make, convert and inspect sets of labelled images: class folders, OFRecord parts, WebDataset tar shards.

    Turn text into tokens.

    Example: stagewright data make shapes --images 500 --format ofrecord
    """


@app.command()
def make(
    directory: Annotated[Path, typer.Argument(help="A new folder for the images.")],
    images: Annotated[int, typer.Option(help="How many images, as many of every class.")] = 2000,
    classes: Annotated[int, typer.Option(help="How many classes.")] = 10,
    size: Annotated[int, typer.Option(help="Side of the images.")] = 64,
    format: Annotated[str, typer.Option(help=f"{_FORMATS.capitalize()}.")] = "folder",
    seed: Annotated[int, typer.Option(help="Another seed makes other images of the same classes.")] = 0,
    images_per_file: _PerFile = IMAGES_PER_FILE,
    as_json: _AsJson = False,
) -> None:
    """Make a small set of coloured shapes that a small network learns.

    Example: stagewright data make shapes --images 500 --format ofrecord
    """
    need("`stagewright data make`", "PIL")
    check_format(format)
    from stagewright.data.generate import make_images

    with _progress("drawing", images) as tick:
        made = make_images(
            directory, classes, images, size, cast("Format", format), seed,
            images_per_file=images_per_file, progress=tick,
        )  # fmt: skip
    _say(as_json, f"{made:,} images of {classes} classes in {directory}", directory, num_images=made)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A folder of images, OFRecord parts or tar shards.")],
    directory: Annotated[Path, typer.Argument(help="A new folder.")],
    format: Annotated[str, typer.Option(help=f"{_FORMATS.capitalize()}.")] = "ofrecord",
    images_per_file: _PerFile = IMAGES_PER_FILE,
    on_corrupt: _OnFault = "stop",
    as_json: _AsJson = False,
) -> None:
    """Write the same images, byte for byte and in order, in another format.

    Example: stagewright data convert shapes shapes-tar --format tar
    """
    check_format(format)
    from stagewright.data.writing import convert as convert_images

    dataset = _read(source, on_corrupt)
    with _progress("converting", len(dataset)) as tick:
        made = convert_images(
            dataset, directory, cast("Format", format), images_per_file=images_per_file, progress=tick
        )
    skipped = len(dataset.faults)
    told = f"{made:,} images in {directory}" + (f", {skipped:,} skipped" if skipped else "")
    _say(as_json, told, directory, num_images=made, num_skipped=skipped)


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="A folder of images, OFRecord parts or tar shards.")],
    sheet: Annotated[Path | None, typer.Option(help="Save a contact sheet (PNG) here.")] = None,
    on_corrupt: _OnFault = "skip",
    as_json: _AsJson = False,
) -> None:
    """Count images, sizes and labels, and say what cannot be read.

    Example: stagewright data inspect shapes --sheet shapes.png
    """
    need("`stagewright data inspect`", "PIL")
    from stagewright.data.inspection import inspect_dataset, save_contact_sheet

    dataset = _read(directory, on_corrupt)
    with _progress("reading", len(dataset)) as tick:
        found = inspect_dataset(dataset, progress=tick)
    if sheet is not None:
        save_contact_sheet(dataset, sheet)
    if as_json:
        typer.echo(json.dumps(asdict(found) | ({"sheet": str(sheet)} if sheet else {})))
        return
    _show(found, directory)
    if sheet is not None:
        typer.echo(f"  saved {sheet}")


@app.command()
def tokens(
    source: Annotated[Path, typer.Argument(help="A .txt, .jsonl or .parquet file, or a folder of them.")],
    directory: Annotated[Path, typer.Argument(help="A folder for the tokens; one that was begun is gone on with.")],
    tokenizer: Annotated[str, typer.Option(help="The folder of the model or of its tokenizer.")],
    on_corrupt: _OnFault = "stop",
    as_json: _AsJson = False,
) -> None:
    """Turn text into tokens once, for `stagewright train --data tokens:FOLDER`.

    Example: stagewright data tokens corpus my-tokens --tokenizer my-model
    """
    from stagewright.data.text import text_files
    from stagewright.data.tokenizing import find_words
    from stagewright.data.tokens import make_tokens

    Faults(cast("OnCorrupt", on_corrupt))
    total, words = sum(file.stat().st_size for file in text_files(source)), find_words(tokenizer)
    with _progress("tokenizing", total) as tick:
        made = make_tokens(source, directory, words, on_corrupt=cast("OnCorrupt", on_corrupt), progress=tick)
    about = made.about
    told = f"{about.num_tokens:,} tokens of {about.num_documents:,} documents in {directory}"
    if about.faults:
        told += f", {len(about.faults):,} lines skipped; the first: {about.faults[0]}"
    figures = {"num_tokens": about.num_tokens, "num_documents": about.num_documents, "num_skipped": len(about.faults)}
    _say(as_json, told, directory, **figures)


def _read(directory: Path, on_corrupt: str) -> Dataset:
    """The images of a folder."""
    from stagewright.data.opening import open_dataset

    return open_dataset(directory, on_corrupt=cast("OnCorrupt", on_corrupt))


def _say(as_json: bool, text: str, directory: Path, **figures: int) -> None:
    """One line for a person, or the figures for a script."""
    typer.echo(json.dumps({"directory": str(directory), **figures}) if as_json else text)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr, nothing elsewhere; it is called with how many are done."""
    console = Console(stderr=True)
    columns: Any = (TextColumn(what), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _show(found: Inspection, directory: Path) -> None:
    """What was found, for a person: the sum, the sizes, the classes, the faults.

    500 images of 10 classes in shapes, 0.6 MiB
    bytes 1,003 to 1,622, median 1,272 · 64 × 64 pixels
    """
    total = found.total_bytes / 2**20
    typer.echo(f"\n  {found.num_images:,} images of {found.num_classes:,} classes in {directory}, {total:,.1f} MiB")
    typer.echo(
        f"  bytes {_spread(found.image_bytes)} · heights {_spread(found.heights)} · widths {_spread(found.widths)}\n"
    )
    Console(highlight=False, markup=False).print(_class_table(found))
    if found.faults:
        typer.echo(f"  {len(found.faults):,} cannot be read:")
    for fault in found.faults[:_SHOWN_FAULTS]:
        typer.echo(f"  {fault}")


def _spread(numbers: Spread) -> str:
    """`64`, or `1,003 to 1,622, median 1,272`."""
    if numbers.smallest == numbers.largest:
        return f"{numbers.median:,}"
    return f"{numbers.smallest:,} to {numbers.largest:,}, median {numbers.median:,}"


def _class_table(found: Inspection) -> Table:
    """A line a class, the first few."""
    table = Table(box=None, padding=(0, 2))
    for title in ("label", "class", "images"):
        table.add_column(title, justify="left" if title == "class" else "right")
    names = found.class_names or ("",) * found.num_classes
    for label, number in enumerate(found.class_counts[:_SHOWN_CLASSES]):
        table.add_row(str(label), names[label] if label < len(names) else "", f"{number:,}")
    left = found.num_classes - _SHOWN_CLASSES
    if left > 0:
        table.add_row("…", f"{left:,} more", f"{sum(found.class_counts[_SHOWN_CLASSES:]):,}")
    return table
