"""The watchdog: a worker that does not get on ends itself, and says where it stood and for whom it waited."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagewright.runtime.diagnosis import describe_wait, position, waits, where_all_stand
from stagewright.runtime.flight import Flight, write_json
from stagewright.schedule import Schedule

GRACE = 1.05
"""Transfers and collectives have the same timeout and end with a better word; this is for all else that may hang."""


@contextmanager
def watchdog(flight: Flight, schedule: Schedule, folder: Path, worker: int, timeout_s: float) -> Iterator[None]:
    """Ends this process when no action begins for the timeout while the block runs."""
    done = threading.Event()

    def watch() -> None:
        count, since = flight.count, time.monotonic()
        while not done.wait(min(1.0, timeout_s / 20)):
            if flight.count != count:
                count, since = flight.count, time.monotonic()
            elif time.monotonic() - since > timeout_s * GRACE:
                write_json(
                    folder / f"worker-{worker}.error.json", {"what": verdict(schedule, folder, worker, timeout_s)}
                )
                os._exit(1)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def verdict(schedule: Schedule, folder: Path, worker: int, timeout_s: float) -> str:
    """What a worker says that did not get on: its wait, as far as the recorders of the others can be read."""
    stands = where_all_stand(folder, len(schedule.plan.devices))
    own = [wait for wait in waits(schedule, stands) if wait.worker == worker]
    lines = describe_wait(schedule, stands, own)
    if lines:
        return f"{lines[0]} (timeout {timeout_s:g} s)"
    where = position(stands[worker].action) if worker in stands else "the start"
    return f"worker {worker} waited at {where} for more than {timeout_s:g} s"
