"""Where the figures of a run go beside its events: summary.csv, TensorBoard, Weights & Biases, MLflow.

    Listener ──tell──▶ Teller ──┬─▶ events.jsonl
                                ├─▶ summary.csv
                                └─▶ tensorboard, wandb, mlflow, where asked for

Every sink gets the very events, and writes their figures under `train_loss`, `validation_top_1` and the like.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from stagewright.data.source import is_there
from stagewright.errors import UsageError

SinkName = Literal["tensorboard", "wandb", "mlflow"]
_Event = Mapping[str, Any]
_COLUMNS = ("epoch", "iter", "legend", "note", "value", "rank")
_SUMMARY = "summary.csv"
_PLACES = ("event", "time", "epoch", "iter")
"""What in an event is no figure but says which one it is."""


class Sink(Protocol):
    """Takes the events of a run."""

    def write(self, event: _Event) -> None:
        """Writes what the event holds."""

    def close(self) -> None:
        """Lets go of files and connections."""


def _figures(event: _Event) -> Iterator[tuple[str, float]]:
    """The figures of an event with their legends: ("train_loss", 6.9) …; none for one that is no step."""
    if "iter" not in event:
        return
    for key, value in event.items():
        if key not in _PLACES and isinstance(value, int | float):
            yield f"{event['event']}_{key}", float(value)


class _CsvSink:
    """summary.csv: a line a figure, after one of what was run; a resumed run adds its lines."""

    def __init__(self, folder: Path, about: Mapping[str, object], rank: int, is_resumed: bool) -> None:
        path = folder / _SUMMARY
        is_new = not is_resumed or not path.exists()
        self._file = path.open("w" if is_new else "a", encoding="utf-8", newline="", buffering=1)
        self._rows, self._rank = csv.writer(self._file, lineterminator="\n"), rank
        if is_new:
            self._rows.writerow(_COLUMNS)
            note = ", ".join(f"{key}: {value}" for key, value in about.items())
            self._rows.writerow((0, 0, "cfg", note, "", rank))

    def write(self, event: _Event) -> None:
        for legend, value in _figures(event):
            self._rows.writerow((event["epoch"], event["iter"], legend, "", value, self._rank))

    def close(self) -> None:
        self._file.close()


class _TensorBoardSink:
    """TensorBoard's event files, in the folder `tensorboard`; `train_loss` is drawn as train/loss."""

    def __init__(self, folder: Path, about: Mapping[str, object]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("about", "\n\n".join(f"{key}: {value}" for key, value in about.items()))

    def write(self, event: _Event) -> None:
        for legend, value in _figures(event):
            self._writer.add_scalar(legend.replace("_", "/", 1), value, event["iter"], walltime=event["time"])

    def close(self) -> None:
        self._writer.close()


class _WandbSink:
    """A run of Weights & Biases; account and project come from its own settings."""

    def __init__(self, folder: Path, about: Mapping[str, object]) -> None:
        self._run: Any = import_module("wandb").init(name=str(about["name"]), dir=str(folder), config=dict(about))

    def write(self, event: _Event) -> None:
        values = dict(_figures(event))
        if values:
            self._run.log({**values, "epoch": event["epoch"]}, step=event["iter"])

    def close(self) -> None:
        self._run.finish()


class _MlflowSink:
    """A run of MLflow; the server comes from its own settings."""

    def __init__(self, folder: Path, about: Mapping[str, object]) -> None:
        self._mlflow: Any = import_module("mlflow")
        self._mlflow.start_run(run_name=str(about["name"]))
        self._mlflow.log_params(dict(about))

    def write(self, event: _Event) -> None:
        values = {legend: value for legend, value in _figures(event) if math.isfinite(value)}
        if values:
            self._mlflow.log_metrics(values, step=event["iter"])

    def close(self) -> None:
        self._mlflow.end_run()


_SINKS: Mapping[SinkName, Callable[[Path, Mapping[str, object]], Sink]] = {
    "tensorboard": _TensorBoardSink, "wandb": _WandbSink, "mlflow": _MlflowSink,
}  # fmt: skip
"""What makes each sink that a run can ask for."""


def check_sinks(names: Sequence[SinkName]) -> None:
    """Refuses a sink whose package is not installed, before any worker starts."""
    for name in names:
        if not is_there(name):
            raise UsageError(f"--{name} needs the package {name}, which is not installed", f"pip install {name}")


def open_sinks(
    names: Sequence[SinkName], folder: Path, about: Mapping[str, object], *, rank: int, is_resumed: bool
) -> list[Sink]:
    """summary.csv, and the sinks of these names."""
    return [_CsvSink(folder, about, rank, is_resumed), *(_SINKS[name](folder, about) for name in names)]
