"""`stagewright plan`: the best split for a profile on a cluster, its rivals, and the reasons."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stagewright.cli.options import COMPUTED, Given, computed, read_section, takes
from stagewright.cluster import Cluster, count
from stagewright.errors import UsageError
from stagewright.plan import Plan
from stagewright.planning.choose import Choice
from stagewright.planning.options import PlanOptions
from stagewright.planning.reasons import shape
from stagewright.planning.search import Search, make_plan
from stagewright.profile import Precision, Profile
from stagewright.profiling.detect import cluster_or_here
from stagewright.profiling.drawing import describe_devices
from stagewright.report.figures import rate, seconds, size
from stagewright.schema import dump_json
from stagewright.simulation import simulator
from stagewright.training.recipes import RecipeFile

_WIDTH = 140
"""Of a table that goes into a file."""


@takes({"plan": PlanOptions, "recipe": RecipeFile}, without=COMPUTED)
def plan(
    what: Annotated[str, typer.Argument(metavar="PROFILE|MODEL", help="A profile file, or a model's name.")],
    /,
    *,
    given: Given,
    cluster: Annotated[str | None, typer.Option(help="A cluster's name or file; this machine if left out.")] = None,
    assume_kind: Annotated[
        str | None, typer.Option(help="Take the profile for one of this kind of device, such as titan-v.")
    ] = None,
    estimate_only: Annotated[bool, typer.Option("--no-simulate", help="Rank by the estimate alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plans as JSON.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Save the best plan here.")] = None,
) -> None:
    """Find the fastest plan that fits; options of the plan fix what is searched otherwise.

    Example: stagewright plan vgg16.profile.json --cluster titan-v-8 --batch 224 -o plan.json
    """
    options, recipe = read_section(PlanOptions, given["plan"]), computed(given)
    hardware = cluster_or_here(cluster)
    profile = _load_profile(what, hardware, options, recipe.precision, assume_kind).with_states(recipe.states)
    found = make_plan(profile, hardware, options, None if estimate_only else simulator(profile, hardware))
    if assume_kind is not None:
        found = _with_note(found, profile.notes[-1])
    if out is not None:
        found.best.plan.save(out)
    if as_json:
        typer.echo(dump_json(_summary(found)), nl=False)
    else:
        _show(found, hardware)
        if out is not None:
            typed = [word for key, value in given["recipe"].items() for word in (f"--{key}", str(value))]
            _show_next(found.best.plan, out, what, cluster, assume_kind, typed)


def _load_profile(
    what: str, cluster: Cluster, options: PlanOptions, precision: Precision, assume_kind: str | None = None
) -> Profile:
    """The profile in a file, or an analytic one of the cluster's first kind of device."""
    if Path(what).suffix in (".json", ".yaml", ".yml"):
        profile = Profile.load(what)
        return profile if assume_kind is None else profile.assumed(assume_kind)
    if assume_kind is not None:
        raise UsageError(
            f"--assume-kind {assume_kind} goes with a profile file, not with a model's name", "leave it out"
        )
    from stagewright.profiling.analytic import profile_for

    batch = options.batch or (options.batch_per_device or 0) * len(cluster.device_ids)
    if not batch:
        raise UsageError("the batch is not given", "add --batch ROWS")
    share = max(batch // len(cluster.device_ids), 2)
    sizes = tuple(sorted({max(share // 4, 2), share, max(batch // 2, 2), max(batch, 2)}))
    return profile_for(cluster, what, sizes, precision)


def _with_note(found: Search, note: str) -> Search:
    """The search with a note more in its best plan."""
    plan = replace(found.best.plan, notes=(*found.best.plan.notes, note))
    return replace(found, best=replace(found.best, plan=plan))


def _show(found: Search, cluster: Cluster) -> None:
    """The plans as a table, the best one first, and why it is."""
    console = Console(highlight=False, width=None if Console().is_terminal else _WIDTH)
    best = found.best.plan
    devices = " · ".join(dict.fromkeys(describe_devices(host.devices) for host in cluster.hosts))
    hosts = "one host" if len(cluster.hosts) == 1 else f"{len(cluster.hosts)} hosts"
    title = f"{best.model}, {best.batch} images a step, {devices} ({hosts})"
    how = f"weighed {found.num_plans:,} plans, simulated {found.num_simulated:,}, in {found.seconds:.1f} s"
    console.print(f"\n  {title}    {how}\n", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("  plan", "step", "images/s", "memory first / last", "limited by"):
        right = head in ("step", "images/s")
        table.add_column(head, justify="right" if right else "left", no_wrap=head != "limited by")
    for number, (choice, label) in enumerate(rows(found)):
        table.add_row(*_cells(choice, ("  " if number else "▸ ") + label))
    if found.data_parallel is None:
        table.add_row("  data parallel", "–", "–", "–", found.why_no_data_parallel)
    console.print(table)
    console.print()
    for line in (*best.notes[:1], _settings(best), *passed_over(found), *best.notes[1:]):
        console.print(f"  {line}", soft_wrap=True)


def _show_next(
    plan: Plan, out: Path, what: str, cluster: str | None, assume_kind: str | None, recipe: Sequence[str]
) -> None:
    """Where the plan lies, and the commands that go on with it on the same hardware."""
    words = ["--profile", what] if Path(what).suffix else []
    words += ["--assume-kind", assume_kind] if assume_kind is not None else []
    words += ["--cluster", cluster] if cluster is not None else []
    where = "" if cluster is None else f"on {cluster} itself: "
    simulate = shlex.join(["stagewright", "simulate", str(out), *words, *recipe])
    train = shlex.join(["stagewright", "train", plan.model, "--plan", str(out), *recipe])
    typer.echo(f"  saved {out} · next: {simulate} · {where}{train}")


def rows(found: Search) -> list[tuple[Choice, str]]:
    """The plans of the table, the best first, each with a name of its own; faster ones are told below it.

    A plan with more stages must be faster by more than a little to be the best; a row with such a step would belie it.
    """
    others = [choice for choice in found.others if choice.step_s >= found.best.step_s]
    plain = found.data_parallel
    chosen = [found.best, *others, *([] if plain is None else [plain])]
    named: dict[str, Choice] = {}
    for choice, label in zip(chosen, tell_apart([choice.plan for choice in chosen])):
        named.setdefault(label, choice)
    return [(choice, label) for label, choice in named.items()]


def tell_apart(plans: Sequence[Plan]) -> list[str]:
    """Each plan's shape, and of plans of one shape what differs: `7-1 cut at fc1, 4 microbatches`."""
    labels = []
    for plan in plans:
        alike = [_traits(other) for other in plans if shape(other) == shape(plan)]
        own = _traits(plan)
        labels.append(
            ", ".join([shape(plan), *(own[key] for key in own if any(each[key] != own[key] for each in alike))])
        )
    return labels


def _traits(plan: Plan) -> dict[str, str]:
    """What plans of one shape may differ in, in words."""
    again = [str(number) for number, stage in enumerate(plan.stages) if stage.recompute]
    return {
        "placement": f"on {plan.placement}",
        "microbatches": count(plan.num_microbatches, "microbatch", "microbatches"),
        "route": plan.route,
        "policy": plan.policy,
        "versions": "exact" if plan.is_synchronous else f"versions {','.join(map(str, plan.versions))}",
        "recompute": f"recompute in stage {', '.join(again)}" if again else "no recompute",
        "hold": "as many held as the order needs" if plan.hold is None else f"{plan.hold} held",
        "buckets": f"{','.join(str(stage.num_buckets) for stage in plan.stages)} buckets",
    }


def passed_over(found: Search) -> Iterator[str]:
    """What is faster than the best plan by too little to be worth its stages."""
    faster = [choice for choice in found.others if choice.step_s < found.best.step_s]
    for choice in faster[:1]:
        gain = found.best.step_s / choice.step_s - 1
        many = f"{len(choice.plan.stages)} stages"
        yield f"{shape(choice.plan)} would be {gain:.1%} faster ({seconds(choice.step_s)}): too little for {many}."


def _cells(choice: Choice, label: str) -> tuple[str, str, str, str, str]:
    """One line of the table."""
    first, last = choice.peak_bytes[0], choice.peak_bytes[-1]
    memory = size(first) if len(choice.peak_bytes) == 1 else f"{size(first)} / {size(last)}"
    return label, seconds(choice.step_s), rate(choice.images_per_s), memory, choice.limit


def _settings(plan: Plan) -> str:
    """What else the plan says: `placement 0:0-6.0:7, 4 microbatches, split, 1f1b, versions 2,1`."""
    told = _traits(plan)
    versions = "" if plan.is_synchronous else f", {told['versions']}"
    recompute = f", {told['recompute']}" if any(stage.recompute for stage in plan.stages) else ""
    return f"placement {plan.placement}, {told['microbatches']}, {plan.route}, {plan.policy}{versions}{recompute}"


def _summary(found: Search) -> dict[str, object]:
    """The figures that `--json` prints."""
    return {
        "best": _as_plain(found.best),
        "others": [_as_plain(choice) for choice in found.others],
        "data_parallel": None if found.data_parallel is None else _as_plain(found.data_parallel),
        "why_no_data_parallel": found.why_no_data_parallel,
        "reason": found.reason,
        "num_plans": found.num_plans,
        "seconds": found.seconds,
        "num_simulated": found.num_simulated,
        "plan": found.best.plan.to_dict(),
    }


def _as_plain(choice: Choice) -> dict[str, object]:
    """One plan's figures."""
    return {
        "shape": shape(choice.plan),
        "placement": choice.plan.placement,
        "cuts": [stage.layers[0] for stage in choice.plan.stages[1:]],
        "step_s": choice.step_s,
        "images_per_s": choice.images_per_s,
        "peak_bytes": list(choice.peak_bytes),
        "limit": choice.limit,
        "settings": _settings(choice.plan),
    }
