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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stagewright.data.source import is_there
from stagewright.errors import UsageError, visible

SinkName = Literal["tensorboard", "wandb", "mlflow"]
_NAME = "events.jsonl"
_Event = Mapping[str, Any]
_About = Mapping[str, object]
"""What was run, for a person who looks at its figures."""
_Write = Callable[[_Event, Mapping[str, float]], object]
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

    def write(event: _Event, figures: Mapping[str, float]) -> None:
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

    def write(event: _Event, figures: Mapping[str, float]) -> None:
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
        path = folder / _NAME
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
    path = folder / _NAME
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


def plain_line(event: _Event) -> str | None:
    """The log line of an event, as people and scripts of the benchmark series read it."""
    kind = event.get("event")
    if kind not in ("train", "validation"):
        return visible(f"{kind}: {event['text']}") if "text" in event else None
    names = ("loss", "perplexity", "top_1", "top_k")
    figures = "".join(f"{name}: {event[name]:.6f}, " for name in names if name in event)
    speed = f"samples/s: {event['images_per_s']:.3f}"
    if "tokens_per_s" in event:
        more = {"learning_rate": "lr", "norm": "norm", "mfu": "mfu", "tokens": "tokens"}
        figures += "".join(f"{short}: {event[name]:.6g}, " for name, short in more.items() if name in event)
        speed = f"tokens/s: {event['tokens_per_s']:.3f}"
    return f"{kind}: epoch {event['epoch']}, iter {event['iter']}, {figures}{speed} {event['time']:.1f}"


class Display:
    """Follows the events that a run tells from now on, from another thread, until it is closed."""

    def __init__(self, folder: Path, console: Console, *, num_steps: int, title: str) -> None:
        path, self._folder = folder / _NAME, folder
        self._position = path.stat().st_size if path.exists() else 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="display", daemon=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(), TextColumn("{task.fields[figures]}"), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=num_steps, rate="", figures="starting workers")

    def __enter__(self) -> Display:
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._stop.set()
        self._thread.join()
        if not self._progress.disable:
            self._progress.stop()

    def rename(self, title: str) -> None:
        """Shows another title: the plan has changed."""
        self._progress.update(self._task, description=title)

    def _follow(self) -> None:
        while True:
            last = self._stop.wait(0.1)
            for position, event in read_events(self._folder, self._position):
                self._position = position
                self._show(event)
            if last:
                return

    def _show(self, event: _Event) -> None:
        if self._progress.disable or event.get("event") != "train":
            line = plain_line(event)
            if line:
                is_log = self._progress.disable
                self._progress.console.print(line, highlight=False, markup=False, soft_wrap=is_log)
            return
        figures = f"loss {event['loss']:.4f}"
        if "top_1" in event:
            figures += f"  top-1 {event['top_1']:.1%}  top-5 {event['top_k']:.1%}"
        if event.get("scale", 1.0) != 1.0:
            figures += f"  scale {event['scale']:g}"
        figures += f"  memory {event.get('driver_bytes', event['memory_bytes']) / 2**30:.1f} GiB"
        rate = f"{event['images_per_s']:,.0f} samples/s"
        if "tokens_per_s" in event:
            share = f" ({event['mfu']:.0%} of the peak)" if "mfu" in event else ""
            rate = f"{event['tokens_per_s']:,.0f} tokens/s{share}"
        self._progress.update(self._task, completed=event["iter"], rate=rate, figures=figures)
