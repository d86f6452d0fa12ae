"""The main job in small: measure a model on this machine, plan it for four devices, simulate, train, compare.

    python scripts/demo.py [FOLDER]        (`make demo`)

The four devices are four worker processes that share this machine's cores. The model is an ordinary torch module, and
the workers run this file again, as they do with any script that calls `train`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

import stagewright as sw

if TYPE_CHECKING:
    from stagewright.planning.search import Search

NUM_DEVICES, BATCH, STEPS, WARM_UP = 4, 128, 40, 10
PLACEMENTS = {"3-1": "0:0-2.0:3", "data parallel": "0:0-3"}
"""Three replicas of the first stage and one of the second; and plain data parallelism beside it."""
PLAN = "STAGEWRIGHT_DEMO_PLAN"
"""Tells a worker of this script which plan it is part of."""

console = Console(highlight=False, markup=False, soft_wrap=True)


def make_model() -> sw.Layered:
    """Convolutions that compute much and weigh little, and fully connected layers the other way round."""
    import torch
    from torch import nn

    from stagewright.models import cross_entropy_sum

    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential()
    for number, (before, after) in enumerate([(3, 32), (32, 64), (64, 128)], 1):
        block = nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        net.add_module(f"conv{number}", block)
    net.add_module("fc1", nn.Sequential(nn.Flatten(), nn.Linear(128 * 4 * 4, 2048), nn.ReLU()))
    net.add_module("fc2", nn.Linear(2048, 10))
    names = {name: name for name, _ in net.named_children()}
    image, label = torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64)
    return sw.make_layered(net, (image,), loss=cross_entropy_sum(0.0), targets=(label,), names=names)


def make_cluster() -> sw.Cluster:
    """Four workers that share this machine's cores, with what a byte and a step cost these."""
    from stagewright.profiling.detect import cpu_cluster
    from stagewright.profiling.links import measure_links
    from stagewright.training.overhead import measure_step_overhead

    return measure_step_overhead(measure_links(cpu_cluster(NUM_DEVICES, "this-machine")))


def measure(model: sw.Layered) -> sw.Profile:
    """The model's profile, as a worker with one thread runs it while the others compute too."""
    sizes = [BATCH // 16, BATCH // 4, BATCH]
    with Progress(TextColumn("     timing each layer"), BarColumn(), console=console, transient=True) as bar:
        task = bar.add_task("")
        return sw.make_profile(
            model,
            batch_sizes=sizes,
            name="demo-net",
            workers=NUM_DEVICES,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def predict(plan: sw.Plan, profile: sw.Profile, cluster: sw.Cluster, name: str = "", detail: bool = False) -> sw.Record:
    """What the simulator says of a plan."""
    return sw.simulate(sw.make_schedule(plan), profile, cluster, epoch_images=None, name=name, detail=detail)


def choose(profile: sw.Profile, cluster: sw.Cluster, placement: str) -> Search:
    """The fastest plan on these devices that trains exactly: cuts, microbatches and order ranked by the simulator."""
    options = sw.PlanOptions(batch=BATCH, placement=placement, staleness="0")
    return sw.make_plan(profile, cluster, options)


def train(plan: sw.Plan, model: sw.Layered, name: str, folder: Path) -> sw.Record:
    """The record of a real run: four processes, each with its replicas."""
    from stagewright.training.config import Job

    job = Job(name=name, steps=STEPS, warm_up=WARM_UP, log_every=STEPS // 5, overwrite=True, save_final=False)
    record = sw.train(sw.make_schedule(plan), model, job=job, cluster="this-machine", folder=folder, console=console)
    return replace(record, name=name, command="make demo")


def work() -> None:
    """What a worker of this script does: the runs up to its own, of which those before are over and cost nothing."""
    own = Path(os.environ[PLAN]).parent
    for name in PLACEMENTS:
        place = own.parent / folder_of(name)
        train(sw.Plan.load(place / "plan.json"), make_model(), name, place)
        if place == own:
            return


def folder_of(name: str) -> str:
    """Where a plan's run is, in the demo's folder."""
    return name.replace(" ", "-")


def say(title: str, what: str) -> None:
    """A heading."""
    console.print(f"\n  [bold]{title}[/bold]   {what}", markup=True)


def show_profile(profile: sw.Profile) -> None:
    """A line a layer: time of forward and backward at the largest batch, and weight."""
    for layer in profile.layers:
        time_s, weight = layer.forward_s[-1] + layer.backward_s[-1], layer.parameter_bytes / 2**20
        console.print(f"     {layer.name:<6} {time_s * 1e3:>7.1f} ms {weight:>7.2f} MiB")


def show_plans(found: Search, cluster: sw.Cluster, records: list[sw.Record]) -> None:
    """What is predicted for the plans, and the reason."""
    console.print(f"     {NUM_DEVICES} workers share {cluster.cores:g} cores")
    for record in records:
        plan = record.plan
        cut = " | ".join(f"{stage.layers[0]} … {stage.layers[-1]}" for stage in plan.stages)
        figures = f"{record.median_step_s * 1e3:>6.1f} ms a step, {record.samples_per_s:>6.1f} images/s"
        console.print(f"     {record.name:<14} {plan.placement:<10} {figures}   {cut}")
    console.print(f"     {found.reason}")


def main(folder: Path) -> None:
    """Shows the whole flow, and leaves its files in the folder."""
    from stagewright.report.cases import find_pairs, make_cases
    from stagewright.report.tables import pair_table

    started = perf_counter()
    say("1  profile", "how long each layer takes on one core here, and how much it weighs")
    model = make_model()
    profile = measure(model)
    show_profile(profile)
    say("2  plan and simulate", f"for {NUM_DEVICES} devices: worker processes that share this machine's cores")
    cluster = make_cluster()
    found = {name: choose(profile, cluster, placement) for name, placement in PLACEMENTS.items()}
    plans = {name: search.best.plan for name, search in found.items()}
    records = [predict(plan, profile, cluster, name, detail=True) for name, plan in plans.items()]
    show_plans(found["3-1"], cluster, records)
    for name, plan in plans.items():
        say("3  train", f"{name}: {plan.placement}, {STEPS} steps of {BATCH} made-up images, {NUM_DEVICES} processes")
        place = folder / folder_of(name)
        os.environ[PLAN] = str(plan.save(place / "plan.json"))  # here alone: workers that all saved it would collide
        records.append(train(plan, model, name, place))
    say("4  compare", "what was predicted, and what happened\n")
    table, shown = pair_table(find_pairs(make_cases(records))), Table(box=None, pad_edge=False, show_header=False)
    for column, *cells in zip(table.columns, *(row.cells for row in table.rows)):
        shown.add_row(column.title, *(Text(f"{cell.text}\n{cell.note}".rstrip()) for cell in cells))
    console.print(shown)
    save(folder, profile, cluster, records)
    console.print(f"  {perf_counter() - started:.0f} s in all")


def save(folder: Path, profile: sw.Profile, cluster: sw.Cluster, records: list[sw.Record]) -> None:
    """Writes the files and the report, and says where."""
    profile.save(folder / "demo.profile.json")
    cluster.save(folder / "cluster.yaml")
    for record in records:
        record.save(folder / f"{record.name.replace(' ', '-')}.{record.source}.record.json")
    made = sw.make_report(records, folder, clusters=[cluster])
    console.print(f"\n  {made.headline}\n  report: {made.page}")


if __name__ == "__main__":
    if PLAN in os.environ:
        work()
    else:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo"))
