"""`stagewright report DIR`: results → one page and one Markdown file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import takes
from stagewright.cli.show import saved, show
from stagewright.cluster import find_cluster
from stagewright.report import make_report


@dataclass(frozen=True, kw_only=True)
class _Report:
    out: Path | None = None
    """where the report goes; DIR itself if not given"""
    cluster: tuple[str, ...] = ()
    """a cluster's name or file, for the drawing"""


@takes()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of runs (train, bench, simulate)")],
    *, own: _Report,
) -> None:  # fmt: skip
    """Make one page and one Markdown file from the records in DIR, at any depth.

    Example: stagewright report results --cluster titan-v-8
    """
    made = make_report(folder, own.out or folder, clusters=[find_cluster(name) for name in own.cluster])
    show(made.headline, saved(made.page, made.markdown))
