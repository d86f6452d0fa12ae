"""Callbacks: what a person wants to know or to do while a run goes on, and the way to end it early.

workers ──▶ events.jsonl ──▶ Follower, in the process that speaks for the script ──▶ callbacks
   ▲                                       │
   └── after an evaluation or an epoch all wait for its answer: go on, or stop here ──┘
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stagewright.errors import UsageError
from stagewright.runtime.run_folder import ANSWER, CHECKPOINTS, EVENTS, STOP_FILE, write_text
from stagewright.training.events import BOUNDARY, NO_FIGURES, STEP, read_events


@dataclass
class Moment:
    """Where a run stands when a callback is called, and how to end it."""

    step: int
    epoch: int
    figures: Mapping[str, float]
    """What is known of it: loss, metrics, learning_rate …; after an epoch those of the evaluation too, validation_…"""
    folder: Path
    """Of the run; of the checkpoint in on_checkpoint."""
    reason: str = field(default="", init=False)
    """Why it was asked to stop."""

    def stop(self, reason: str = "a callback") -> None:
        """Ends the run: right here after an evaluation or an epoch, else at the next step that all can agree on."""
        self.reason = self.reason or reason


class Callback:
    """Override what you need; it is called in one process: the script that you started, or worker 0 under torchrun."""

    def on_step(self, now: Moment) -> None:
        """After every step; the steps that follow do not wait for it."""

    def on_evaluation(self, now: Moment) -> None:
        """After an evaluation."""

    def on_epoch(self, now: Moment) -> None:
        """After an epoch, and after its evaluation where there is one."""

    def on_checkpoint(self, now: Moment) -> None:
        """After a checkpoint was saved, in `now.folder`."""


def overrides(callbacks: Sequence[Callback], name: str) -> bool:
    """Whether any of them does something there."""
    return any(getattr(type(each), name) is not getattr(Callback, name) for each in callbacks)


@dataclass
class EarlyStopping(Callback):
    """Ends a run whose evaluations no longer get better."""

    monitor: str = "loss"
    patience: int = 3
    """Evaluations in a row that may be no better than the best."""
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    """By how much an evaluation must be better."""
    best: float = field(default=math.nan, init=False)
    waited: int = field(default=0, init=False)

    def on_evaluation(self, now: Moment) -> None:
        if self.monitor not in now.figures:
            raise UsageError(
                f"EarlyStopping monitors {self.monitor!r}, which evaluations do not have",
                f"they have {', '.join(now.figures)}",
            )
        value = now.figures[self.monitor]
        gain = self.best - value if self.mode == "min" else value - self.best
        if math.isnan(self.best) or gain > self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            now.stop(f"{self.monitor} is no better than {self.best:.6g} for {self.waited} evaluations")


class Follower:
    """Calls callbacks as a run tells what it does, from a thread of its own, until it is closed."""

    def __init__(self, folder: Path, callbacks: Sequence[Callback]) -> None:
        path = folder / EVENTS
        self._folder, self._callbacks = folder, callbacks
        self._position = path.stat().st_size if path.exists() else 0
        self._known: dict[str, float] = {}
        self._reason = ""
        self._fault: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="callbacks", daemon=True)

    def __enter__(self) -> Follower:
        if self._callbacks:
            self._thread.start()
        return self

    def __exit__(self, kind: object, *fault: object) -> None:
        self._stop.set()
        if self._callbacks:
            self._thread.join()
        if self._fault is not None and kind is None:
            raise self._fault

    def _follow(self) -> None:
        while True:
            last = self._stop.wait(0.02)
            for position, event in read_events(self._folder, self._position):
                self._position = position
                self._take(event)
            if last:
                return

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        figures = {key: float(value) for key, value in event.items() if isinstance(value, int | float)}
        place = {"step": int(event.get("iter", event.get("step", 0))), "epoch": int(event.get("epoch", 0))}
        for key in ("time", "epoch", "iter", "step"):
            figures.pop(key, None)
        if kind in ("train", STEP):
            self._known |= figures
            if kind == STEP:
                self._call("on_step", Moment(**place, figures=figures, folder=self._folder), at_once=True)
        elif kind == "validation":
            figures = {key: value for key, value in figures.items() if key not in NO_FIGURES}
            self._known |= {f"validation_{key}": value for key, value in figures.items()}
            self._call("on_evaluation", Moment(**place, figures=figures, folder=self._folder))
        elif kind == "checkpoint" and "step" in event:
            path = self._folder / CHECKPOINTS / f"step-{place['step']:08}"
            self._call("on_checkpoint", Moment(**place, figures=dict(self._known), folder=path), at_once=True)
        elif kind == BOUNDARY:
            if event["ends_epoch"]:
                self._call("on_epoch", Moment(**place, figures=dict(self._known), folder=self._folder))
            write_text(self._folder / ANSWER, json.dumps(self._reason))

    def _call(self, name: str, now: Moment, *, at_once: bool = False) -> None:
        """Calls all callbacks; one that fails ends the run, and its fault is raised where the run was started."""
        try:
            for each in self._callbacks if self._fault is None else ():
                getattr(each, name)(now)
        except BaseException as fault:
            self._fault = fault
            now.stop(f"{type(fault).__name__} in a callback: {fault}")
        self._reason = self._reason or now.reason
        if at_once and now.reason:
            write_text(self._folder / STOP_FILE, now.reason)
