"""`stagewright profile`: what each layer costs: measured here, worked out for other hardware, or imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from stagewright.cli.options import takes
from stagewright.cli.show import progress, show, table
from stagewright.cluster import parse_ratio
from stagewright.errors import UsageError
from stagewright.profile import Precision, Profile
from stagewright.report.figures import seconds, size
from stagewright.schema import dump_json, schema

if TYPE_CHECKING:
    from stagewright.profiling.analytic import Measurement
    from stagewright.profiling.kinds import DeviceKind


@schema(error=UsageError)
class _Profiling:
    batch: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """rows to time; several as 8,16,32"""
    device: str | None = None
    """cpu or cuda: measured. titan-v, v100, h200 … or a device file: worked out"""
    precision: Precision = "fp32"
    """what is computed in"""
    repeats: int = Field(default=7, ge=1)
    """how often each layer is timed"""
    workers: int = Field(default=1, ge=1)
    """on a CPU: how many workers will compute at once"""
    import_: Path | None = None
    """read PipeDream's graph.txt, or a CSV: layer,device,samples,forward_s,backward_s,…"""
    calibrate: tuple[str, ...] = ()
    """MODEL:ROWS:IMAGES_PER_S of one device: fit the device file's efficiencies"""
    image_size: int | None = Field(default=None, ge=1)
    """pixels of an image's side"""
    sequence_length: int | None = Field(default=None, ge=2)
    """tokens of a row; the model's own context by default"""
    layers: int | None = Field(default=None, ge=1)
    """of gpt: its blocks"""
    width: int | None = Field(default=None, ge=1)
    """of gpt: numbers of a token between blocks"""
    heads: int | None = Field(default=None, ge=1)
    """of gpt: heads of its attention"""
    vocabulary: int | None = Field(default=None, ge=1)
    """of gpt: different tokens"""
    json: bool = False
    """print the profile as JSON"""
    out: Path | None = None
    """save the profile here"""
    save_device: Path | None = None
    """with --calibrate: save the device file here"""

    @property
    def gpt(self) -> dict[str, int]:
        """What shapes a GPT, by the names of its parameters."""
        given = {"num_blocks": self.layers, "width": self.width, "num_heads": self.heads, "vocabulary": self.vocabulary}
        return {key: value for key, value in given.items() if value is not None}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes to time: those given, or a quarter, a half and the whole of the one given."""
        if not self.batch:
            raise UsageError("the batch is not given", "add --batch ROWS, or several as --batch 8,16,32")
        whole, *others = self.batch
        if others or self.import_ is not None:
            return tuple(sorted(set(self.batch)))
        return tuple(sorted({max(whole // part, min(2, whole)) for part in (4, 2, 1)}))


@takes()
def profile(
    model: Annotated[str | None, typer.Argument(help="a model's name; see `stagewright models`")] = None,
    *, own: _Profiling,
) -> None:  # fmt: skip
    """Profile a model, layer by layer.

    Example: stagewright profile vgg16 --batch 8,16,32 --device titan-v -o vgg16.profile.json
    """
    made = _make_profile(model, own)
    if own.out is not None:
        made.save(own.out)
    if own.json:
        typer.echo(dump_json(made.to_dict()), nl=False)
    else:
        _show(made, own.out)


def _make_profile(model: str | None, own: _Profiling) -> Profile:
    """The profile that the options ask for: imported, measured here, or worked out for hardware that is not here."""
    if own.import_ is not None and own.import_.suffix == ".csv":
        from stagewright.profiling.tables import import_profile

        return import_profile(own.import_, model=model, precision=own.precision)
    if own.import_ is not None:
        from stagewright.profiling.pipedream import import_pipedream

        return import_pipedream(own.import_, batch=own.sizes[-1], model=model, device=own.device or "unknown")
    if model is None:
        raise UsageError("no model is given", "name one of `stagewright models`, or add --import FILE")
    sizes = own.sizes
    from stagewright.models import build_model
    from stagewright.profiling.measured import has_cuda, make_profile

    device = own.device or ("cuda" if has_cuda() else "cpu")
    shape: dict[str, Any] = {"image_size": own.image_size, "sequence_length": own.sequence_length, **own.gpt}
    if own.calibrate or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        from stagewright.profiling.analytic import make_analytic_profile

        kind = _fitted_kind(device, own.calibrate, own.precision, own.save_device)
        built = build_model(model, device="meta", **shape)
        return make_analytic_profile(built, kind, batch_sizes=sizes, precision=own.precision, name=model)
    if device != "cpu" and not has_cuda():
        raise UsageError(f"--device {device}: this machine has no such device", "use cpu, or a kind such as h200")
    scratch = model.startswith("hf:")  # what a layer costs does not depend on what the weights are
    built = build_model(model, device=device, from_scratch=scratch, **shape)
    with progress(f"timing {model}") as tick:
        return make_profile(
            built, batch_sizes=sizes, precision=own.precision, name=model, repeats=own.repeats,
            workers=own.workers, progress=tick,
        )  # fmt: skip


def _fitted_kind(device: str, figures: Sequence[str], precision: Precision, save: Path | None) -> DeviceKind:
    """The device's file, its efficiencies fitted where measured figures are given."""
    from stagewright.profiling.analytic import calibrate_device
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
    from stagewright.profiling.analytic import Measurement

    parts = text.split(":")
    if len(parts) != 3 or not parts[1].isdecimal() or not int(parts[1]):
        raise UsageError(f"--calibrate {text}: expected MODEL:ROWS:IMAGES_PER_S, such as vgg16:32:208.5")
    rate = parse_ratio(parts[2])[0]
    built = build_model(parts[0], device="meta")
    return Measurement(model=built, batch=int(parts[1]), samples_per_s=rate, precision=precision, name=parts[0])


def _show(made: Profile, out: Path | None) -> None:
    """The layers as a table, the step of one device, and how the sum of the layers stands to the whole model."""
    most, rows = 60, made.batch_sizes[-1]
    cells = (
        (layer.name, layer.kind, seconds(layer.forward_s[-1]), seconds(layer.backward_s[-1]),
         *map(size, (layer.parameter_bytes, layer.output_bytes, layer.saved_bytes)))
        for layer in made.layers[:most]
    )  # fmt: skip
    layers = table("layer | kind | forward> | backward> | parameters> | output a row> | saved a row>", cells)
    told = [f"… and {len(made.layers) - most} more"] if len(made.layers) > most else []
    whole = sum(layer.forward_s[-1] + layer.backward_s[-1] for layer in made.layers)
    step = whole + made.optimizer_s
    sums = f"layers {seconds(whole)} + optimizer {seconds(made.optimizer_s)}"
    told.append(f"{sums} · {rows / step:,.1f} rows/s" if step else sums)
    if made.model_s:
        told.append(f"the whole model in one piece {seconds(made.model_s[-1])}: {whole / made.model_s[-1] - 1:+.1%}")
    if out is not None:
        told.append(f"saved {out} · next: stagewright plan {out} --cluster NAME --batch ROWS")
    show(f"{made.model} on {made.device}, {made.precision}, {rows} rows, {made.source}", layers, told)
