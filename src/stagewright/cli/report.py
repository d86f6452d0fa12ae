"""`stagewright report DIR`: results → one page and one Markdown file."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from stagewright.cli.options import takes
from stagewright.cli.show import saved, show
from stagewright.cluster import find_cluster
from stagewright.errors import UsageError
from stagewright.report import make_report
from stagewright.schema import schema


@schema(error=UsageError)
class _Report:
    out: Path | None = None
    """where the report goes; DIR itself if not given"""
    cluster: tuple[str, ...] = ()
    """a cluster's name or file, for the drawing"""
    watch: bool = False
    """serve a page of the runs under way instead, until Ctrl-C"""
    port: int = Field(default=8765, ge=0, le=65535)
    """where that page is, on this machine; 0 is any that is free"""


@takes()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of runs (train, bench, simulate)")],
    *, own: _Report,
) -> None:  # fmt: skip
    """Make one page and one Markdown file from the records in DIR, at any depth.

    Example: stagewright report results --cluster titan-v-8
    """
    if own.watch:
        _serve(folder, own.port)
        return
    made = make_report(folder, own.out or folder, clusters=[find_cluster(name) for name in own.cluster])
    show(made.headline, saved(made.page, made.markdown))


def _serve(folder: Path, port: int) -> None:
    """Serves the page until Ctrl-C, which is how one ends it."""
    from stagewright.training.watching import live_server

    with live_server(folder, port) as server, suppress(KeyboardInterrupt):
        typer.echo(f"watching {folder} on http://127.0.0.1:{server.server_port} until Ctrl-C")
        sys.stdout.flush()
        server.serve_forever(poll_interval=0.2)
