"""How verbs show what they found: blocks of lines and tables, or the figures as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table


def table(titles: str, rows: Iterable[Sequence[RenderableType]]) -> Table:
    """A table without lines; in `case! | step>` > leans a column to the right, and ! keeps it on one line."""
    made = Table(box=None, padding=(0, 0, 0, 2))
    for title in titles.split(" | "):
        right, whole = title.endswith(">"), title.endswith((">", "!"))
        made.add_column(
            title.rstrip(">!"), justify="right" if right else "left", no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
        )  # fmt: skip
    for row in rows:
        made.add_row(*row)
    return made


def show(*blocks: Table | str | list[str]) -> None:
    """Prints blocks with an empty line before each; in a file, which has no width, tables are 140 columns wide."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=140)
    for block in blocks:
        if not block:
            continue
        for part in _fitting_parts(block, console) if isinstance(block, Table) else ():
            console.print()
            console.print(part)
        if isinstance(block, Table):
            continue
        console.print()
        for line in [block] if isinstance(block, str) else block:
            console.print(*fitted(f"  {line}" if line else "", console), sep="\n", soft_wrap=True)


def _fitting_parts(whole: Table, console: Console) -> Iterator[Table]:
    """The table, or where its words are too wide for the terminal several, each with the first column."""

    def needs(column: Column) -> int:
        sizes = [console.measure(cell) for cell in (column.header, *column.cells)]
        widest, word = max(each.maximum for each in sizes), max(each.minimum for each in sizes)
        return 2 + (widest if column.no_wrap else max(word, min(widest, 24)))

    first, *rest = whole.columns
    while rest:
        ends = list(accumulate(map(needs, rest), initial=needs(first)))[1:]
        number = max(1, sum(end <= console.width for end in ends))
        made = Table(box=None, padding=(0, 0, 0, 2))
        for each in [first, *rest[:number]]:
            made.add_column(
                each.header, justify=each.justify, no_wrap=each.no_wrap, overflow=each.overflow,
                min_width=min(needs(each), console.width) - 2,
            )  # fmt: skip
        for cells in zip(*(each.cells for each in [first, *rest[:number]])):
            made.add_row(*cells)
        yield made
        rest = rest[number:]


def fitted(line: str, console: Console) -> list[str]:
    """The line, broken between words where a terminal is too narrow; a row of a grid goes on behind its │."""
    if not console.is_terminal or len(line) <= console.width:
        return [line]
    head, bar, _ = line.partition("│ ")
    indent = " " * len(head) + bar if bar else " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, console.width, subsequent_indent=indent, break_on_hyphens=False)


def show_json(plain: object) -> None:
    """Prints figures for machines, on one line."""
    typer.echo(json.dumps(plain, ensure_ascii=False))


def saved(*paths: object) -> list[str]:
    """`saved a · b`, as a line or none."""
    names = [str(path) for path in paths if path is not None]
    return [f"saved {' · '.join(names)}"] if names else []


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar on a terminal's stderr, nothing elsewhere; it is called with how many are done, and of how many."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, of=total: bar.update(task, completed=done, total=of)
