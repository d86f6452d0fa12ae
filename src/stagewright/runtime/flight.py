"""The flight recorder: each worker's last actions, in a file that outlives it."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from pathlib import Path

from stagewright.schedule import Action, Kind

HEAD = struct.Struct("<qqdd")
"""entries so far, process id, when the process was last seen to be alive, how long it may be silent"""
_BEAT = struct.Struct("<d")
ENTRY = struct.Struct("<dBhiih")
"""time, kind, stage, batch, microbatch, peer"""
NUM_ENTRIES = 64
SCHEDULE_FILE = "schedule.json"
STATUSES = "statuses.json"
"""The file in a run's folder that holds what its workers do, for those who read their recorders."""
STOP_FILE = "stop"
"""The file in a run's folder by which the launcher asks workers to save and stop."""
_KINDS = list(Kind)


class Flight:
    """Notes actions in a ring of fixed size; a note costs about a microsecond and survives `kill -9`."""

    def __init__(self, folder: Path, worker: int, timeout_s: float = 300.0) -> None:
        self._file = path_of(folder, worker).open("w+b")
        self._file.truncate(HEAD.size + ENTRY.size * NUM_ENTRIES)
        self._map = mmap.mmap(self._file.fileno(), 0)
        self.count = 0
        """How many actions were noted."""
        HEAD.pack_into(self._map, 0, 0, os.getpid(), time.time(), timeout_s)

    def note(self, action: Action) -> None:
        """Notes that an action begins."""
        kind, stage, batch, microbatch, peer = action
        place = HEAD.size + ENTRY.size * (self.count % NUM_ENTRIES)
        entry = (time.time(), _KINDS.index(kind), stage, batch & 0x7FFFFFFF, microbatch, peer)
        ENTRY.pack_into(self._map, place, *entry)
        self.count += 1
        struct.pack_into("<q", self._map, 0, self.count)

    def beat(self) -> None:
        """Notes that the process is alive: one that is stopped or gone cannot."""
        if not self._map.closed:
            _BEAT.pack_into(self._map, HEAD.size - 2 * _BEAT.size, time.time())

    def close(self) -> None:
        """Lets the file go."""
        self._map.close()
        self._file.close()


def path_of(folder: Path, worker: int) -> Path:
    """The file of one worker's recorder."""
    return folder / f"worker-{worker}.flight"


def _read_raw(folder: Path, worker: int) -> bytes | None:
    """The bytes of a worker's recorder; None where there is no whole one."""
    try:
        raw = path_of(folder, worker).read_bytes()
    except OSError:
        return None
    return raw if len(raw) == HEAD.size + ENTRY.size * NUM_ENTRIES and HEAD.unpack_from(raw)[0] >= 0 else None


def read_beat(folder: Path, worker: int) -> tuple[float, float] | None:
    """When a worker was last alive, and how long it may be silent; None where there is no recorder."""
    raw = _read_raw(folder, worker)
    return HEAD.unpack_from(raw)[2:] if raw is not None else None


def read_flight(folder: Path, worker: int) -> list[tuple[float, Action]]:
    """A worker's last actions with their times, oldest first; empty where there is no readable file."""
    raw = _read_raw(folder, worker)
    if raw is None:
        return []
    count, entries = HEAD.unpack_from(raw)[0], []
    for number in range(max(0, count - NUM_ENTRIES), count):
        when, kind, stage, batch, microbatch, peer = ENTRY.unpack_from(
            raw, HEAD.size + ENTRY.size * (number % NUM_ENTRIES)
        )
        if kind < len(_KINDS):
            entries.append((when, Action(_KINDS[kind], stage, batch, microbatch, peer)))
    return entries


def write_json(path: Path, value: object) -> None:
    """Writes a small JSON file whole or not at all."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
