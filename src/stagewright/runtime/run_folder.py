"""A run's folder: it belongs to one run, and nobody else works in it meanwhile.

    results/vgg16/
        run.json         which run this is: its id, model, data and recipe, and how it ended
        run.lock         locked for as long as the run lives
        secret           what its workers sign with, meanwhile
        config.yaml      schedule.json    events.jsonl    summary.csv    record.json
        checkpoints/     logs/           worker-0.flight …

A second run is refused. `--resume` goes on with the one that is there, `--overwrite` removes it first.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import stat
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.errors import UsageError

_IDENTITY, _LOCK, _SECRET = "run.json", "run.lock", "secret"
CHECKPOINTS, LOGS = "checkpoints", "logs"
EVENTS, RECORD = "events.jsonl", "record.json"
SCHEDULE_FILE = "schedule.json"
"""What its workers do, for those who read their recorders."""
STATUSES = "statuses.json"
"""How its workers ended."""
STOP_FILE = "stop"
"""The word by which the launcher asks workers to save and stop."""
ANSWER = "answer"
"""What callbacks say where workers wait for them: why to stop, or nothing."""
SCRIPT = "script"
"""What the script has done before this run, for its workers."""
_FILES = (
    _IDENTITY, _SECRET, EVENTS, RECORD, "summary.csv", "config.yaml", SCHEDULE_FILE, STATUSES, STOP_FILE,
    "memory.json", ANSWER, SCRIPT, "worker-*.flight", "worker-*.error.json", CHECKPOINTS, LOGS, "tensorboard",
)  # fmt: skip
"""What a run leaves in its folder."""
_TRACES = (_IDENTITY, EVENTS, RECORD, f"{CHECKPOINTS}/step-*")
"""What tells that a run was here; older versions wrote no run.json."""
PRIVATE = 0o700


@dataclass
class RunFolder:
    """A run's folder, for those who work in it."""

    path: Path
    id: str
    changes: tuple[str, ...] = ()
    """What is not as it was when the run last stopped, a sentence each."""
    is_restarted: bool = False
    """Whether workers of this run ran before, of this process's launcher or of any other's."""
    state: str = "finished"
    """How the run ends when nothing goes wrong."""

    @property
    def secret(self) -> bytes:
        """What the run's workers sign with."""
        return (self.path / _SECRET).read_bytes()


@contextmanager
def held(
    folder: str | Path | None, name: str, about: Mapping[str, Any], *, resume: str | None = None,
    overwrite: bool = False, goes_on: bool = False, patience_s: float = 0.0, id: str | None = None,
) -> Iterator[RunFolder]:  # fmt: skip
    """The folder of a run while the block runs, locked and with its identity in it; afterwards it says how it ended.

    One that holds another run is refused. `about` describes the run. `goes_on` says that it was here before, as one of
    the same job of torchrun was: then its own process may only just have ended, and the lock is waited for as long as
    the patience lasts. A run whose folder was another one brings its `id`.
    """
    path = Path(folder).absolute() if folder is not None else new_folder(name)
    _make_private(path)
    goes_on = goes_on or _has_gone_on(path)
    with _locked(path, patience_s if goes_on else 0.0):
        if overwrite and not goes_on:
            _remove_run(path)
        known = read_identity(path)
        if not goes_on:
            _check_vacant(path, known, resume)
        changes = _check_same_run(path, known, about) if known else ()
        known_id = str(known["id"]) if known else id or uuid.uuid4().hex
        run, state = RunFolder(path, known_id, changes, goes_on), "failed"
        _begin(run, about)
        try:
            yield run
            state = run.state
        except (KeyboardInterrupt, SystemExit):
            state = "stopped"
            raise
        finally:
            _end(path, state, is_named=folder is not None)


def _begin(run: RunFolder, about: Mapping[str, Any]) -> None:
    """Leaves in the folder what a run has from its first moment: its identity, its secret, a place for checkpoints."""
    path = run.path
    (path / STOP_FILE).unlink(missing_ok=True)
    (path / _SECRET).unlink(missing_ok=True)
    (path / _SECRET).touch(mode=0o600, exist_ok=False)  # only this user can read it
    (path / _SECRET).write_text(secrets.token_hex(32))
    head = {"format": "stagewright.run", "version": 1, "id": run.id, "state": "running", "started": time.time()}
    write_text(path / _IDENTITY, json.dumps({**head, "job": _job_of_torchrun(), **about, "changes": run.changes}))
    try:
        (path / CHECKPOINTS).mkdir(mode=PRIVATE, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"{path / CHECKPOINTS} is a file, where checkpoints would go", "remove it") from None


def _has_gone_on(path: Path) -> bool:
    """Whether the run in a folder is that of this very job of torchrun, and not over."""
    known, job = read_identity(path) or {}, _job_of_torchrun()
    return job is not None and known.get("job") == job and known.get("state") != "finished"


def _job_of_torchrun() -> str | None:
    """What torchrun's agents call their job, which stays the same when hosts leave it or come to it."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def _end(path: Path, state: str, *, is_named: bool) -> None:
    """Writes down how a run ended; its folder is removed where nobody named and needs it."""
    known = read_identity(path) or {}
    with suppress(OSError):  # a full disk may be why it ended, which is told all the same
        write_text(path / _IDENTITY, json.dumps({**known, "state": state, "ended": time.time()}))
    if not is_named and state == "finished" and not any(path.glob(f"{CHECKPOINTS}/step-*")):
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.parent.rmdir()  # others may have runs there
    elif not is_named:
        print(f"this run is in {path}", file=sys.stderr)
    with suppress(OSError):
        (path / _SECRET).unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def new_folder(name: str) -> Path:
    """The path of a new folder under `runs`, named after the model and the time."""
    stem = f"{Path(name).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = Path("runs", stem if number == 1 else f"{stem}-{number}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=PRIVATE)
            return path.resolve()
        except FileExistsError:
            if not path.parent.is_dir():
                break
        except OSError as fault:
            raise UsageError(f"{path.absolute()}: {fault.strerror}", "name a folder with --out") from None
    raise UsageError(f"{Path('runs').absolute()} cannot take another run", "name a folder with --out")


def _make_private(path: Path) -> None:
    """Makes a folder that only this user can enter; one that is there is left as it is, unless all may write to it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE, exist_ok=True)
        mode = path.stat().st_mode
    except FileExistsError:
        raise UsageError(f"--out {path} is a file", "name a folder") from None
    except OSError as fault:
        raise UsageError(f"--out {path}: {fault.strerror}", "name a folder that can be written to") from None
    if mode & stat.S_IWOTH:
        raise UsageError(
            f"every user can write to {path}, so anyone could stop or change the run", f"name a folder inside of {path}"
        )


@contextmanager
def _locked(path: Path, patience_s: float) -> Iterator[None]:
    """Holds a folder while the block runs; refuses one that a living run holds."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as fault:
        raise UsageError(f"--out {path}: {fault.strerror}", "name a folder that can be written to") from None
    deadline = time.monotonic() + patience_s
    try:
        while not _lock(lock):
            if time.monotonic() >= deadline:
                holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
                what = f"{path} belongs to a run that is under way ({holder})"
                raise UsageError(what, "wait for it, or name another --out")
            time.sleep(0.2)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(lock)


def _lock(file: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file unless another process has; on file systems that know no locks nobody has."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_held(path: Path) -> bool:
    """Whether a living run holds a folder."""
    try:
        with (path / _LOCK).open("r+b") as file:
            return not _lock(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def read_identity(path: Path) -> dict[str, Any] | None:
    """What run.json says; None where there is none."""
    try:
        known = json.loads((path / _IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) and isinstance(known.get("id"), str) else None


def _check_vacant(path: Path, known: Mapping[str, Any] | None, resume: str | None) -> None:
    """Refuses a folder that holds another run than the one to go on with."""
    has_run = any(next(path.glob(trace), None) is not None for trace in _TRACES)
    if not has_run or resume == "auto":
        return
    what = f"{path} holds a run" + (f" of {known['model']}" if known and "model" in known else "")
    if resume is None:
        raise UsageError(what, "go on with it by --resume auto, remove it by --overwrite, or name another --out")
    named = Path(resume).resolve()
    if path.resolve() not in (named, *named.parents):
        raise UsageError(f"{what}, but --resume {resume} is of another", "name a new folder with --out")
    later = [other.name for other in (path / CHECKPOINTS).glob("step-*") if other.name > named.name]
    if named.name.startswith("step-") and later:
        raise UsageError(
            f"{path} has later checkpoints than {named.name}: {min(later)}",
            "name a new folder with --out, or remove the later ones",
        )


def _check_same_run(path: Path, known: Mapping[str, Any], about: Mapping[str, Any]) -> tuple[str, ...]:
    """What has changed since the run stopped, a sentence each; refuses another model."""
    told = [(key, known.get(key), value) for key, value in about.items() if key in known and known[key] != value]
    for key, before, now in told:
        if key in ("model", "parameters"):  # what cannot change when a run goes on
            what = f"of {before}, not of {now}" if key == "model" else "of a model with other parameters"
            raise UsageError(f"{path} holds a run {what}", "name another --out, or remove the run by --overwrite")
    return tuple(f"{key} was {before}, and is now {now}" for key, before, now in told)


def _remove_run(path: Path) -> None:
    """Removes what a run left, and nothing else."""
    for pattern in _FILES:
        for found in path.glob(pattern):
            if found.is_dir() and not found.is_symlink():
                shutil.rmtree(found)
            else:
                found.unlink()
