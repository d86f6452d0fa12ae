"""What a worker writes down about its end, for whoever started it: its own fault, or another's that it heard of."""

from __future__ import annotations

import json
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import stagewright
from stagewright.errors import StagewrightError
from stagewright.runtime.flight import write_json

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
        write_json(folder / f"worker-{worker}.error.json", told)


def _users_place(fault: BaseException) -> str | None:
    """The line of the user's own code, called by ours, in which a fault was raised; None where it was not there."""
    frames = traceback.extract_tb(fault.__traceback__)
    ours = [number for number, frame in enumerate(frames) if frame.filename.startswith(_OWN_FOLDER)]
    inside = frames[ours[-1] + 1 :] if ours else []
    theirs = [frame for frame in inside if _is_users(frame.filename)]
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}, in {theirs[-1].name}" if theirs else None


def _is_users(file: str) -> bool:
    """Whether a file is neither Python's nor of an installed package."""
    return not file.startswith((*_OTHERS_FOLDERS, "<")) and "site-packages" not in file


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
