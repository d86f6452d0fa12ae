"""What a run tells while it runs: lines of JSON in a file, shown by whoever watches."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def end_of_events(folder: Path) -> int:
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
