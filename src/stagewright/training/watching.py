"""Runs under way as a page that is served here: their events, and where the recorders say that each worker stands.

browser ──GET /live.json──▶ server ──▶ events.jsonl, worker-N.flight, run.json of every run in a folder
Prometheus ──GET /metrics──▶
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from stagewright.errors import StagewrightError, UsageError
from stagewright.report import live_page, make_report
from stagewright.report.timeline import stride
from stagewright.runtime.run_folder import SCHEDULE_FILE, is_held, read_identity
from stagewright.runtime.safety.diagnosis import Scene
from stagewright.runtime.safety.flight import Trace
from stagewright.schedule import Schedule
from stagewright.training.events import Event, read_events


class _Followed:
    """One run's folder, read on from where it was read before."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._position = 0
        self._begin()

    def _begin(self) -> None:
        self._plan: Event = {}
        self._end: Event | None = None
        self._points: list[list[Any]] = []
        self._words: list[Event] = []
        self._time = 0.0

    def _take(self, event: Event) -> None:
        kind, self._time = event.get("event"), float(event.get("time", 0.0))
        if kind == "plan":
            if not event.get("first_step"):
                self._begin()
            self._plan, self._end, self._time = event, None, event["time"]
        elif kind == "end":
            self._end = event
        elif kind == "train":
            rate = event.get("tokens_per_s", event["images_per_s"])
            memory = event.get("stage_memory_bytes") or [event.get("memory_bytes", 0)]
            loss = event["loss"] if math.isfinite(event["loss"]) else None
            self._points.append([event["iter"], loss, rate, memory, event["epoch"], event["time"]])
        elif "text" in event:
            self._words = [*self._words[-7:], event]

    def state(self) -> dict[str, Any]:
        """All that the page shows of it."""
        for position, event in read_events(self.folder, self._position):
            self._position = position
            self._take(event)
        is_running = is_held(self.folder)
        return {
            "name": self.name, "plan": self._plan, "end": self._end, "words": self._words, "time": self._time,
            "points": [*self._points[: -1 : stride(len(self._points))], *self._points[-1:]],
            "state": "running" if is_running else str((read_identity(self.folder) or {}).get("state", "ended")),
            "workers": _workers(self.folder) if is_running else [],
        }  # fmt: skip


def _workers(folder: Path) -> list[dict[str, Any]]:
    """Where each worker stands, and for whom it waits."""
    with suppress(OSError, StagewrightError):
        scene = Scene.read(Schedule.load(folder / SCHEDULE_FILE), folder, {})
        plan, waits = scene.schedule.plan, scene.waits()
        return [
            {
                "device": str(device), "stages": list(plan.stages_of[worker]), "waits": waits.get(worker, []),
                "at": (scene.place_of(worker) or "").partition(",")[0],
                "memory": Trace.memory_of(folder, worker),
            }
            for worker, device in enumerate(plan.devices)
        ]  # fmt: skip
    return []


class _Watched:
    """Every run under a folder, as one page and the data that it asks for."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder", "give the folder named by --out, or one above it")
        self._folder = folder
        self._runs: dict[Path, _Followed] = {}
        self._lock = Lock()

    def page(self) -> tuple[str, str]:
        """The page itself."""
        return "text/html", live_page(str(self._folder))

    def data(self) -> tuple[str, str]:
        """What the page asks for every second."""
        return "application/json", json.dumps({"runs": self._states(), "now": time.time()})

    def metrics(self) -> tuple[str, str]:
        """The newest figures of every run, as Prometheus reads them."""
        return "text/plain; version=0.0.4", "".join(map(_as_metrics, self._states()))

    def _states(self) -> list[dict[str, Any]]:
        with self._lock:
            for events in sorted(self._folder.rglob("events.jsonl")):
                home = events.parent
                name = home.resolve().name if home == self._folder else home.relative_to(self._folder).as_posix()
                self._runs.setdefault(home, _Followed(home, name))
            return [each.state() for each in self._runs.values() if each.folder.is_dir()]

    def report(self) -> tuple[str, str]:
        """The report of what has ended so far."""
        return "text/html", make_report(self._folder, self._folder).page.read_text(encoding="utf-8")


def _as_metrics(state: Mapping[str, Any]) -> str:
    run = json.dumps(state["name"], ensure_ascii=False)  # quotes and backslashes are written as Prometheus wants them
    lines = [f"stagewright_running{{run={run}}} {int(state['state'] == 'running')}"]
    for step, loss, rate, memory, epoch, _ in state["points"][-1:]:
        figures = {"step": step, "epoch": epoch, "loss": "NaN" if loss is None else loss, "rows_per_second": rate}
        lines += [f"stagewright_{name}{{run={run}}} {value}" for name, value in figures.items()]
        stages = enumerate(memory)
        lines += [f'stagewright_memory_bytes{{run={run},stage="{number}"}} {size}' for number, size in stages]
    return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    """Answers for four addresses, and only to those who name this machine."""

    def __init__(self, watched: _Watched, *given: Any) -> None:
        self._pages: dict[str, Callable[[], tuple[str, str]]] = {
            "/": watched.page, "/live.json": watched.data, "/report.html": watched.report, "/metrics": watched.metrics,
        }  # fmt: skip
        super().__init__(*given)

    def do_GET(self) -> None:
        """Sends a page, or says why there is none."""
        answer = self._pages.get(self.path.partition("?")[0])
        # A page of another site that has its name resolved to this machine gets nothing.
        if answer is None or self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            return self._send(404, "text/plain", "there are /, /live.json, /metrics and /report.html")
        try:
            return self._send(200, *answer())
        except StagewrightError as fault:
            return self._send(503, "text/plain", str(fault))

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        with suppress(ConnectionError):  # who asked has gone
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *given: Any) -> None:
        """Says nothing of what is asked for."""


def live_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server for the runs in a folder, reached from this machine alone; whoever has it runs and closes it."""
    watched = _Watched(folder)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, watched))
    except OSError as fault:
        raise UsageError(f"--port {port}: {fault.strerror}", "name another one; 0 takes any that is free") from None
    server.daemon_threads = True
    return server
