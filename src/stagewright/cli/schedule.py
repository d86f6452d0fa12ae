"""`stagewright schedule`: who does what in which order, as a grid, a picture or a file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from stagewright.cli.options import Given, read_section, takes
from stagewright.cluster import count, parse_placement
from stagewright.errors import UsageError
from stagewright.plan import POLICIES, Plan
from stagewright.planning.options import PlanOptions
from stagewright.policy import holds
from stagewright.schedule import Schedule
from stagewright.scheduling import check_schedule, make_schedule
from stagewright.scheduling.drawing import draw_svg, timed_grid
from stagewright.scheduling.ideal import run_ideally
from stagewright.scheduling.sketch import parse_replicas, sketch_plan
from stagewright.scheduling.torch_csv import write_csv

_STYLES = {"F": "blue", "B": "yellow", "I": "yellow", "W": "green", "U": "magenta", "A": "magenta"}
"""By the letter of an action."""


_NOT_HERE = ("batch", "batch_per_device", "ratio", "ratio_of", "cut", "schedule", "recompute", "buckets")
"""Options of a plan that no order depends on, or that have an older name here too."""


@takes({"plan": PlanOptions}, without=_NOT_HERE)
def schedule(
    plan: Annotated[Path | None, typer.Argument(help="A plan file; else give --replicas or --placement.")] = None,
    /,
    *,
    given: Given,
    replicas: Annotated[str | None, typer.Option(help="Replicas of each stage, such as 7,1.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", "--rows", help="Rows a batch.")] = None,
    policy: Annotated[
        str | None, typer.Option("--schedule", "--policy", help=f"The order: {', '.join(POLICIES)}.")
    ] = None,
    agree: Annotated[bool, typer.Option(help="Let all workers agree before updates, as fp16 and clipping do.")] = False,
    batches: Annotated[int | None, typer.Option(help="How many batches to draw.")] = None,
    times: Annotated[bool, typer.Option(help="Draw over time, a column a unit, instead of in order.")] = False,
    actions: Annotated[bool, typer.Option(help="Write out every action, transfers too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Save a picture here.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Save torch.distributed.pipelining's CSV here.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Save the schedule here.")] = None,
) -> None:
    """Draw, check and save the schedule of a plan, or of a number of replicas a stage.

    Example: stagewright schedule --replicas 3,1 --microbatches 6 --route rotate
    """
    asked = read_section(PlanOptions, {**given["plan"], "batch": batch, "schedule": policy})
    made = make_schedule(
        _the_plan(plan, replicas, asked.placement, asked.num_microbatches, batch), policy=asked.policy,
        route=asked.route, staleness=asked.staleness, hold=asked.hold, agree=agree, num_batches=batches,
    )  # fmt: skip
    check_schedule(made, batches)
    saved = _save(made, batches, svg, csv, out)
    if as_json:
        typer.echo(json.dumps(_figures(made) | {"saved": saved}, ensure_ascii=False))
    else:
        _show(made, batches, times, actions, saved)


def _the_plan(
    file: Path | None, replicas: str | None, placement: str | None, microbatches: int | None, batch: int | None
) -> Plan:
    """The plan in a file, or one of the given replicas or placement, with the given sizes."""
    given = [option for option in (file, replicas, placement) if option is not None]
    if len(given) != 1:
        raise UsageError(
            f"{len(given)} of a plan file, --replicas and --placement were given: expected one of them",
            "for example: stagewright schedule --replicas 7,1 --microbatches 14",
        )
    if file is not None:
        loaded = Plan.load(file)
        return replace(
            loaded,
            batch=loaded.batch if batch is None else batch,
            num_microbatches=loaded.num_microbatches if microbatches is None else microbatches,
        )
    num_microbatches = 1 if microbatches is None else microbatches
    if replicas is not None:
        return sketch_plan(parse_replicas(replicas), num_microbatches=num_microbatches, batch=batch)
    return sketch_plan(parse_placement(placement or ""), num_microbatches=num_microbatches, batch=batch)


def _save(made: Schedule, batches: int | None, svg: Path | None, csv: Path | None, out: Path | None) -> list[str]:
    """Writes the files that were asked for; their names."""
    if out is not None:
        made.save(out)
    for path, text in ((svg, svg and draw_svg(made, batches)), (csv, csv and write_csv(made))):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text), encoding="utf-8", newline="")
    return [str(path) for path in (out, svg, csv) if path is not None]


def _figures(made: Schedule) -> dict[str, object]:
    """What there is to say about a schedule in numbers."""
    plan = made.plan
    return {
        "policy": plan.policy,
        "route": plan.route,
        "replicas": plan.replicas,
        "num_microbatches": plan.num_microbatches,
        "versions": plan.versions,
        "holds": holds(plan),
        "num_workers": len(plan.devices),
        "num_actions": sum(map(len, made.orders)),
        "idle_share": _idle_share(made),
    }


def _idle_share(made: Schedule) -> float:
    """The bubble with balanced stages and free transfers: of one batch, or of one in a long run without flush."""
    num_batches = 1 if made.plan.is_synchronous else _LONG_RUN
    return run_ideally(made, num_batches, is_balanced=True).idle_share


_LONG_RUN = 50
"""Batches after which filling and draining matter little."""


def _show(made: Schedule, batches: int | None, times: bool, actions: bool, saved: list[str]) -> None:
    """Prints the grid and a line of figures."""
    console, plan = Console(highlight=False, markup=False), made.plan
    grid = made.text if actions else timed_grid(made, batches) if times else made.grid(batches)
    console.print()
    for line in grid.splitlines():
        console.print(Text("  ") + _coloured(line), soft_wrap=True)
    held = ", ".join(map(str, holds(plan)))
    console.print(
        f"\n  {plan.policy}, {plan.route}, {count(plan.num_microbatches, 'microbatch', 'microbatches')} a batch · "
        f"checked: {count(sum(map(len, made.orders)), 'action')}, no lock, buffered or rendezvous\n"
        f"  idle {_idle_share(made):.1%} if stages are balanced and links free · holds {held} microbatches by stage",
        soft_wrap=True,
    )
    if saved:
        console.print(f"  saved {' · '.join(saved)}", soft_wrap=True)


def _coloured(line: str) -> Text:
    """A line of a grid with each action in the colour of its kind."""
    head, bar, body = line.partition("│")
    text = Text(f"{head}{bar}")
    for word in re.split(r"(\s+)", body):
        letter = word.rpartition(":")[2][:1]
        text.append(word, style=_STYLES.get(letter))
    return text
