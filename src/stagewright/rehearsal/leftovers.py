"""Marks of rehearsals under way, and what is left of those that were killed.

Each rehearsal has a key, which all its names carry, and holds the lock of a file of that name while it lives. The lock
goes with the process, however that ends; so a file whose lock is free marks what may be removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from pathlib import Path

from stagewright.rehearsal.cores import end, groups, remove_group
from stagewright.rehearsal.tools import call

LOCKS = Path("/run/lock/stagewright")
_GATE = "gate"
_PREFIX = "stagewright-"


class _Mark:
    """This process's claim on a key, until it is given back or the process ends."""

    def __init__(self) -> None:
        self.key = secrets.token_hex(3)
        self.path = LOCKS / self.key
        self._file = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Gives the key back."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def new_mark() -> _Mark:
    """A key of its own, after what killed rehearsals left was removed; one process at a time does this."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    # Otherwise one could take another's new file for a stale one before its lock is held.
    gate = os.open(LOCKS / _GATE, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        clean_up()
        return _Mark()
    finally:
        os.close(gate)


def prefix(key: str) -> str:
    """How the names of a rehearsal's namespaces and control groups begin."""
    return f"{_PREFIX}{key}-"


def namespaces(start: str = _PREFIX) -> list[str]:
    """The namespaces whose names begin like this."""
    names = (line.split()[0] for line in call("ip", "netns", "list").splitlines() if line.strip())
    return sorted(name for name in names if name.startswith(start))


def keys() -> set[str]:
    """The keys of all rehearsals that have left or still hold anything."""
    names = [*namespaces(), *(folder.name for folder in groups(_PREFIX))]
    found = {match[1] for name in names if (match := re.fullmatch(rf"{_PREFIX}([0-9a-f]{{6}})-.*", name))}
    return found | {path.name for path in (LOCKS.iterdir() if LOCKS.is_dir() else ()) if path.name != _GATE}


def clean_up() -> list[str]:
    """Removes what killed rehearsals left, and returns their keys."""
    gone = [key for key in sorted(keys()) if is_stale(key)]
    for key in gone:
        remove(key)
        (LOCKS / key).unlink(missing_ok=True)
    return gone


def is_stale(key: str) -> bool:
    """Whether nobody holds the key's lock any more."""
    try:
        file = os.open(LOCKS / key, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(file)


def remove(key: str) -> None:
    """Ends the processes of a rehearsal's hosts, and removes their namespaces, links and control groups."""
    for name in namespaces(prefix(key)):
        _empty(name)
        call("ip", "netns", "delete", name)
    for folder in groups(prefix(key)):
        remove_group(folder)


def _empty(namespace: str) -> None:
    """Ends the processes in a namespace."""
    until = time.monotonic() + 30.0
    while (running := call("ip", "netns", "pids", namespace).split()) and time.monotonic() < until:
        for word in running:
            end(int(word))
        time.sleep(0.02)
