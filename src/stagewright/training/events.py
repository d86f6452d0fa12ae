"""What a run tells while it runs: lines of JSON in a file, shown by whoever watches."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from stagewright.cluster import count, format_devices
from stagewright.errors import visible
from stagewright.plan import Plan
from stagewright.training.sinks import Sink

_NAME = "events.jsonl"


class Teller:
    """Writes events, here and into every sink."""

    def __init__(self, folder: Path, sinks: Sequence[Sink] = ()) -> None:
        self._file = (folder / _NAME).open("a", encoding="utf-8", buffering=1)
        self._sinks = tuple(sinks)

    def tell(self, kind: str, **values: Any) -> dict[str, Any]:
        """Writes one event, with the time, and returns it."""
        event = {"event": kind, "time": time.time(), **values}
        with suppress(OSError):  # a disk that is full must not end the training
            self._file.write(json.dumps(event) + "\n")
            for sink in self._sinks:
                sink.write(event)
        return event

    def close(self) -> None:
        """Lets everything go."""
        with suppress(OSError):
            self._file.close()
        for sink in self._sinks:
            with suppress(OSError):
                sink.close()


def _end_of_events(folder: Path) -> int:
    """The position after all events so far."""
    path = folder / _NAME
    return path.stat().st_size if path.exists() else 0


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


def plain_line(event: dict[str, Any]) -> str | None:
    """The log line of an event, as people and scripts of the benchmark series read it."""
    kind = event.get("event")
    if kind in ("train", "validation"):
        names = ("loss", "perplexity", "top_1", "top_k")
        figures = "".join(f"{name}: {event[name]:.6f}, " for name in names if name in event)
        place = f"epoch {event['epoch']}, iter {event['iter']}"
        return f"{kind}: {place}, {figures}{_speed_of(event)} {event['time']:.1f}"
    return visible(f"{kind}: {event['text']}") if "text" in event else None


def _speed_of(event: dict[str, Any]) -> str:
    """How fast it went, in samples or, of text, in tokens; with what else a line of text says."""
    if "tokens_per_s" not in event:
        return f"samples/s: {event['images_per_s']:.3f}"
    names = {"learning_rate": "lr", "norm": "norm", "mfu": "mfu", "tokens": "tokens"}
    told = "".join(f"{short}: {event[name]:.6g}, " for name, short in names.items() if name in event)
    return f"{told}tokens/s: {event['tokens_per_s']:.3f}"


def plan_lines(plan: Plan) -> list[str]:
    """What a plan does, for a person: the rows of a step, then a line for each stage and the devices it is on."""
    many = count(plan.num_microbatches, "microbatch", "microbatches")
    versions = "" if plan.is_synchronous else f", versions {','.join(map(str, plan.versions))}"
    head = f"{plan.model}, {plan.batch} rows a step in {many}, {plan.route}, {plan.policy}{versions}"
    ends = [dict.fromkeys((stage.layers[0], stage.layers[-1])) for stage in plan.stages]
    stages = [
        f"stage {number} on {format_devices(stage.devices)}: {' … '.join(ends[number])}"
        for number, stage in enumerate(plan.stages)
    ]
    return [head, *stages, f"{count(len(plan.devices), 'worker')}, one for each device"]


def nothing_left(done: int, steps: int) -> str:
    """That a resumed run has no step left to train."""
    return f"nothing is left to train: the checkpoint is of step {done}, and --steps is {steps}"


class Display:
    """Follows the events that a run tells from now on, from another thread, until it is closed."""

    def __init__(self, folder: Path, console: Console, *, num_steps: int, title: str) -> None:
        self._folder, self._console = folder, console
        self._position = _end_of_events(folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="display", daemon=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(), TextColumn("{task.fields[figures]}"), console=console, transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task(title, total=num_steps, rate="", figures="starting workers")

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._progress is not None:
            self._progress.stop()

    def rename(self, title: str) -> None:
        """Shows another title: the plan has changed."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=title)

    def _follow(self) -> None:
        while True:
            last = self._stop.wait(0.1)
            for position, event in read_events(self._folder, self._position):
                self._position = position
                self._show(event)
            if last:
                return

    def _show(self, event: dict[str, Any]) -> None:
        if self._progress is None or self._task is None:
            line = plain_line(event)
            if line:
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            return
        if event.get("event") == "train":
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
        else:
            line = plain_line(event)
            if line:
                self._progress.console.print(line, highlight=False, markup=False)
