"""What a person sees of a run: two lines that live on a terminal, or a line an event.

epoch 1/4  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  61%  3,490/5,720 steps  1,488 images/s  4 min 12 s left
loss 5.84   top-1 3.1%   top-5 9.7%   memory 6.9 / 3.1 GiB   scale 32768
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from stagewright.errors import visible
from stagewright.report.figures import percent, rate, seconds
from stagewright.training.events import NO_FIGURES, Event, LogFormat, read_events

_NAMES = {
    "loss": "loss", "perplexity": "perplexity", "top_1": "top_1", "top_k": "top_k", "learning_rate": "lr",
    "norm": "norm", "mfu": "mfu", "tokens": "tokens",
}  # fmt: skip
"""The figures of a log line, and what it calls them."""
_OF_TEXT = ("learning_rate", "norm", "mfu", "tokens")
"""Those that the lines of the benchmark series have for text alone."""
_GAP = "  "


def log_lines(event: Event, log_format: LogFormat = "text") -> list[str]:
    """An event as lines of a log: every number with its name, as JSON, or as the original benchmark wrote them."""
    if log_format == "json":
        return [json.dumps({key: _finite(value) for key, value in event.items()})]
    kind = event.get("event")
    if kind in ("train", "validation"):
        return [_original_line(event) if log_format == "original" else _named_line(event)]
    return [visible(f"{kind}: {line}") for line in _words_of(event)]


def _finite(value: object) -> object:
    """The value, or None for a number that JSON has no word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _figures(event: Event, names: Sequence[str]) -> str:
    own = [name for name in event if name not in (*_NAMES, *NO_FIGURES)]  # metrics of the user's
    texts = {name: f"{event[name]:.6g}" if name in _OF_TEXT else f"{event[name]:.6f}" for name in [*names, *own]}
    return "".join(f"{_NAMES.get(name, name)}: {text}, " for name, text in texts.items())


def _speed(event: Event) -> str:
    unit, value = ("tokens", "tokens_per_s") if "tokens_per_s" in event else ("samples", "images_per_s")
    return f"{unit}/s: {event[value]:.3f}"


def _original_line(event: Event) -> str:
    names = [name for name in _NAMES if name in event and ("tokens_per_s" in event or name not in _OF_TEXT)]
    if event["event"] == "validation" and "top_1" in event and "tokens_per_s" not in event:
        names = [name for name in names if name != "loss"]
    place = f"{event['event']}: epoch {event['epoch']}, iter {event['iter']}, "
    return f"{place}{_figures(event, names)}{_speed(event)} {event['time']:.1f}"


def _named_line(event: Event) -> str:
    figures = _figures(event, [name for name in _NAMES if name in event])
    scale = f", scale: {event['scale']:g}" if event.get("scale", 1.0) != 1.0 else ""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    memory = f", memory: {_memory(event)}" if "memory_bytes" in event else ""
    place = f"{event['event']}: epoch {event['epoch']}, iter {event['iter']}, "
    return f"{place}{figures}{_speed(event)}{scale}{memory}, time: {clock}"


def _memory(event: Event) -> str:
    """`6.9 / 3.1 GiB`: the most that a worker of each stage has had."""
    each = event.get("stage_memory_bytes") or [event.get("driver_bytes", event["memory_bytes"])]
    return " / ".join(f"{value / 2**30:.1f}" for value in each) + " GiB"


def _words_of(event: Event) -> list[str]:
    """What is told of an event that is no step."""
    if event.get("event") == "plan":
        return [_plan_words(event)]
    if event.get("event") == "end":
        return list(_end_words(event))
    return [str(event["text"])] if "text" in event else []


def _plan_words(event: Event) -> str:
    """What runs where, and where the layers are cut."""
    stages, versions = event["stages"], event["versions"]
    ends = [
        f"{' … '.join(dict.fromkeys((each['layers'][0], each['layers'][-1])))} on {each['devices']}" for each in stages
    ]
    cuts = f"; cut at {', '.join(each['layers'][0] for each in stages[1:])}" if stages[1:] else ""
    how = [event["policy"]] if stages[1:] else []
    how += [f"{event['microbatches']} microbatches"] if event["microbatches"] > 1 else []
    how += [f"versions {','.join(map(str, versions))}"] if max(versions) > 1 else []
    rows = "sequences" if event["unit"] == "tokens" else event["unit"]
    return f"{event['model']}: {', '.join(ends)}{cuts}; {event['batch']:,} {rows} a step, " + ", ".join(
        [*how, event["precision"]]
    )


def _end_words(event: Event) -> Iterator[str]:
    """The loss, the rate against the prediction, the folder, and what to do next."""
    if "loss" in event:
        first, last = event["loss"]
        yield f"loss {first:.4f} → {last:.4f} after step {event['after']:,}"
    found = event["samples_per_s"] * (event["tokens"] or 1.0)
    epoch = f" · epoch {seconds(event['epoch_s'])}" if event["epoch_s"] else ""
    yield f"{found:,.1f} {event['unit']}/s · step {seconds(event['step_s'])} (median of {event['num_steps']:,}){epoch}"
    if event["predicted"] is None:
        yield "nothing was predicted: that takes a plan of `stagewright plan`, given by --plan"
    else:
        told = f"{rate(event['predicted'] * (event['tokens'] or 1.0))} {event['unit']}/s for {event['predicted_on']}"
        yield f"predicted {told}: {percent(event['samples_per_s'] / event['predicted'] - 1)} came of it"
    yield f"kept in {event['folder']}"
    yield from (f"next: {command}" for command in event["next"])


class Display:
    """Follows the events that a run tells from now on, from another thread, until it is closed."""

    def __init__(self, folder: Path, console: Console, title: str, log_format: LogFormat = "text") -> None:
        self._folder, self._console, self._title, self._format = folder, console, title, log_format
        self._position = max((position for position, _ in read_events(folder)), default=0)
        self._plan: Event = {}
        self._last: Event = {}
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="display", daemon=True)
        is_drawn = console.is_interactive and log_format == "text"
        self._live = Live(get_renderable=self._draw, console=console, transient=True) if is_drawn else None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._live is not None:
            self._live.stop()

    def _follow(self) -> None:
        while True:
            last = self._stop.wait(0.1)
            for position, event in read_events(self._folder, self._position):
                self._position = position
                self._show(event)
            if last:
                return

    def _show(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "plan":
            self._plan, self._last = event, {}
        if kind == "train" and self._live is not None:
            self._last = event
            return
        if self._live is None:
            for line in log_lines(event, self._format):
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            return
        for line in map(visible, _words_of(event) or log_lines(event)):
            told = line if kind in ("plan", "end", "validation") else f"{kind}: {line}"
            self._console.print(Padding(Text(told), (0, 0, 0, 2)))

    def _draw(self) -> Text:
        """The two lines, as wide as the terminal is now; three where two are too short for all figures."""
        width = self._console.width - 3
        if not self._last or not self._plan:
            return _folded([self._title, f"{time.monotonic() - self._began:.0f} s"], width)
        return Text("\n").join([self._progress(width), _folded(list(_details(self._last)), width)])

    def _progress(self, width: int) -> Text:
        """How far it is, how fast, and how long it takes; the bar has the room that is left."""
        event, plan = self._last, self._plan
        done, steps, per_epoch = event["iter"], plan["steps"], plan["steps_per_epoch"]
        tokens = event.get("tokens_per_s")
        epoch = f"epoch {event['epoch'] + 1}/{-(-steps // per_epoch)}" if per_epoch else plan["model"]
        left_s = (steps - done) * plan["batch"] / event["images_per_s"] + event["time"] - time.time()
        parts = [
            f"{done / steps:.0%}", f"{done:,}/{steps:,} steps",
            f"{rate(event['images_per_s'])} {plan['unit']}/s" if tokens is None else f"{rate(tokens)} tokens/s",
            f"{_duration(max(left_s, 0))} left",
        ]  # fmt: skip
        room = min(width - len(_GAP.join([epoch, *parts])) - len(_GAP), 40)
        if room < 5:
            return _folded([epoch, *parts], width)
        full = "━" * round(room * done / steps)
        return Text.assemble("  ", epoch, _GAP, (full, "green"), ("━" * (room - len(full)), "bright_black"), _GAP,
                             _GAP.join(parts))  # fmt: skip


def _details(event: Event) -> Iterator[str]:
    """The other figures of a step."""
    yield f"loss {event['loss']:.4g}"
    if "top_1" in event:
        yield f"top-1 {event['top_1']:.1%}"
        yield f"top-5 {event['top_k']:.1%}"
    yield f"memory {_memory(event)}"
    if event.get("scale", 1.0) != 1.0:
        yield f"scale {event['scale']:g}"
    if "mfu" in event:
        yield f"{event['mfu']:.0%} of the peak"


def _duration(value_s: float) -> str:
    """`42 s`, `4 min 12 s`."""
    return f"{value_s:.0f} s" if value_s < 59.5 else seconds(value_s)


def _folded(parts: Sequence[str], width: int) -> Text:
    """The parts beside one another, on as many lines as it takes; none is broken that fits on a line."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}{_GAP}{part}"
        if lines[-1] and len(longer) > width:
            lines.append(_GAP + part)
        else:
            lines[-1] = longer
    return Text("\n".join(lines))
