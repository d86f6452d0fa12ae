"""`stagewright calibrate`: refits device and cluster files from measured runs, and says how far off they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from stagewright.cli.options import takes
from stagewright.cli.show import saved, show, show_json, table
from stagewright.cluster import Cluster, find_cluster
from stagewright.errors import UsageError
from stagewright.profile import Profile
from stagewright.simulation.calibration import Fit, FittedKind, Outcome, fit_cluster, keep_unfitted, outcomes, unfitted
from stagewright.simulation.rows import Row, read_rows

_PRIORS = {"conv": 2.0, "matmul": 1.15, "memory": 0.7, "conv.fp16": 0.45, "matmul.fp16": 0.5, "memory.fp16": 0.7}
"""Where a fit of efficiencies begins, whatever the files say: shares of the data sheets' peaks that are usual. In fp32
a 3 × 3 convolution does 2.25 times fewer multiplications than are counted (Winograd's F(2×2, 3×3)), at 0.9 of the peak,
and a matrix product reaches nearly all of it at a clock that passes the data sheet's."""
_LINK_PRIORS = {"SYS": 9.0e9}
"""Where a fit of link rates begins, bytes/s: between sockets, half of QPI's 19.2 GB/s; other classes as in the file."""


@dataclass(frozen=True, kw_only=True)
class _Fitting:
    """What is fitted, and where that goes."""

    rows: tuple[str, ...] = ()
    """fit only these rows, by id; all are predicted"""
    out: Path | None = None
    """save the fitted files in this folder"""
    leave_one_out: bool = True
    """also predict every row from a fit of the others"""
    json: bool = False
    """print the figures as JSON"""


@takes()
def calibrate(
    file: Annotated[Path, typer.Argument(metavar="CSV", help="measured runs, one a row")], *, own: _Fitting
) -> None:
    """Fit the few figures of device and cluster files to measured runs.

    Example: stagewright calibrate measured.csv --rows alexnet-dp1,vgg16-dp1,alexnet-dp8
    """
    every = read_rows(file)
    used = _chosen(every, own.rows)
    bench = _AnalyticBench()
    clusters = {
        name: unfitted(find_cluster(name), _LINK_PRIORS) for name in dict.fromkeys(row.cluster for row in every)
    }
    found = outcomes(bench, clusters, every, used, leave_one_out=own.leave_one_out)
    fits = [fit_cluster(bench, one, [row for row in used if row.cluster == name]) for name, one in clusters.items()]
    out = own.out
    paths = [] if out is None else [path for fit in fits for path in _save(fit, clusters[fit.cluster.name], out)]
    if own.json:
        show_json({"rows": [_as_plain(one) for one in found], "saved": [str(path) for path in paths]})
    else:
        _show(found, fits, used, paths)


def _chosen(rows: Sequence[Row], wanted: Sequence[str]) -> list[Row]:
    """The rows to fit; all of them where none is named."""
    known = {row.id: row for row in rows}
    for name in wanted:
        if name not in known:
            raise UsageError(f"--rows names {name!r}, which the file does not have", f"its rows: {', '.join(known)}")
    return [known[name] for name in wanted or known]


class _AnalyticBench:
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
        from stagewright.profiling.calibrate import Measurement, calibrate_device
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


def _show(found: Sequence[Outcome], fits: Sequence[Fit], used: Sequence[Row], paths: Sequence[Path]) -> None:
    """The table of errors, their averages, and what was fitted."""
    titles = "row | fitted | images/s> | predicted> | error> | left out> | memory MiB> | predicted> | error>"
    memory = [error for one in found for error in one.memory_errors]
    unseen = [one.unseen_error for one in found if one.unseen_error is not None]
    errors = {"images/s": [one.error for one in found], "left out of the fit": unseen, "memory": memory}
    show(
        table(titles, (_cells(one, one.row in used) for one in found)),
        [f"{name}: {_average(values)}" for name, values in errors.items() if values],
        *(list(_fit_lines(fit)) for fit in fits),
        saved(*paths),
    )


def _average(errors: Sequence[float]) -> str:
    """`4.1% on average, 9.0% at most`."""
    sizes = list(map(abs, errors))
    return f"{sum(sizes) / len(sizes):.1%} on average, {max(sizes):.1%} at most"


def _fit_lines(fit: Fit) -> Iterator[str]:
    """What was fitted of a kind of device and its cluster."""
    efficiency = ", ".join(f"{key} {value:g}" for key, value in cast(Any, fit.kind).efficiency.items())
    device = fit.cluster.hosts[0].devices[0]
    yield f"{fit.kind.name}: {efficiency}"
    yield f"framework {device.framework_bytes / 2**20:.0f} MiB, saved factor {device.saved_factor:g}"
    yield from fit.notes


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
        " / ".join(f"{value / 2**20:,.0f}" for value in measured),
        " / ".join(f"{value / 2**20:,.0f}" for value in predicted),
        " / ".join(f"{error:+.0%}" for error in one.memory_errors),
    ]
