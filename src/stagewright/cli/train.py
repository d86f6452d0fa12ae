"""`stagewright train`: trains a model for real."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stagewright.cli.options import Given, takes
from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.record import Record
from stagewright.runtime.launch.environment import is_main, is_worker
from stagewright.runtime.run_folder import RunFolder
from stagewright.schema import dump_yaml
from stagewright.training.config import NO_OPTION, SECTIONS, Config, make_config

Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="a model of `stagewright models`; may stand in the --config file")
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where a configuration comes from, and what is shown of its run."""

    recipe: str | None = None
    """a recipe file or name (resnet50, alexnet, vgg16); other options override it"""
    config: Path | None = None
    """a file of options, as --print-config writes it; others override it"""
    print_config: bool = False
    """print the configuration, start nothing"""
    json: bool = False
    """print the record's figures, and how the run ended, as JSON in one last line"""

    def read(self, model: str | None, given: Given) -> Config:
        """The configuration that a file, a recipe and options make."""
        file = self.config
        if file is not None and not file.exists() and is_worker():
            raise UsageError(
                f"this host does not see the run's {file}", "name a folder with --out that all hosts share"
            )
        named = {} if model is None else {"name": model}
        like = {} if self.recipe is None else {"like": self.recipe}
        typed = {**given, "model": {**given["model"], **named}, "recipe": {**given["recipe"], **like}}
        return make_config(*([] if file is None else [file]), typed)

    @property
    def console(self) -> Console:
        """Where the run is shown: beside its figures, not among them."""
        return Console(stderr=self.json)

    def to_the_end(self, config: Config, do: Callable[[Callable[[RunFolder], object]], Record | None]) -> None:
        """Runs; where JSON is asked for, a last line has the figures and says how it ended, however it does."""
        runs: list[RunFolder] = []
        wants_json = is_main() and (self.json or config.job.log_format == "json")
        try:
            record = do(runs.append)
        except (StagewrightError, SystemExit) as fault:
            if wants_json:
                typer.echo(json.dumps(_end_of(runs, fault)))
            raise
        if wants_json:
            figures = record.summary() if record is not None else {}
            typer.echo(json.dumps({**figures, **_end_of(runs, None)}))


def _end_of(runs: Sequence[RunFolder], fault: BaseException | None) -> dict[str, object]:
    """How a run ended, for programs that decide what comes next: who is to blame, and whether it can be resumed."""
    from stagewright.runtime.checkpoint.storage import checkpoints_in

    run = runs[-1] if runs else None
    saved = checkpoints_in(run.path, own=True) if run is not None else []
    state = run.state if run is not None else "finished"
    end: dict[str, object] = {
        "folder": str(run.path) if run is not None else None,
        "saved_step": int(saved[0].name.removeprefix("step-")) if saved else None,
    }
    if isinstance(fault, StagewrightError):
        state = "failed" if run is not None else "refused"
        end |= {"error": fault.what, "todo": fault.todo}
        if isinstance(fault, RunError):
            end |= {"worker": fault.worker, "hosts": fault.hosts}
    elif fault is not None:
        state = "stopped"
    status = fault.code if isinstance(fault, SystemExit) else getattr(fault, "status", 0)
    return {"event": "exit", "state": state, "status": status, "resumable": bool(saved) and state != "finished", **end}


@dataclass(frozen=True, kw_only=True)
class _Training(Run):
    dry_run: bool = False
    """print the plan and the commands, start nothing"""


USUAL = {
    "Model and data": ("data", "evaluation_data", "image_size", "num_classes", "sequence_length"),
    "Plan": (
        "batch", "batch_per_device", "placement", "cut", "ratio", "microbatches", "staleness", "schedule", "recompute",
        "plan",
    ),
    "Recipe": ("recipe", "epochs", "optimizer", "learning_rate", "weight_decay", "precision"),
    "Where": ("device", "devices", "nodes", "out"),
    "Run": ("steps", "log_every", "log_format", "checkpoint_every", "resume", "overwrite"),
    "Show": ("config", "print_config", "dry_run", "json"),
}  # fmt: skip
"""The options that people use, as `--help` groups them."""


@takes(sections={name: cls for name, cls in SECTIONS.items() if name != "rehearsal"}, without=NO_OPTION, usual=USUAL)
def train(model: Model = None, *, run: _Training, given: Given) -> None:
    """Trains a model: data parallel, in a synchronous pipeline, or in a stale-synchronous one.

    Example: stagewright train tiny-cnn --batch 64 --placement 0:0-2.0:3 --cut fc1 --steps 20 --device cpu
    """
    config = run.read(model, given)
    if run.print_config:
        typer.echo(dump_yaml(config.to_dict()), nl=False)
        return
    from stagewright.training.command import run_command

    run.to_the_end(config, lambda seen: run_command(config, run.console, dry_run=run.dry_run, seen=seen))
