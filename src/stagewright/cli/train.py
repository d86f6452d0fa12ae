"""`stagewright train`: trains a model for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stagewright.cli.options import Given, takes
from stagewright.errors import UsageError
from stagewright.record import Record
from stagewright.runtime.launch.environment import is_main, is_worker
from stagewright.schema import dump_yaml
from stagewright.training.config import NO_OPTION, SECTIONS, Config, make_config, read_layer

Model = Annotated[str | None, typer.Argument(help="A model of `stagewright models`; may stand in the --config file.")]
Recipe = Annotated[
    str | None, typer.Option(help="A recipe file or name (resnet50, alexnet, vgg16); other options override it.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A file of options, as --print-config writes it; others override it.")
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the configuration, start nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the record's figures as JSON.")]


@takes({name: cls for name, cls in SECTIONS.items() if name != "rehearsal"}, without=NO_OPTION)
def train(
    model: Model = None,
    /,
    *,
    given: Given,
    recipe: Recipe = None,
    config_file: ConfigFile = None,
    print_config: PrintConfig = False,
    dry_run: Annotated[bool, typer.Option(help="Print the plan and the commands, start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Trains a model: data parallel, in a synchronous pipeline, or in a stale-synchronous one.

    Example: stagewright train tiny-cnn --batch 64 --placement 0:0-2.0:3 --cut fc1 --steps 20 --device cpu
    """
    config = read_config("train", model, recipe, config_file, given)
    if print_config:
        typer.echo(dump_yaml(config.to_dict()), nl=False)
        return
    from stagewright.training.command import run_command

    console = Console(stderr=as_json)
    record = run_command(config, console, dry_run=dry_run)
    if record is not None:
        show_record(record, as_json, console)


def read_config(verb: str, model: str | None, recipe: str | None, file: Path | None, given: Given) -> Config:
    """The configuration that a file, a recipe and options make."""
    if file is not None and not file.exists() and is_worker():
        raise UsageError(f"this host does not see the run's {file}", "name a folder with --out that all hosts share")
    from_file = {} if file is None else read_layer(file)
    named = from_file.get("model", {}).get("name") if model is None else model
    if named is None:
        raise UsageError("missing argument 'MODEL'", f"see `stagewright {verb} --help`")
    typed = {**given, "model": {**given["model"], "name": named}}
    if recipe is not None:
        typed["recipe"] = {**given["recipe"], "like": recipe}
    return make_config(from_file, typed)


def show_record(record: Record, as_json: bool, console: Console) -> None:
    """Prints what a run came to: one line, or its figures as JSON; from one process, however many there are."""
    if not is_main():
        return
    if as_json:
        typer.echo(json.dumps(record.summary()))
    elif record.samples_per_s:
        epoch = f" · epoch {record.epoch_s:,.1f} s ({record.epoch_samples:,} images)" if record.epoch_s else ""
        console.print(
            f"\n{record.plan.model} on {record.plan.placement}: {record.samples_per_s:,.1f} images/s · "
            f"step {record.median_step_s * 1e3:,.1f} ms (median of {len(record.step_s)}){epoch}"
        )
