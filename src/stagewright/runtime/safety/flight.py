"""What a worker leaves for whoever asks why it ended: its last actions, and its last words."""

from __future__ import annotations

import json
import mmap
import os
import struct
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import stagewright
from stagewright.errors import StagewrightError
from stagewright.runtime.run_folder import write_text
from stagewright.schedule import Action, Kind

_HEAD = struct.Struct("<qqdd")
"""entries so far, process id, when the process was last seen to be alive, how long it may be silent"""
_BEAT = struct.Struct("<d")
_ENTRY = struct.Struct("<dBhiih")
"""time, kind, stage, batch, microbatch, peer"""
_NUM_ENTRIES = 64
_KINDS = list(Kind)


class Flight:
    """Notes actions in a ring of fixed size; a note costs about a microsecond and survives `kill -9`."""

    def __init__(self, folder: Path, worker: int, timeout_s: float = 300.0) -> None:
        self._file = _path_of(folder, worker).open("w+b")
        self._file.truncate(_HEAD.size + _ENTRY.size * _NUM_ENTRIES)
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

    def close(self) -> None:
        """Lets the file go."""
        self._map.close()
        self._file.close()


def _path_of(folder: Path, worker: int) -> Path:
    """The file of one worker's recorder."""
    return folder / f"worker-{worker}.flight"


def _read_raw(folder: Path, worker: int) -> bytes | None:
    """The bytes of a worker's recorder; None where there is no whole one."""
    try:
        raw = _path_of(folder, worker).read_bytes()
    except OSError:
        return None
    return raw if len(raw) == _HEAD.size + _ENTRY.size * _NUM_ENTRIES and _HEAD.unpack_from(raw)[0] >= 0 else None


def read_beat(folder: Path, worker: int) -> tuple[float, float] | None:
    """When a worker was last alive, and how long it may be silent; None where there is no recorder."""
    raw = _read_raw(folder, worker)
    return _HEAD.unpack_from(raw)[2:] if raw is not None else None


def read_flight(folder: Path, worker: int) -> list[tuple[float, Action]]:
    """A worker's last actions with their times, oldest first; empty where there is no readable file."""
    raw = _read_raw(folder, worker)
    if raw is None:
        return []
    count, entries = _HEAD.unpack_from(raw)[0], []
    for number in range(max(0, count - _NUM_ENTRIES), count):
        when, kind, stage, batch, microbatch, peer = _ENTRY.unpack_from(
            raw, _HEAD.size + _ENTRY.size * (number % _NUM_ENTRIES)
        )
        if kind < len(_KINDS):
            entries.append((when, Action(_KINDS[kind], stage, batch, microbatch, peer)))
    return entries


# Last words

_ECHOES = (
    "closed by peer", "reset by peer", "timed out", "timeout", "broken pipe", "connection refused", "gloo", "nccl",
    "waited", "sent rows were not taken", "no rows came within", "did not start within", "socket", "process group",
)  # fmt: skip
"""Words in the fault of a worker that only suffered from another one's."""
_OWN_FOLDER = str(Path(stagewright.__file__).parent)
_OTHERS_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Where Python's modules and installed packages are: what is nowhere there is the user's."""


@dataclass(frozen=True)
class Confession:
    """Why a worker ended, in its own words."""

    what: str
    todo: str
    is_own: bool
    """Whether the fault began in this worker."""
    time_s: float
    lost: tuple[str, ...] = ()
    """The hosts that it could not reach any more."""


def confess(
    folder: Path, worker: int, fault: BaseException, waited: Callable[[], tuple[str, list[str]]]
) -> tuple[str, str] | None:
    """Writes down why a worker ends.

    Where the fault is another's, it writes and returns what `waited` says: for whom it waited, which hosts are lost.
    """
    place = _users_place(fault)
    if isinstance(fault, StagewrightError):
        what, todo = fault.what, fault.todo or ""
    else:
        lines = str(fault).strip().splitlines() or [""]
        what, todo = f"{type(fault).__name__}: {lines[0]}", ""
    if place is not None or not _is_echo(what):
        write_confession(folder, worker, f"{what} ({place})" if place else what, todo, is_own=True)
        return None
    said, lost = waited()
    write_confession(folder, worker, said, what, is_own=False, lost=lost)
    return said, what


def write_confession(
    folder: Path, worker: int, what: str, todo: str = "", *, is_own: bool, lost: Sequence[str] = ()
) -> None:
    """Writes a worker's last words."""
    with suppress(OSError):  # its output says it too
        told = {"what": what, "todo": todo, "own": is_own, "lost": list(lost), "time": time.time()}
        write_text(folder / f"worker-{worker}.error.json", json.dumps(told))


def _users_place(fault: BaseException) -> str | None:
    """The line of the user's own code, called by ours, in which a fault was raised; None where it was not there."""
    frames = traceback.extract_tb(fault.__traceback__)
    ours = [number for number, frame in enumerate(frames) if frame.filename.startswith(_OWN_FOLDER)]
    inside = frames[ours[-1] + 1 :] if ours else []
    packages = (*_OTHERS_FOLDERS, "<")
    theirs = [
        each for each in inside if not each.filename.startswith(packages) and "site-packages" not in each.filename
    ]
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}, in {theirs[-1].name}" if theirs else None


def _is_echo(what: str) -> bool:
    """Whether a fault is only another worker's, heard over the wire."""
    return any(word in what.lower() for word in _ECHOES)


def read_confessions(folder: Path, num_workers: int) -> dict[int, Confession]:
    """What workers wrote down about their end."""
    found = {worker: _read_confession(folder, worker) for worker in range(num_workers)}
    return {worker: told for worker, told in found.items() if told is not None}


def _read_confession(folder: Path, worker: int) -> Confession | None:
    """What one worker wrote down about its end."""
    try:
        told = json.loads((folder / f"worker-{worker}.error.json").read_text(encoding="utf-8"))
        what = str(told["what"])
        is_own = bool(told.get("own", not _is_echo(what)))
        lost = tuple(map(str, told.get("lost", ())))
        return Confession(what, str(told.get("todo") or ""), is_own, float(told.get("time", 0.0)), lost)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
