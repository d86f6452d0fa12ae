"""What a run tells while it runs: lines of JSON in a file, shown by whoever watches, and figures beside them.

    Listener ──tell──▶ Teller ──┬─▶ events.jsonl ──▶ Display
                                ├─▶ summary.csv
                                └─▶ tensorboard, wandb, mlflow, where asked for

Every sink gets the very events, and writes their figures under `train_loss`, `validation_top_1` and the like.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from stagewright.data.source import is_there
from stagewright.errors import UsageError
from stagewright.runtime.run_folder import EVENTS

SinkName = Literal["tensorboard", "wandb", "mlflow"]
LogFormat = Literal["text", "json", "original"]
STEP, BOUNDARY = "step", "boundary"
"""Events for callbacks alone: a step, and where workers wait for what they say."""
Event = Mapping[str, Any]
_About = Mapping[str, object]
"""What was run, for a person who looks at its figures."""
_Write = Callable[[Event, Mapping[str, float]], object]
"""Takes an event of a step, and its figures by their legends."""
_Sink = AbstractContextManager[_Write]


@contextmanager
def _csv(folder: Path, about: _About, rank: int, is_resumed: bool) -> Iterator[_Write]:
    """summary.csv: a line a figure, after one of what was run; a resumed run adds its lines."""
    path = folder / "summary.csv"
    is_new = not is_resumed or not path.exists()
    with path.open("w" if is_new else "a", encoding="utf-8", newline="", buffering=1) as file:
        rows = csv.writer(file, lineterminator="\n")
        if is_new:
            rows.writerow(("epoch", "iter", "legend", "note", "value", "rank"))
            rows.writerow((0, 0, "cfg", ", ".join(f"{key}: {value}" for key, value in about.items()), "", rank))
        yield lambda event, figures: rows.writerows(
            (event["epoch"], event["iter"], legend, "", value, rank) for legend, value in figures.items()
        )


@contextmanager
def _tensorboard(folder: Path, about: _About) -> Iterator[_Write]:
    """TensorBoard's event files, in the folder `tensorboard`; `train_loss` is drawn as train/loss."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(event: Event, figures: Mapping[str, float]) -> None:
        for legend, value in figures.items():
            writer.add_scalar(legend.replace("_", "/", 1), value, event["iter"], walltime=event["time"])

    with writer:
        writer.add_text("about", "\n\n".join(f"{key}: {value}" for key, value in about.items()))
        yield write


@contextmanager
def _wandb(folder: Path, about: _About) -> Iterator[_Write]:
    """A run of Weights & Biases; account and project come from its own settings."""
    run: Any = import_module("wandb").init(name=str(about["name"]), dir=str(folder), config=dict(about))
    try:
        yield lambda event, figures: run.log({**figures, "epoch": event["epoch"]}, step=event["iter"])
    finally:
        run.finish()


@contextmanager
def _mlflow(folder: Path, about: _About) -> Iterator[_Write]:
    """A run of MLflow; the server comes from its own settings."""
    mlflow: Any = import_module("mlflow")

    def write(event: Event, figures: Mapping[str, float]) -> None:
        finite = {legend: value for legend, value in figures.items() if math.isfinite(value)}
        if finite:
            mlflow.log_metrics(finite, step=event["iter"])

    mlflow.start_run(run_name=str(about["name"]))
    try:
        mlflow.log_params(dict(about))
        yield write
    finally:
        mlflow.end_run()


_SINKS: Mapping[SinkName, Callable[[Path, _About], _Sink]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow,
}  # fmt: skip
"""What makes each sink that a run can ask for."""


def check_sinks(names: Sequence[SinkName]) -> None:
    """Refuses a sink whose package is not installed, before any worker starts."""
    for name in names:
        if not is_there(name):
            raise UsageError(f"--{name} needs the package {name}, which is not installed", f"pip install {name}")


def sinks_of(names: Sequence[SinkName], folder: Path, about: _About, *, rank: int, is_resumed: bool) -> list[_Sink]:
    """summary.csv, and the sinks of these names; a Teller opens them."""
    return [_csv(folder, about, rank, is_resumed), *(_SINKS[name](folder, about) for name in names)]


class Teller:
    """Writes events, here and into every sink."""

    def __init__(self, folder: Path, sinks: Sequence[_Sink] = ()) -> None:
        self._opened = ExitStack()
        path = folder / EVENTS
        self._file = self._opened.enter_context(path.open("a", encoding="utf-8", buffering=1))
        self._sinks = [self._opened.enter_context(sink) for sink in sinks]

    def tell(self, kind: str, **values: Any) -> dict[str, Any]:
        """Writes one event, with the time, and returns it."""
        event = {"event": kind, "time": time.time(), **values}
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        figures = {f"{kind}_{key}": float(value) for key, value in numbers.items() if key not in ("epoch", "iter")}
        with suppress(OSError):  # a disk that is full must not end the training
            self._file.write(json.dumps(event) + "\n")
            for write in self._sinks if figures and "iter" in event else ():
                write(event, figures)
        return event

    def close(self) -> None:
        """Lets everything go."""
        with suppress(OSError):
            self._opened.close()


def read_events(folder: Path, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events from a byte position on, each with the position after it; a line half written is left for later."""
    path = folder / EVENTS
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield start, event


NO_FIGURES = (
    "event", "time", "epoch", "iter", "learning_rate", "norm", "mfu", "tokens", "tokens_per_s", "images_per_s", "scale",
    "memory_bytes", "driver_bytes", "stage_memory_bytes",
)  # fmt: skip
"""What an event of a step has beside the loss and the metrics."""
