"""What a worker leaves for whoever asks why it ended: its last actions, and its last words."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stagewright.runtime.run_folder import write_text
from stagewright.schedule import Action, Kind

_HEAD = struct.Struct("<qqdd")
"""entries so far, process id, when the process was last seen to be alive, how long it may be silent"""
_BEAT = struct.Struct("<d")
_ENTRY = struct.Struct("<dBhiih")
"""time, kind, stage, batch, microbatch, peer"""
_NUM_ENTRIES = 64
_MEMORY = struct.Struct("<q")
_SIZE = _HEAD.size + _ENTRY.size * _NUM_ENTRIES + _MEMORY.size
_KINDS = list(Kind)


class Flight:
    """Notes actions in a ring of fixed size; a note costs about a microsecond and survives `kill -9`."""

    def __init__(self, folder: Path, worker: int, timeout_s: float = 300.0) -> None:
        self._file = _path_of(folder, worker).open("w+b")
        self._file.truncate(_SIZE)
        self._map = mmap.mmap(self._file.fileno(), 0)
        self.count = 0
        """How many actions were noted."""
        _HEAD.pack_into(self._map, 0, 0, os.getpid(), time.time(), timeout_s)

    def note(self, action: Action) -> None:
        """Notes that an action begins."""
        kind, stage, batch, microbatch, peer = action
        place = _HEAD.size + _ENTRY.size * (self.count % _NUM_ENTRIES)
        entry = (time.time(), _KINDS.index(kind), stage, batch & 0x7FFFFFFF, microbatch, peer)
        _ENTRY.pack_into(self._map, place, *entry)
        self.count += 1
        struct.pack_into("<q", self._map, 0, self.count)

    def beat(self) -> None:
        """Notes that the process is alive: one that is stopped or gone cannot."""
        if not self._map.closed:
            _BEAT.pack_into(self._map, _HEAD.size - 2 * _BEAT.size, time.time())

    def note_memory(self, num_bytes: int) -> None:
        """Notes the most memory that the process has had."""
        _MEMORY.pack_into(self._map, _SIZE - _MEMORY.size, num_bytes)

    def close(self) -> None:
        """Lets the file go."""
        self._map.close()
        self._file.close()


def _path_of(folder: Path, worker: int) -> Path:
    return folder / f"worker-{worker}.flight"


class Trace(NamedTuple):
    """What a worker's recorder says."""

    beat_s: float
    """When it was last alive."""
    silence_s: float
    """How long it may be silent."""
    entries: list[tuple[float, Action]]
    """Its last actions with their times, oldest first."""

    @staticmethod
    def memory_of(folder: Path, worker: int) -> int:
        """The most memory that a worker has noted, without the rest; 0 where that cannot be read."""
        with suppress(OSError, struct.error), _path_of(folder, worker).open("rb") as file:
            file.seek(_SIZE - _MEMORY.size)
            return int(_MEMORY.unpack(file.read(_MEMORY.size))[0])
        return 0

    @classmethod
    def read(cls, folder: Path, worker: int) -> Trace | None:
        """What a worker's recorder says; None where there is no whole one."""
        try:
            raw = _path_of(folder, worker).read_bytes()
        except OSError:
            return None
        if len(raw) not in (_SIZE, _SIZE - _MEMORY.size):  # older ones end before the memory
            return None
        count, process, beat_s, silence_s = _HEAD.unpack_from(raw)
        if count < 0 or process <= 0:
            return None
        numbers = range(max(0, count - _NUM_ENTRIES), count)
        entries = (_ENTRY.unpack_from(raw, _HEAD.size + _ENTRY.size * (number % _NUM_ENTRIES)) for number in numbers)
        known = [(when, Action(_KINDS[kind], *rest)) for when, kind, *rest in entries if kind < len(_KINDS)]
        return cls(beat_s, silence_s, known)


class Confession(NamedTuple):
    """Why a worker ended, in its own words."""

    what: str
    todo: str = ""
    own: bool = True
    """Whether the fault began in this worker."""
    lost: tuple[str, ...] = ()
    """The hosts that it could not reach any more."""
    links: tuple[str, ...] = ()
    """The hosts that did not confirm what it sent them."""
    time: float = 0.0

    def write(self, folder: Path, worker: int) -> None:
        """Leaves these words in the run's folder."""
        with suppress(OSError):  # the worker's output says it too
            write_text(folder / f"worker-{worker}.error.json", json.dumps({**self._asdict(), "time": time.time()}))

    @classmethod
    def read(cls, folder: Path, worker: int) -> Confession | None:
        """What a worker left; None where that cannot be read."""
        try:
            told = json.loads((folder / f"worker-{worker}.error.json").read_text(encoding="utf-8"))
            lost, links = (tuple(map(str, told.get(key, ()))) for key in ("lost", "links"))
            todo, own = str(told.get("todo") or ""), bool(told.get("own", True))
            return cls(str(told["what"]), todo, own, lost, links, float(told.get("time", 0.0)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
