"""`stagewright profile`: what each layer costs: measured here, worked out for other hardware, or imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from stagewright.cluster import parse_ratio
from stagewright.errors import UsageError
from stagewright.profile import Precision, Profile
from stagewright.report.figures import seconds, size
from stagewright.schema import dump_json

if TYPE_CHECKING:
    from stagewright.profiling.calibrate import Measurement
    from stagewright.profiling.kinds import DeviceKind
    from stagewright.profiling.measured import Progress

_MAX_SHOWN = 60
_WIDTH = 140
"""Of a table that goes into a file."""


def profile(
    model: Annotated[str | None, typer.Argument(help="A model's name; see `stagewright models`.")] = None,
    batch: Annotated[str | None, typer.Option(help="Rows to time; several as 8,16,32.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda: measured. titan-v, v100, h200 … or a device file: worked out.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64.")] = "fp32",
    repeats: Annotated[int, typer.Option(help="How often each layer is timed.")] = 7,
    from_pipedream: Annotated[Path | None, typer.Option(help="Import PipeDream's graph.txt.")] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(help="MODEL:ROWS:IMAGES_PER_S of one device: fit the device file's efficiencies; repeat it."),
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels of an image's side.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Save the profile here.")] = None,
    save_device: Annotated[Path | None, typer.Option(help="With --calibrate: save the device file here.")] = None,
) -> None:
    """Profile a model, layer by layer.

    Example: stagewright profile vgg16 --batch 8,16,32 --device titan-v -o vgg16.profile.json
    """
    if precision not in ("fp32", "bf16", "fp16", "fp64"):
        raise UsageError(f"--precision is {precision!r}: expected fp32, bf16, fp16 or fp64")
    sizes = _read_sizes(batch, one=from_pipedream is not None)
    if from_pipedream is not None:
        from stagewright.profiling.pipedream import import_pipedream

        made = import_pipedream(from_pipedream, batch=sizes[-1], model=model, device=device or "unknown")
    else:
        if model is None:
            raise UsageError("no model is given", "name one of `stagewright models`, or add --from-pipedream FILE")
        device, shape = device or _default_device(), {"image_size": image_size, "sequence_length": sequence_length}
        if re.fullmatch(r"cpu|cuda(:\d+)?", device) and not calibrate:
            made = _measured(model, sizes, device, cast(Precision, precision), repeats, shape)
        else:
            made = _worked_out(model, sizes, device, cast(Precision, precision), shape, calibrate or [], save_device)
    if out is not None:
        made.save(out)
    if as_json:
        typer.echo(dump_json(made.to_dict()), nl=False)
    else:
        _show(made, out)


def _read_sizes(text: str | None, *, one: bool) -> tuple[int, ...]:
    """The batch sizes to time: those given, or a quarter, a half and the whole of the one given."""
    if text is None:
        raise UsageError("the batch is not given", "add --batch ROWS, or several as --batch 8,16,32")
    parts = text.split(",")
    if not all(re.fullmatch(r"\d{1,7}", part, re.ASCII) and int(part) > 0 for part in parts):
        raise UsageError(f"--batch {text}: expected 1 row or more, several separated by commas")
    sizes = sorted({int(part) for part in parts})
    if len(sizes) > 1 or one:
        return tuple(sizes)
    return tuple(sorted({max(sizes[0] // 4, min(2, sizes[0])), max(sizes[0] // 2, min(2, sizes[0])), sizes[0]}))


def _default_device() -> str:
    """What this machine measures on: a card where it has one."""
    from stagewright.profiling.measured import has_cuda

    return "cuda" if has_cuda() else "cpu"


def _measured(
    model: str,
    sizes: tuple[int, ...],
    device: str,
    precision: Precision,
    repeats: int,
    shape: Mapping[str, Any],
) -> Profile:
    """The profile of a model, measured here."""
    from stagewright.models import build_model
    from stagewright.profiling.measured import has_cuda, make_profile

    if device != "cpu" and not has_cuda():
        raise UsageError(f"--device {device}: this machine has no such device", "use cpu, or a kind such as h200")
    scratch = model.startswith("hf:")  # what a layer costs does not depend on what the weights are
    built = build_model(model, device=device, from_scratch=scratch, **shape)
    with _progress_bar(f"timing {model}") as progress:
        return make_profile(
            built, batch_sizes=sizes, precision=precision, name=model, repeats=repeats, progress=progress
        )


def _worked_out(
    model: str,
    sizes: tuple[int, ...],
    device: str,
    precision: Precision,
    shape: Mapping[str, Any],
    figures: Sequence[str],
    save_device: Path | None,
) -> Profile:
    """The profile of a model on a kind of device that need not be here."""
    from stagewright.models import build_model
    from stagewright.profiling.analytic import make_analytic_profile

    kind = _fitted_kind(device, figures, precision, save_device)
    built = build_model(model, device="meta", **shape)
    return make_analytic_profile(built, kind, batch_sizes=sizes, precision=precision, name=model)


def _fitted_kind(device: str, figures: Sequence[str], precision: Precision, save: Path | None) -> DeviceKind:
    """The device's file, its efficiencies fitted where measured figures are given."""
    from stagewright.profiling.calibrate import calibrate_device
    from stagewright.profiling.kinds import find_kind

    kind = find_kind(device)
    if not figures:
        if save is not None:
            raise UsageError("--save-device goes with --calibrate")
        return kind
    fitted = calibrate_device(kind, [_read_figure(text, precision) for text in figures])
    for key, value in fitted.efficiency.items():
        typer.echo(f"{key:14} {kind.efficiency[key]:.3g} → {value:.3g}", err=True)
    if save is not None:
        fitted.save(save)
        typer.echo(f"saved {save}", err=True)
    return fitted


def _read_figure(text: str, precision: Precision) -> Measurement:
    """`vgg16:32:208.458`: a model, its rows, and images/s of one device."""
    from stagewright.models import build_model
    from stagewright.profiling.calibrate import Measurement

    parts = text.split(":")
    if len(parts) != 3 or not parts[1].isdecimal() or not int(parts[1]):
        raise UsageError(f"--calibrate {text}: expected MODEL:ROWS:IMAGES_PER_S, such as vgg16:32:208.5")
    rate = parse_ratio(parts[2])[0]
    built = build_model(parts[0], device="meta")
    return Measurement(model=built, batch=int(parts[1]), samples_per_s=rate, precision=precision, name=parts[0])


@contextmanager
def _progress_bar(what: str) -> Iterator[Progress]:
    """A bar on stderr where that is a terminal, and nothing elsewhere."""
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress


def _show(made: Profile, out: Path | None) -> None:
    """The layers as a table, the sums, and how the sum of the layers stands to the whole model."""
    console = Console(highlight=False, width=None if Console().is_terminal else _WIDTH)
    rows = made.batch_sizes[-1]
    console.print(f"\n  {made.model} on {made.device}, {made.precision}, {rows} rows, {made.source}\n", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 2))
    for head in ("layer", "kind", "forward", "backward", "parameters", "output a row", "saved a row"):
        table.add_column(head, justify="left" if head in ("layer", "kind") else "right")
    for layer in made.layers[:_MAX_SHOWN]:
        table.add_row(
            layer.name,
            layer.kind,
            seconds(layer.forward_s[-1]),
            seconds(layer.backward_s[-1]),
            size(layer.parameter_bytes),
            size(layer.output_bytes),
            size(layer.saved_bytes),
        )
    console.print(table)
    if len(made.layers) > _MAX_SHOWN:
        console.print(f"  … and {len(made.layers) - _MAX_SHOWN} more", soft_wrap=True)
    _show_sums(made, console)
    if out is not None:
        console.print(f"  saved {out} · next: stagewright plan {out} --cluster NAME --batch ROWS", soft_wrap=True)


def _show_sums(made: Profile, console: Console) -> None:
    """The step of one device, and the check on the sum of the layers."""
    whole = sum(layer.forward_s[-1] + layer.backward_s[-1] for layer in made.layers)
    step = whole + made.optimizer_s
    line = f"\n  layers {seconds(whole)} + optimizer {seconds(made.optimizer_s)}"
    console.print(f"{line} · {made.batch_sizes[-1] / step:,.1f} rows/s" if step else line, soft_wrap=True)
    if made.model_s:
        console.print(
            f"  the whole model in one piece {seconds(made.model_s[-1])}: {whole / made.model_s[-1] - 1:+.1%}"
        )
