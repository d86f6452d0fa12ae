"""`stagewright schedule`: who does what in which order, as a grid, a picture or a file."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from stagewright.cli.options import takes
from stagewright.cli.show import fitted, saved, show, show_json
from stagewright.cluster import count, parse_placement
from stagewright.errors import UsageError
from stagewright.plan import Plan
from stagewright.planning.options import PlanOptions
from stagewright.policy import holds
from stagewright.schedule import Schedule
from stagewright.scheduling import check_schedule, make_schedule
from stagewright.scheduling.drawing import draw_svg, parse_replicas, sketch_plan, timed_grid, write_csv
from stagewright.scheduling.ideal import run_ideally
from stagewright.schema import write_whole

_STYLES = {"F": "blue", "B": "yellow", "I": "yellow", "W": "green", "U": "magenta", "A": "magenta"}
"""By the letter of an action."""
_NOT_HERE = ("batch_per_device", "ratio", "ratio_of", "cut", "recompute", "buckets", "shard_optimizer")
"""Options of a plan that no order depends on."""


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    replicas: str | None = None
    """replicas of each stage, such as 7,1"""
    agree: bool = False
    """let all workers agree before updates, as fp16 and clipping do"""
    batches: int | None = None
    """how many batches to draw"""
    times: bool = False
    """draw over time, a column a unit, instead of in order"""
    actions: bool = False
    """write out every action, transfers too"""
    json: bool = False
    """print the figures as JSON"""
    svg: Path | None = None
    """save a picture here"""
    csv: Path | None = None
    """save torch.distributed.pipelining's CSV here"""
    out: Path | None = None
    """save the schedule here"""


@takes(without=_NOT_HERE, also={"batch": "--rows", "schedule": "--policy"})
def schedule(
    file: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="a plan file; else give --replicas or --placement")
    ] = None,
    *, plan: PlanOptions, own: _Drawing,
) -> None:  # fmt: skip
    """Draw, check and save the schedule of a plan, or of a number of replicas a stage.

    Example: stagewright schedule --replicas 3,1 --microbatches 6 --route rotate
    """
    made = make_schedule(
        _the_plan(file, own.replicas, plan), policy=plan.policy, route=plan.route, staleness=plan.staleness,
        hold=plan.hold, agree=own.agree, num_batches=own.batches,
    )  # fmt: skip
    check_schedule(made, own.batches)
    if own.out is not None:
        made.save(own.out)
    if own.svg is not None:
        write_whole(own.svg, draw_svg(made, own.batches))
    if own.csv is not None:
        write_whole(own.csv, write_csv(made))
    if own.json:
        names = [str(path) for path in (own.out, own.svg, own.csv) if path is not None]
        show_json(_figures(made) | {"saved": names})
    else:
        _show(made, own)


def _the_plan(file: Path | None, replicas: str | None, asked: PlanOptions) -> Plan:
    """The plan in a file, or one of the given replicas or placement, with the given sizes."""
    given = [option for option in (file, replicas, asked.placement) if option is not None]
    if len(given) != 1:
        raise UsageError(
            f"{len(given)} of a plan file, --replicas and --placement were given: expected one of them",
            "for example: stagewright schedule --replicas 7,1 --microbatches 14",
        )
    if file is not None:
        plan = Plan.load(file)
        return replace(
            plan, batch=asked.batch or plan.batch, num_microbatches=asked.num_microbatches or plan.num_microbatches
        )
    stages = parse_replicas(replicas) if replicas is not None else parse_placement(asked.placement or "")
    return sketch_plan(stages, num_microbatches=asked.num_microbatches or 1, batch=asked.batch)


def _figures(made: Schedule) -> dict[str, object]:
    plan = made.plan
    return {
        "policy": plan.policy, "route": plan.route, "replicas": plan.replicas,
        "num_microbatches": plan.num_microbatches, "versions": plan.versions, "holds": holds(plan),
        "num_workers": len(plan.devices), "num_actions": sum(map(len, made.orders)), "idle_share": _idle_share(made),
    }  # fmt: skip


def _idle_share(made: Schedule) -> float:
    """The bubble with balanced stages and free transfers: of one batch, or of one in a long run without flush."""
    num_batches = 1 if made.plan.is_synchronous else 50
    return run_ideally(made, num_batches, is_balanced=True).idle_share


def _show(made: Schedule, own: _Drawing) -> None:
    console, plan = Console(highlight=False, markup=False), made.plan
    grid = made.text if own.actions else timed_grid(made, own.batches) if own.times else made.grid(own.batches)
    console.print()
    for line in grid.splitlines():
        for part in fitted(f"  {line}", console):
            console.print(_coloured(part), soft_wrap=True)
    held = ", ".join(map(str, holds(plan)))
    show([
        f"{plan.policy}, {plan.route}, {count(plan.num_microbatches, 'microbatch', 'microbatches')} a batch · "
        f"checked: {count(sum(map(len, made.orders)), 'action')}, no lock, buffered or rendezvous",
        *([plan.sharing] if plan.sharing else []),
        f"idle {_idle_share(made):.1%} if stages are balanced and links free · holds {held} microbatches by stage",
        *saved(own.out, own.svg, own.csv),
    ])  # fmt: skip


def _coloured(line: str) -> Text:
    """A line of a grid with each action in the colour of its kind."""
    head, bar, body = line.partition("│")
    text = Text(f"{head}{bar}")
    for word in re.split(r"(\s+)", body):
        letter = word.rpartition(":")[2][:1]
        text.append(word, style=_STYLES.get(letter))
    return text
