"""`stagewright checkpoints`: what a run has saved, whether it is as it was written, and room for more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field
from rich.text import Text

from stagewright.cli.options import takes
from stagewright.cli.show import show, show_json, table
from stagewright.cluster import count
from stagewright.errors import CheckpointError, UsageError, visible
from stagewright.schema import schema

if TYPE_CHECKING:
    from stagewright.runtime.checkpoint.remote import Store

app = typer.Typer(add_completion=False, no_args_is_help=True)
_Where = Annotated[str, typer.Argument(metavar="RUN_OR_URL", help="a run's folder, or where --checkpoints copied them")]


@dataclass(frozen=True, kw_only=True)
class _Shown:
    json: bool = False
    """print what was found as JSON"""


@schema(error=UsageError)
class _Pruned:
    keep: int = Field(default=3, ge=1)
    """good ones that stay, the newest ones"""
    json: bool = False
    """print what was removed as JSON"""


@app.callback()
def checkpoints() -> None:
    """List, verify and prune the checkpoints of a run, in its folder or in a store such as s3://bucket/run.

    Example: stagewright checkpoints verify results/vgg16
    """


def _store_of(where: str) -> Store:
    """The checkpoints there; refuses a place without any."""
    from stagewright.runtime.checkpoint.remote import Store

    store = Store.open(where)
    if not store.names():
        raise UsageError(f"{where} has no checkpoint", "give the folder of a run, or a URL that --checkpoints named")
    return store


@app.command("list")
@takes()
def list_all(where: _Where, *, own: _Shown) -> None:
    """List the checkpoints, newest first, by their names and sizes alone.

    Example: stagewright checkpoints list s3://bucket/run
    """
    store = _store_of(where)
    found: list[dict[str, Any]] = [
        {
            "checkpoint": name, "bytes": sum(store.sizes(name).values()), "lacks": store.lacks(name),
            "run": store.manifest(name).get("run"), "placement": store.manifest(name).get("placement"),
        }
        for name in store.names()
    ]  # fmt: skip
    if own.json:
        show_json(found)
        return
    rows = [
        (
            each["checkpoint"], f"{each['bytes'] / 2**20:,.1f} MiB", Text(visible(str(each["placement"] or "?"))),
            Text(visible(str(each["run"] or "?"))[:8]),
            Text(visible(f"lacks {', '.join(each['lacks'])}" if each["lacks"] else "whole")),
        )
        for each in found
    ]  # fmt: skip
    show(table("checkpoint! | size> | placement | run! | state", rows))


@app.command()
@takes()
def verify(where: _Where, *, own: _Shown) -> None:
    """Read every byte, and name the files that are not as they were written; the status is then 1.

    Example: stagewright checkpoints verify s3://bucket/run
    """
    store, found = _store_of(where), dict[str, str | None]()
    for name in store.names():
        try:
            store.check(name)
            found[name] = None
        except CheckpointError as fault:
            found[name] = fault.what
        if not own.json:
            typer.echo(visible(f"{name}: {found[name] or 'good'}"))
    if own.json:
        show_json([{"checkpoint": name, "fault": fault} for name, fault in found.items()])
    if any(found.values()):
        raise typer.Exit(1)


@app.command()
@takes()
def prune(where: _Where, *, own: _Pruned) -> None:
    """Remove what is older than the newest good ones, every byte of which is read first; other runs' stay.

    Example: stagewright checkpoints prune results/vgg16 --keep 2
    """
    store = _store_of(where)
    removed = store.prune(own.keep, store.run(), store.is_good)
    if own.json:
        show_json({"removed": removed, "left": store.names()})
    else:
        told = f": {', '.join(removed)}" if removed else ""
        typer.echo(f"removed {count(len(removed), 'checkpoint')}{told}; {', '.join(store.names())} stay")
