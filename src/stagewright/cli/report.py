"""`stagewright report DIR`: results → one page and one Markdown file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stagewright.cluster import find_cluster
from stagewright.report import make_report


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder of runs (train, bench, simulate), at any depth.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where the report goes; DIR itself if not given.")
    ] = None,
    cluster: Annotated[
        list[str] | None, typer.Option(help="A cluster's name or file, for the drawing; may be given again.")
    ] = None,
) -> None:
    """Make one page and one Markdown file from the records in DIR.

    Example: stagewright report results --cluster titan-v-8
    """
    made = make_report(folder, out or folder, clusters=[find_cluster(name) for name in cluster or []])
    console = Console(highlight=False, markup=False)
    console.print(f"\n  {made.headline}\n")
    console.print(f"  saved {made.page} · {made.markdown}", soft_wrap=True)
