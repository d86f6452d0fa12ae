"""The command `stagewright`: one file a verb, loaded when it is used.

A verb's module has a function of the verb's name, or a Typer app called `app` where the verb has verbs of its own.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from stagewright.errors import StagewrightError, visible

VERBS = {
    "models": "The models that come with the library, and their layers.",
    "cluster": "Draw hardware: ready-made, detected here, or read from topology text.",
    "profile": "What each layer of a model costs, measured here or worked out.",
    "plan": "The fastest split that fits, its rivals, and the reasons.",
    "schedule": "Draw, check and save who does what in which order.",
    "simulate": "Predict the time and memory of a plan, on hardware that is not here.",
    "data": "Make, convert and inspect sets of labelled images.",
    "rehearse": "Train on hosts that this machine emulates: addresses, link rates, CPU shares.",
    "train": "Train for real, with a worker for each device.",
    "launch": "Print what starts such a run under SLURM, Kubernetes, ssh or SkyPilot.",
    "bench": "Run a suite of cases, repeated and kept; compare two such runs.",
    "checkpoints": "List, verify and prune the checkpoints of a run, here or in a store.",
    "export": "The whole model out of a checkpoint, as safetensors or a plain state dict.",
    "doctor": "What ended a run, who waited for whom, and who is to blame.",
    "report": "One page and one Markdown file from the records in a folder.",
}
"""Every verb and what it is for, in the order of the work."""


class Verb(TyperCommand):
    """A verb that is known by name and loaded when it is used or asked for help."""

    def load(self) -> Any:
        """The real command."""
        from importlib import import_module

        module = import_module(f"stagewright.cli.{self.name}")
        app: typer.Typer | None = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False)
            app.command()(getattr(module, str(self.name)))
        return _with_plain_help(get_command(app), getattr(getattr(module, str(self.name), None), "usual", None))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the real command, which then runs instead of this one."""
        command = self.load()
        command.name = self.name
        if "--help-all" in args:
            command, args = _with_plain_help(command), ["--help"]
        return command.make_context(info_name, args, parent=parent, **extra)


def _with_plain_help(command: Any, usual: Mapping[str, Sequence[str]] | None = None) -> Any:
    """The command, whose help is as wide as the terminal and has no boxes; so have the commands inside it."""
    command.format_help = partial(_write_help, command, usual)
    for each in getattr(command, "commands", {}).values():
        if not isinstance(each, Verb):
            _with_plain_help(each)
    return command


def _write_help(command: Any, usual: Mapping[str, Sequence[str]] | None, context: Any, formatter: Any) -> None:
    """Writes a command's help: what it does, an example, its options in groups; all of them where none are usual."""
    formatter.width = min(shutil.get_terminal_size().columns, 100) - 1
    command.format_usage(context, formatter)
    about, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    for text in (about, f"Example: {example}" if example else ""):
        if text:
            formatter.write_paragraph()
            with formatter.indentation():
                for paragraph in text.strip().split("\n\n"):
                    formatter.write_text(_whole(paragraph))
    rows, groups = _help_groups(command, usual, command.get_params(context))
    shown = {title: [rows[name] for name in names if name in rows] for title, names in groups.items()}
    inside = getattr(command, "commands", {}).items()
    shown["Commands"] = [(name, _whole((each.help or "").partition("\n\n")[0])) for name, each in inside]
    for title, lines in shown.items():
        if lines:
            with formatter.section(title):
                formatter.write_dl(lines, col_max=26)
    left = len(rows) - sum(map(len, shown.values()))
    if left > 0:
        formatter.write_paragraph()
        formatter.write_text(f"{left} more options: {context.command_path} --help-all")
    formatter.buffer = [part.replace(_HYPHEN, "-") for part in formatter.buffer]


def _help_groups(
    command: Any, usual: Mapping[str, Sequence[str]] | None, parameters: Sequence[Any]
) -> tuple[dict[str, tuple[str, str]], dict[str, Sequence[str]]]:
    """The line of each parameter, and by title the names of those that stand together."""
    rows = {each.name: _help_row(each) for each in parameters}
    arguments = [each.name for each in parameters if each.param_type_name == "argument"]
    if usual is not None:
        return rows, {"Arguments": arguments, **usual, "Help": ["help"]}
    panels = {each.name: getattr(each, "rich_help_panel", None) or "Options" for each in parameters}
    panels |= dict.fromkeys(arguments, "Arguments")
    titles = dict.fromkeys(panels.values())
    return rows, {title: [name for name in rows if panels[name] == title] for title in titles}


_HYPHEN = "\u2011"
"""A hyphen at which no line is broken."""


def _whole(text: str) -> str:
    """The text with hyphens that hold words such as zero-bubble together."""
    return text.replace("-", _HYPHEN)


def _help_row(parameter: Any) -> tuple[str, str]:
    """`-o, --out PATH`, and what it is for."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper(), _whole(parameter.help or "")
    names, text = ", ".join(sorted(parameter.opts, key=len)), _whole(parameter.help or "")
    if parameter.is_flag:
        return names.replace("--", "--[no-]", 1) if parameter.metavar else names, text
    return f"{names} {parameter.metavar or 'TEXT'}", text


def _make_command() -> TyperGroup:
    app = typer.Typer(callback=_about, no_args_is_help=True, invoke_without_command=True)
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    for name, purpose in VERBS.items():
        group.add_command(Verb(name=name, help=purpose, callback=None))
    _with_plain_help(group)
    return group


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"stagewright {version('stagewright')}")
        raise typer.Exit


def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; anywhere on the line.")
    ] = False,
) -> None:
    """Train PyTorch models over stages of uneven device groups: measure, plan, simulate, train, report.

    Example: stagewright simulate vgg16 --cluster titan-v-8 --placement 0:0-6.0:7 --cut fc1 --batch 224
    """


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command and ends the process, with the status that docs/reliability.md has."""
    from stagewright.profiling.heap import keep_longer

    keep_longer()
    given = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in given
    try:
        status = _make_command().main(
            [word for word in given if word != "--debug"], "stagewright", standalone_mode=False
        )
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = _silenced()
    except Exception as fault:
        if debug:
            raise
        status = _explain(fault, given)
    sys.exit(status if isinstance(status, int) else 0)


def _silenced() -> int:
    """The status of a command whose reader has gone; nothing more is written, not even at the end of the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _explain(fault: Exception, words: Sequence[str]) -> int:
    """Says on stderr what went wrong and what to do; the status that goes with it."""
    if isinstance(fault, typer.Abort):
        return 130
    if isinstance(fault, StagewrightError):
        what = _as_typed(fault, words) if fault.schema else fault.what
        file, is_missing, _ = what.partition(": No such file or directory")
        option = _option_of(file, words) if is_missing else None
        _say(what if option is None else f"{option} {what}", fault.todo)
        return fault.status
    if hasattr(fault, "format_message"):
        return _explain_usage(fault, words)
    if isinstance(fault, OSError):
        return _say(f"{fault.filename}: {fault.strerror}" if fault.filename else str(fault), None)
    _say(f"{type(fault).__name__}: {fault}", "this is a fault of stagewright: --debug shows where it happened")
    return 1


def _as_typed(fault: StagewrightError, words: Sequence[str]) -> str:
    """What went wrong; a value that a schema refused is told by the option that gave it: `--steps is 0: …`."""
    key = fault.key.partition("[")[0]
    options = [word for word in words if word.partition("=")[0] == "--" + key.replace("_", "-")]
    told = options[0].partition("=")[0] if options else fault.key
    return fault.what.replace(f"{fault.schema}: key {fault.key}", told, 1).removeprefix(f"{fault.schema}: ")


def _typed_values(words: Sequence[str]) -> list[tuple[str, str]]:
    """Each option that was typed, with what stands behind it."""
    pairs = ((word.partition("="), after) for word, after in zip(words, [*words[1:], ""]) if word.startswith("-"))
    return [(option, value if is_joined else after) for (option, is_joined, value), after in pairs]


def _option_of(value: str, words: Sequence[str]) -> str | None:
    """The option that a value was typed for; None where it was an argument."""
    return next((option for option, typed in _typed_values(words) if typed == value), None)


_NUMBER = re.compile(r"[Ii]nvalid value for '(--[\w-]+)[^']*': Input should be a valid (integer|number)")


def _explain_usage(fault: Any, words: Sequence[str]) -> int:
    """Says what typer did not understand, or shows the help of a verb that was given nothing."""
    context = getattr(fault, "ctx", None)
    if type(fault).__name__ == "NoArgsIsHelpError":
        typer.echo(fault.format_message())
        return 2
    message = fault.format_message().rstrip(".")
    number = _NUMBER.match(message)
    if number is not None:
        kind = "a whole number" if number[2] == "integer" else "a number"
        message = f"{number[1]} is {dict(_typed_values(words)).get(number[1])!r}: expected {kind}"
    verb = "".join(f" {word}" for word in words[:1] if word in VERBS)
    path = f"stagewright{verb}" if context is None else context.command_path
    todo = f"see `{path} --help`"
    return _say(message[:1].lower() + message[1:], todo)


def _say(what: str, todo: str | None) -> int:
    """Writes `error: …` and, under it, the way out.

    error: placement '0:0-6.0:9' names device 9 of host 0, which has devices 0 to 7
           write it as 0:0-6.0:7, or give a cluster file with --cluster
    """
    head = "error: "
    lines = [visible(line) for line in (*what.splitlines(), *(todo or "").splitlines())]
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - len(head)
        lines = [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]
    text = "\n".join((head if number == 0 else " " * len(head)) + line for number, line in enumerate(lines))
    red = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    typer.echo(typer.style(head, fg="red", bold=True) + text[len(head) :] if red else text, err=True)
    return 2
