"""`stagewright data`: makes, converts and inspects sets of labelled images, and turns text into tokens."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from stagewright.cli.options import takes
from stagewright.cli.show import progress, saved, show, show_json, table
from stagewright.data.records import IMAGES_PER_FILE, Format, check_format
from stagewright.data.source import OnCorrupt, need
from stagewright.errors import UsageError
from stagewright.schema import schema

if TYPE_CHECKING:
    from stagewright.data.inspection import Inspection, Spread

app = typer.Typer(add_completion=False, no_args_is_help=True)
_Source = Annotated[Path, typer.Argument(help="a folder of images, OFRecord parts or tar shards")]


@schema(error=UsageError)
class _Written:
    format: Format = "folder"
    """what the files are"""
    images_per_file: int = Field(default=IMAGES_PER_FILE, ge=1)
    """images of one OFRecord part or tar shard"""
    json: bool = False
    """print the figures as JSON"""


@schema(error=UsageError)
class _Made(_Written):
    images: int = Field(default=2000, ge=1)
    """how many images, as many of every class"""
    classes: int = 10
    """how many classes"""
    size: int = 64
    """side of the images"""
    seed: int = Field(default=0, ge=0)
    """another seed makes other images of the same classes"""


@schema(error=UsageError)
class _Converted(_Written):
    format: Format = "ofrecord"
    """what the files are"""
    on_corrupt: OnCorrupt = "stop"
    """records that cannot be read"""


@schema(error=UsageError)
class _Inspected:
    sheet: Path | None = None
    """save a contact sheet (PNG) here"""
    on_corrupt: OnCorrupt = "skip"
    """records that cannot be read"""
    json: bool = False
    """print the figures as JSON"""


@schema(error=UsageError)
class _Tokenized:
    tokenizer: str
    """the folder of the model or of its tokenizer"""
    on_corrupt: OnCorrupt = "stop"
    """lines that cannot be read"""
    json: bool = False
    """print the figures as JSON"""


@app.callback()
def data() -> None:
    """Make, convert and inspect sets of labelled images: class folders, OFRecord parts, WebDataset tar shards.

    Turn text into tokens.

    Example: stagewright data make shapes --images 500 --format ofrecord
    """


@app.command()
@takes()
def make(directory: Annotated[Path, typer.Argument(help="a new folder for the images")], *, own: _Made) -> None:
    """Make a small set of coloured shapes that a small network learns.

    Example: stagewright data make shapes --images 500 --format ofrecord
    """
    need("`stagewright data make`", "PIL")
    check_format(own.format)
    from stagewright.data.generate import make_images

    with progress("drawing", own.images) as tick:
        made = make_images(
            directory, own.classes, own.images, own.size, own.format, own.seed, images_per_file=own.images_per_file,
            progress=tick,
        )  # fmt: skip
    told = f"{made:,} images of {own.classes} classes in {directory}"
    show_json({"directory": str(directory), "num_images": made}) if own.json else typer.echo(told)


@app.command()
@takes()
def convert(
    source: _Source, directory: Annotated[Path, typer.Argument(help="a new folder")], *, own: _Converted
) -> None:
    """Write the same images, byte for byte and in order, in another format.

    Example: stagewright data convert shapes shapes-tar --format tar
    """
    check_format(own.format)
    from stagewright.data.opening import open_dataset
    from stagewright.data.records import convert as convert_images

    dataset = open_dataset(source, on_corrupt=own.on_corrupt)
    with progress("converting", len(dataset)) as tick:
        made = convert_images(dataset, directory, own.format, images_per_file=own.images_per_file, progress=tick)
    skipped = len(dataset.faults)
    if own.json:
        show_json({"directory": str(directory), "num_images": made, "num_skipped": skipped})
    else:
        typer.echo(f"{made:,} images in {directory}" + (f", {skipped:,} skipped" if skipped else ""))


@app.command()
@takes()
def inspect(directory: _Source, *, own: _Inspected) -> None:
    """Count images, sizes and labels, and say what cannot be read.

    Example: stagewright data inspect shapes --sheet shapes.png
    """
    need("`stagewright data inspect`", "PIL")
    from stagewright.data.inspection import inspect_dataset, save_contact_sheet
    from stagewright.data.opening import open_dataset

    dataset = open_dataset(directory, on_corrupt=own.on_corrupt)
    with progress("reading", len(dataset)) as tick:
        found = inspect_dataset(dataset, progress=tick)
    if own.sheet is not None:
        save_contact_sheet(dataset, own.sheet)
    if own.json:
        show_json(asdict(found) | ({"sheet": str(own.sheet)} if own.sheet else {}))
    else:
        _show(found, directory, saved(own.sheet))


@app.command()
@takes()
def tokens(
    source: Annotated[Path, typer.Argument(help="a .txt, .jsonl or .parquet file, or a folder of them")],
    directory: Annotated[Path, typer.Argument(help="a folder for the tokens; one that was begun is gone on with")],
    *,
    own: _Tokenized,
) -> None:
    """Turn text into tokens once, for `stagewright train --data tokens:FOLDER`.

    Example: stagewright data tokens corpus my-tokens --tokenizer my-model
    """
    from stagewright.data.text import find_tokenizer, text_files
    from stagewright.data.tokens import make_tokens

    total, tokenizer = sum(file.stat().st_size for file in text_files(source)), find_tokenizer(own.tokenizer)
    with progress("tokenizing", total) as tick:
        about = make_tokens(source, directory, tokenizer, on_corrupt=own.on_corrupt, progress=tick).about
    figures = {"num_tokens": about.num_tokens, "num_documents": about.num_documents, "num_skipped": len(about.faults)}
    if own.json:
        show_json({"directory": str(directory), **figures})
        return
    told = f"{about.num_tokens:,} tokens of {about.num_documents:,} documents in {directory}"
    if about.faults:
        told += f", {len(about.faults):,} lines skipped; the first: {about.faults[0]}"
    typer.echo(told)


def _show(found: Inspection, directory: Path, after: list[str]) -> None:
    """What was found, for a person: the sum, the sizes, the classes, the faults.

    500 images of 10 classes in shapes, 0.6 MiB
    bytes 1,003 to 1,622, median 1,272 · heights 64 · widths 64
    """
    total = found.total_bytes / 2**20
    head = f"{found.num_images:,} images of {found.num_classes:,} classes in {directory}, {total:,.1f} MiB"
    sizes = f"bytes {_spread(found.image_bytes)} · heights {_spread(found.heights)} · widths {_spread(found.widths)}"
    most, names = 12, found.class_names or ("",) * found.num_classes
    rows = [
        (str(label), names[label] if label < len(names) else "", f"{number:,}")
        for label, number in enumerate(found.class_counts[:most])
    ]
    if found.num_classes > most:
        rows.append(("…", f"{found.num_classes - most:,} more", f"{sum(found.class_counts[most:]):,}"))
    faults = [f"{len(found.faults):,} cannot be read:", *found.faults[:5]] if found.faults else []
    show([head, sizes], table("label> | class | images>", rows), [*faults, *after])


def _spread(numbers: Spread) -> str:
    if numbers.smallest == numbers.largest:
        return f"{numbers.median:,}"
    return f"{numbers.smallest:,} to {numbers.largest:,}, median {numbers.median:,}"
