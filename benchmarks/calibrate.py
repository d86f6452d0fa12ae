"""Refits device and cluster files from published runs, and says how far off they are.

python -m benchmarks.calibrate ../shared/reference/measured.csv [--rows ID,ID …] [--out FOLDER]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from benchmarks.fits import Fit, FittedKind, Outcome, fit_cluster, keep_unfitted, outcomes, unfitted
from benchmarks.published import Row, read_rows
from rich.console import Console
from rich.table import Table

from stagewright.cluster import Cluster, find_cluster
from stagewright.errors import UsageError
from stagewright.profile import Profile

_PRIORS = {
    "conv": 2.0,
    "matmul": 1.15,
    "memory": 0.7,
    "conv.fp16": 0.45,
    "matmul.fp16": 0.5,
    "memory.fp16": 0.7,
}
"""Where a fit of efficiencies begins, whatever the files say: shares of the data sheets' peaks that are usual. In fp32
a 3 × 3 convolution does 2.25 times fewer multiplications than are counted (Winograd's F(2×2, 3×3)), at 0.9 of the peak,
and a matrix product reaches nearly all of it at a clock that passes the data sheet's."""
LINK_PRIORS = {"SYS": 9.0e9}
"""Where a fit of link rates begins, bytes/s: between sockets, half of QPI's 19.2 GB/s; other classes as in the file."""
_MIB = 1 << 20


def calibrate(
    file: Annotated[Path, typer.Argument(metavar="CSV", help="Measured runs, one a row.")],
    rows: Annotated[str | None, typer.Option(help="Fit only these rows, by id; all are predicted.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Save the fitted files in this folder.")] = None,
    leave_one_out: Annotated[bool, typer.Option(help="Also predict every row from a fit of the others.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Fit the few figures of device and cluster files to measured runs.

    Example: python -m benchmarks.calibrate measured.csv --rows alexnet-dp1,vgg16-dp1,alexnet-dp8
    """
    every = read_rows(file)
    used = _chosen(every, rows)
    bench = AnalyticBench()
    clusters = {name: unfitted(find_cluster(name), LINK_PRIORS) for name in dict.fromkeys(row.cluster for row in every)}
    found = outcomes(bench, clusters, every, used, leave_one_out=leave_one_out)
    fits = [fit_cluster(bench, one, [row for row in used if row.cluster == name]) for name, one in clusters.items()]
    saved = (
        [str(path) for fit in fits for path in _save(fit, clusters[fit.cluster.name], out)] if out is not None else []
    )
    if as_json:
        typer.echo(json.dumps({"rows": [_as_plain(one) for one in found], "saved": saved}))
    else:
        _show(found, fits, used, saved)


def _chosen(rows: Sequence[Row], text: str | None) -> list[Row]:
    """The rows to fit."""
    if text is None:
        return list(rows)
    wanted = text.split(",")
    known = {row.id: row for row in rows}
    for name in wanted:
        if name not in known:
            raise UsageError(f"--rows names {name!r}, which the file does not have", f"its rows: {', '.join(known)}")
    return [known[name] for name in wanted]


class AnalyticBench:
    """Profiles from shapes and a kind's efficiencies; what was made once is kept."""

    def __init__(self) -> None:
        self._models: dict[str, Any] = {}
        self._profiles: dict[object, Profile] = {}
        self._fits: dict[object, FittedKind] = {}

    def model(self, name: str) -> Any:
        """A model's shapes."""
        # Only shapes need torch, which takes seconds to import.
        from stagewright.models import build_model

        if name not in self._models:
            self._models[name] = build_model(name, device="meta")
        return self._models[name]

    def kind(self, name: str) -> FittedKind:
        """The kind in its file, with efficiencies as they are before any fit."""
        from stagewright.profiling.kinds import find_kind

        kind = find_kind(name)
        return cast(FittedKind, replace(kind, efficiency={**kind.efficiency, **_PRIORS}))

    def fit(self, kind: FittedKind, rows: Sequence[Row]) -> FittedKind:
        """The kind with efficiencies fitted to single-device rows."""
        from stagewright.profiling.analytic import Measurement, calibrate_device
        from stagewright.profiling.kinds import DeviceKind

        key = kind.name, tuple(row.id for row in rows)
        if key not in self._fits:
            figures = [
                Measurement(
                    model=self.model(row.model),
                    batch=row.batch_per_device,
                    samples_per_s=row.images_per_s,
                    precision=row.precision,
                    name=row.model,
                )
                for row in rows
            ]
            self._fits[key] = cast(FittedKind, calibrate_device(cast(DeviceKind, kind), figures))
        return self._fits[key]

    def profile(self, kind: FittedKind, row: Row) -> Profile:
        """The profile of a row's model at the numbers of rows that its stages see."""
        from stagewright.profiling.analytic import make_analytic_profile
        from stagewright.profiling.kinds import DeviceKind

        made = cast(DeviceKind, kind)
        sizes = tuple(sorted({row.batch_per_device, row.images // row.replicas[-1]}))
        key = (made.name, tuple(made.efficiency.items()), row.model, row.precision, sizes)
        if key not in self._profiles:
            self._profiles[key] = make_analytic_profile(
                self.model(row.model), made, batch_sizes=sizes, precision=row.precision, name=row.model
            )
        return self._profiles[key]


def _save(fit: Fit, start: Cluster, folder: Path) -> tuple[Path, Path]:
    """Writes the cluster and device files with what was fitted, a note of what from, and all else as it was."""
    from stagewright.profiling.kinds import DeviceKind, find_kind

    cluster = keep_unfitted(fit.cluster, start, find_cluster(start.name))
    cluster = replace(cluster, notes=(*cluster.notes, *fit.notes))
    fitted, own = cast(DeviceKind, fit.kind), find_kind(fit.kind.name)
    changed = {key: value for key, value in fitted.efficiency.items() if value != _PRIORS.get(key)}
    device = replace(fitted, efficiency={**own.efficiency, **changed})
    return cluster.save(folder / f"{cluster.name}.yaml"), device.save(folder / f"{device.name}.device.yaml")


def _as_plain(one: Outcome) -> dict[str, object]:
    """A row's figures for machines."""
    return {
        "id": one.row.id,
        "step_s": one.row.step_s,
        "predicted_step_s": one.step_s,
        "error": one.error,
        "left_out_error": one.unseen_error,
        "memory_errors": one.memory_errors,
    }


def _show(found: Sequence[Outcome], fits: Sequence[Fit], used: Sequence[Row], saved: Sequence[str]) -> None:
    """The table of errors, their averages, and what was fitted."""
    console = Console(highlight=False, markup=False, width=140)
    table = Table(box=None, pad_edge=False)
    titles = ("row", "fitted", "images/s", "predicted", "error", "left out", "memory MiB", "predicted", "error")
    for title in titles:
        table.add_column(title, justify="left" if title in ("row", "fitted") else "right")
    for one in found:
        table.add_row(*_cells(one, one.row in used))
    console.print(table)
    errors = [abs(one.error) for one in found]
    memory = [abs(error) for one in found for error in one.memory_errors]
    console.print(f"\n  images/s: {_mean(errors):.1%} on average, {max(errors):.1%} at most")
    unseen = [abs(one.unseen_error) for one in found if one.unseen_error is not None]
    if unseen:
        console.print(f"  left out of the fit: {_mean(unseen):.1%} on average, {max(unseen):.1%} at most")
    if memory:
        console.print(f"  memory: {_mean(memory):.1%} on average, {max(memory):.1%} at most")
    for fit in fits:
        efficiency = ", ".join(f"{key} {value:g}" for key, value in cast(Any, fit.kind).efficiency.items())
        device = fit.cluster.hosts[0].devices[0]
        console.print(f"\n  {fit.kind.name}: {efficiency}")
        console.print(f"  framework {device.framework_bytes / _MIB:.0f} MiB, saved factor {device.saved_factor:g}")
        for note in fit.notes:
            console.print(f"  {note}")
    if saved:
        console.print(f"\n  saved {' · '.join(saved)}")


def _cells(one: Outcome, is_used: bool) -> list[str]:
    """One line of the table."""
    measured = [value for value in one.row.memory_bytes if value]
    predicted = [found for found, value in zip(one.memory_bytes, one.row.memory_bytes) if value]
    return [
        one.row.id,
        "yes" if is_used else "no",
        f"{one.row.images_per_s:,.0f}",
        f"{one.row.images / one.step_s:,.0f}",
        f"{one.error:+.1%}",
        "" if one.unseen_error is None else f"{one.unseen_error:+.1%}",
        " / ".join(f"{value / _MIB:,.0f}" for value in measured),
        " / ".join(f"{value / _MIB:,.0f}" for value in predicted),
        " / ".join(f"{error:+.0%}" for error in one.memory_errors),
    ]


def _mean(values: Sequence[float]) -> float:
    """The average."""
    return sum(values) / len(values)


if __name__ == "__main__":
    typer.run(calibrate)
